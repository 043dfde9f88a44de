"""
Fuzz tests: no response is a 5xx, none hangs, and no work fails with a server error.

    python -m qa.fuzz.run [--bodies 50000] [--graphs 1000] [--cases 100] [--passes 3000] [--images 2000]
        [--seed N]

`make fuzz` runs all of it. Bodies are mutations of recorded requests of official clients
(tests/data/wire), sent to the application in this process; graphs are hostile custom losses for the
engine's interpreter, and images are hostile files for its reader. Schemathesis generates JSON from
the server's OpenAPI page, and a real engine runs mutated passes and hostile images. The same seed
repeats a run. `python -m qa.fuzz.write_corpus` writes the corpus that `make test` sends.
"""

import argparse
import asyncio
import base64
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from PIL import Image

from processes import children
from qa.fuzz import request_bodies as bodies
from qa.fuzz.hostile_images import encoded, hostile_image, resident_bytes
from qa.fuzz.mutations import mutate_bytes, with_odd_values
from serving import TINY, serving
from tinkex.conformance.raw_client import Failure, Remote, TrainingModel, Unexpected
from tinkex.testing import write_tiny_model
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinkex.wire.proto import tinkex_wire_pb2 as pb

#: A tiny model with experts.
MIXTURE = "test/mixture"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = ROOT / "tests" / "data" / "wire"
#: A response that takes longer counts as a hang. The servers here have short long polls.
MAX_RESPONSE_S = 20
MEBIBYTE = 2**20
#: Allowed memory in the last quarter of a run relative to the first.
MAX_GROWTH = 1.1
#: Memory that an engine may need more after its first passes, samples and images.
MAX_IMAGE_GROWTH_BYTES = 600 * MEBIBYTE
#: Memory limit of the process that runs the graphs.
GRAPH_BYTES = 8 * 2**30


def schemathesis(url: str, *, cases: int, seed: int = 1, timeout_s: float = 600) -> str:
    """The output of schemathesis; raises AssertionError for findings."""
    remote = Remote(url)
    model = remote.model()
    sampler = remote.sampler(base_model=remote.base_model)
    path = model.save_state("fuzz")
    future = remote.request_id(model.submit_step())
    ids = {
        "session_id": [remote.session],
        "model_id": [model.model_id],
        "training_run_id": [model.model_id],
        "run_id": [model.model_id],
        "base_model": [remote.base_model],
        "sampling_session_id": [sampler.sampling_session_id],
        "request_id": [future],
        "model_path": [path],
        "tinker_path": [path],
        "path": [path, "named"],
        "source_path": [path],
    }
    options = [
        *("--checks", "not_a_server_error", "--phases", "fuzzing", "--mode", "all"),
        *("--max-examples", str(cases), "--seed", str(seed), "--no-shrink", "--no-color"),
        *("--request-timeout", str(MAX_RESPONSE_S), "--continue-on-failure", "--warnings", "off"),
        *("--generation-database", ":memory:", "--suppress-health-check", "all"),
        # This route deletes the caller's key, which the other requests need.
        *("--exclude-path", "/api/v1/auth/apikey/me", "-H", "X-API-Key: tml-fuzz"),
        # A stream that does not end by itself; `tests/server/api/test_console.py` reads it.
        *("--exclude-path", "/api/v1/console/live"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options],
        env={
            **os.environ,
            "FUZZ_IDS": json.dumps(ids),
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-12_000:]
    return done.stdout


@dataclass
class Findings:
    """Results of protobuf bodies."""

    statuses: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    #: Bodies with a 5xx status, no response, or work that failed with a server error.
    wrong: list[str] = field(default_factory=list)


def recorded_passes() -> list[bytes]:
    """Bodies of passes that the newest official client sent."""
    recorded = json.loads((RECORDED / "0.36.0" / "forward_backward.json").read_text())
    return [base64.b64decode(request["body_base64"]) for request in recorded]


def protobuf(url: str, *, bodies: int, seed: int = 1, base_model: str | None = None) -> Findings:
    """Sends mutated passes to a real model and waits for their results."""
    remote = Remote(url, base_model=base_model)
    draw = random.Random(seed)
    found = Findings()
    passes = recorded_passes()
    model: TrainingModel | None = None
    for _ in range(bodies):
        if model is None:
            model = remote.model()
        message = pb.ForwardBackwardRequest.FromString(draw.choice(passes))
        message.model_id, message.seq_id = model.model_id, model.next
        odd = draw.random() < 0.5
        body = (
            with_odd_values(message, draw)
            if odd
            else mutate_bytes(message.SerializeToString(), draw)
        )
        try:
            answer = remote.post("forward_backward", body, Content_Type=PROTOBUF_TYPE)
        except Unexpected as error:
            found.wrong.append(f"{error}: {base64.b64encode(body).decode()}")
            continue
        found.statuses[answer.status] += 1
        if answer.status >= 500:
            found.wrong.append(f"{answer}: {base64.b64encode(body).decode()}")
        if answer.status != 200:
            continue
        if not _is_next(body, model):
            model = None  # another step number or model: nothing to wait for
            continue
        model.number()
        settled = remote.wait_for(remote.request_id(answer), f"{PROTOBUF_TYPE}, application/json")
        outcome = "done" if settled.is_protobuf else str(settled.json.get("category", "done"))
        found.outcomes[outcome] += 1
        if outcome not in ("done", "user"):
            found.wrong.append(f"{settled}: {base64.b64encode(body).decode()}")
    return found


def _is_next(body: bytes, model: TrainingModel) -> bool:
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return False
    return (message.model_id, message.seq_id) == (model.model_id, model.next)


def fuzz_server(cases: int, passes: int, seed: int) -> list[str]:
    """Runs schemathesis and mutated passes against a server with a real engine."""
    from numerics.mixtures import write_mixture  # tests of this module need no transformers

    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", arch="llama")
        mixture = write_mixture(Path(folder) / "mixture", "Qwen3Moe")
        os.environ["TINKEX_LONG_POLL_S"] = "2"
        served = (f"{TINY}={model}", f"{MIXTURE}={mixture}")
        with serving(*served, data=Path(folder) / "data") as server:
            try:
                print(schemathesis(server.url, cases=cases, seed=seed))
            except AssertionError as error:
                print("".join(server.log[-200:]), file=sys.stderr)
                return [str(error)]
            wrong = []
            for base_model in (TINY, MIXTURE):
                found = protobuf(server.url, bodies=passes, seed=seed, base_model=base_model)
                counts = f"{dict(found.statuses)}, futures: {dict(found.outcomes)}"
                print(f"passes of {base_model}: {counts}")
                wrong += found.wrong
            return wrong


def fuzz_application(count: int, seed: int) -> list[str]:
    """Sends mutated bodies to the application in this process."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_bodies(Path(folder), count, seed))
    first, last = found.quarters()
    print(
        f"bodies: {count} in {found.elapsed_s:.0f} s, slowest {found.slowest_s:.2f} s, "
        f"{dict(found.statuses)}, {len(found.interesting)} kinds of answers; resident memory "
        f"{first / MEBIBYTE:.0f} MiB in the first quarter, {last / MEBIBYTE:.0f} in the last"
    )
    if last > first * MAX_GROWTH + 20 * MEBIBYTE:
        found.wrong.append(f"memory grew from {first:.0f} to {last:.0f} bytes")
    return found.wrong


async def _bodies(folder: Path, count: int, seed: int) -> bodies.Findings:
    async with bodies.app_client(folder) as client:
        return await bodies.fuzz(client, bodies=count, seed=seed, progress=print)


def findings_of(
    module: str, count: int, seed: int, limit_memory: Callable[[], None] | None = None
) -> dict[str, Any] | str:
    """What a program found in a process of its own; a sentence's end if the process failed."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(count), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        preexec_fn=limit_memory,
        check=False,
    )
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fuzz_graphs(count: int, seed: int) -> list[str]:
    """Runs hostile graphs in a process with limits on memory and time."""
    found = findings_of(
        "qa.fuzz.custom_loss_graphs",
        count,
        seed,
        limit_memory=lambda: resource.setrlimit(resource.RLIMIT_DATA, (GRAPH_BYTES, GRAPH_BYTES)),
    )
    if isinstance(found, str):
        return [f"the interpreter {found}"]
    wrong: list[str] = found.pop("wrong")
    print(f"graphs: {count}, {found}")
    if found["last_quarter_bytes"] > found["first_quarter_bytes"] * MAX_GROWTH + 50 * MEBIBYTE:
        wrong.append("memory grew")
    return wrong


def fuzz_images(count: int, seed: int) -> list[str]:
    """Reads hostile images in a process, then sends them to a server with a real engine."""
    from numerics.pictures import write_image_model

    read = findings_of("qa.fuzz.hostile_images", count, seed)
    if isinstance(read, str):
        return [f"the reader of images {read}"]
    wrong: list[str] = read.pop("wrong")
    print(f"images: {count}, {read}")
    with tempfile.TemporaryDirectory() as folder:
        model = write_image_model(Path(folder) / "model", "Qwen3VL")
        with serving(f"{TINY}={model}", data=Path(folder) / "data") as server:
            (web,) = children(server.process.pid)
            engines = children(web)
            before = resident_bytes(engines[0])
            found = images(server.url, count=count, seed=seed)
            if children(web) != engines:
                found.wrong.append("the engine did not survive the images")
            grown = resident_bytes(engines[0]) - before
            if grown > MAX_IMAGE_GROWTH_BYTES:
                found.wrong.append(f"the engine grew by {grown} bytes")
    print(
        f"images to an engine: {dict(found.statuses)}, futures: {dict(found.outcomes)}; it grew by "
        f"{grown / MEBIBYTE:.0f} MiB"
    )
    return wrong + found.wrong


def images(url: str, *, count: int, seed: int) -> Findings:
    """Samples and passes with hostile images; between them, good ones keep their logprobs."""
    remote = Remote(url)
    draw = random.Random(seed)
    found = Findings()
    model = remote.model()
    good = ImageChunk(data=encoded(Image.new("RGB", (32, 16), "red"), "png"), format="png")
    first: list[float] | None = None
    for index in range(count):
        kind, image = hostile_image(draw) if index % 50 else ("good", good)
        prompt = ModelInput(
            chunks=[EncodedTextChunk(tokens=[1, 2]), image, EncodedTextChunk(tokens=[3])]
        )
        if index % 2:
            body = {"base_model": remote.base_model, "sampling_params": {"max_tokens": 1}}
            answer = remote.post("asample", {**body, "prompt": prompt.model_dump()})
        else:
            # Its inputs would have to be as long as the prompt, which is counted first.
            datum = {"model_input": prompt.model_dump(), "loss_fn_inputs": targets(image, good)}
            passed = {"data": [datum], "loss_fn": "cross_entropy"}
            numbered = {"model_id": model.model_id, "seq_id": model.number()}
            answer = remote.post("forward", {"forward_input": passed, **numbered})
        found.statuses[answer.status] += 1
        settled = remote.result(remote.request_id(answer))
        outcome = settled.category if isinstance(settled, Failure) else "done"
        found.outcomes[outcome] += 1
        if outcome not in ("done", "user"):
            found.wrong.append(f"image {index} of seed {seed}, {kind}: {settled}")
        if image is good and isinstance(settled, dict):
            logprobs = settled["loss_fn_outputs"][0]["logprobs"]["data"]
            first = first or logprobs
            if logprobs != first:
                found.wrong.append(f"image {index}: a good image has other logprobs than before")
    return found


def targets(image: ImageChunk, good: ImageChunk) -> dict[str, Any]:
    """Of a good image, which has 8 tokens; of others they have the wrong length."""
    length = 3 + (8 if image is good else 1)
    return {
        "target_tokens": {"data": [0] * length, "dtype": "int64", "shape": [length]},
        "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="schemathesis cases per route")
    parser.add_argument("--passes", type=int, default=3_000, help="passes for a real engine")
    parser.add_argument("--bodies", type=int, default=50_000, help="bodies for the application")
    parser.add_argument(
        "--graphs", type=int, default=1_000, help="custom losses for the interpreter"
    )
    parser.add_argument("--images", type=int, default=2_000, help="images for a real engine")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    wrong = fuzz_application(options.bodies, options.seed) if options.bodies else []
    wrong += fuzz_graphs(options.graphs, options.seed) if options.graphs else []
    wrong += fuzz_images(options.images, options.seed) if options.images else []
    if options.cases or options.passes:
        wrong += fuzz_server(options.cases, options.passes, options.seed)
    print("\n".join(wrong) or "no findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
