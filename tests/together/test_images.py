"""
Pictures train and sample with both SDKs, whatever happens to the engine.

A step is interrupted by `kill -9` of its engine, in one model for each SDK.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdk_envs
from numerics.pictures import write_image_model
from processes import children
from serving import Server, serving
from together.images import PROGRAM, check, write_pictures
from together.official_sdk import ACCEPTED_STATUSES, environment

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

#: A dense decoder, and one with recurrent layers, which round differently in sampling.
WITHIN = {"Qwen3VL": 1e-4, "Qwen3_5": 1e-2}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "pictures.json")


@pytest.fixture(scope="module", params=WITHIN)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = write_image_model(folder / "model", family)
    with serving(f"test/{family}={model}", data=folder / "data") as server:
        yield server


@pytest.mark.parametrize("sdk", ["0.36.0", "tinkex"])
def test_colors_are_learned_from_pictures(sdk: str, server: Server, pictures: Path) -> None:
    (family,) = {name for name in WITHIN if name in str(server.data)}
    (web,) = children(server.process.pid)
    (engine,) = children(web)
    interpreter = sys.executable if sdk == "tinkex" else sdk_envs.ensure(sdk)
    module = "tinkex" if sdk == "tinkex" else "tinker"
    killed = [str(engine)] if (sdk == "tinkex") == (family == "Qwen3_5") else []
    done = subprocess.run(
        [interpreter, PROGRAM, module, f"test/{family}", pictures, *killed],
        env=environment(server.url),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    details = f"{done.stderr[-4000:]}\nserver: {''.join(server.log[-60:])}"
    assert done.stdout, details
    assert done.returncode in ACCEPTED_STATUSES, details
    check(json.loads(done.stdout.splitlines()[-1]), pictures, within=WITHIN[family])
    assert bool(killed) == (engine not in children(web))
