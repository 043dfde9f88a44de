"""
Workers on a Ray cluster: a head and two nodes on this machine, PostgreSQL, one web process.

The workers are real, with the tiny model. A client trains and samples while a worker's process is
killed, a node is lost, and replicas leave and come back.
"""

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tinkex
from ray_cluster import RayCluster, ray_cluster
from serving import TINY
from tinkex import types

pytestmark = [pytest.mark.timeout(600), pytest.mark.cluster]

DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
]


@dataclass
class Fleet:
    """A cluster, and the command line that manages it."""

    cluster: RayCluster
    env: dict[str, str]
    file: Path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.cli", "fleet", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.env},
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def workers(self) -> dict[str, dict]:
        found = json.loads(self.run("status", "-f", "json").stdout)["workers"]
        return {worker["name"]: worker for worker in found}

    def ready(self) -> set[str]:
        return {name for name, worker in self.workers().items() if worker["state"] == "ready"}


@pytest.fixture(scope="module")
def shared(postgres, tmp_path_factory) -> dict[str, str]:
    """What web processes and nodes know: where they meet."""
    return {
        "TINKEX_DB": postgres.database(),
        "TINKEX_STORAGE": str(tmp_path_factory.mktemp("storage")),
        "TINKEX_DATA": str(tmp_path_factory.mktemp("data")),
        "TINKEX_TAKEOVER_S": "5",
    }


@pytest.fixture(scope="module")
def fleet(shared, tiny_model, tmp_path_factory) -> Iterator[Fleet]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (pip install 'tinkex[ray]')")
    file = tmp_path_factory.mktemp("fleet") / "fleet.toml"
    file.write_text(
        f'[[workers]]\nmodel = "{TINY}={tiny_model}"\nreplicas = 2\ngpus = 0\n'
        "resources = { place = 1 }\nsettings = { threads = 1 }\n"
    )
    with ray_cluster(shared, nodes=2) as cluster:
        yield Fleet(cluster, cluster.env, file)


@pytest.fixture(scope="module")
def url(shared, tmp_path_factory) -> Iterator[str]:
    """The web process: it does not know that there is Ray."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tinkex.cli", "web", "--port", "0"),
            *("--data", str(tmp_path_factory.mktemp("web"))),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **shared},
    )
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def step(training: tinkex.TrainingClient) -> None:
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    passed.result()


def wait_for(fleet: Fleet, names: set[str]) -> None:
    """Each look starts a process, so there are few of them."""
    for _ in range(60):
        if fleet.ready() == names:
            return
    raise AssertionError(fleet.workers())


def test_workers_are_placed_restarted_moved_scaled_and_drained(fleet, url):
    both = {f"{TINY}#0", f"{TINY}#1"}
    started = fleet.run("up", str(fleet.file))
    assert "2 workers started." in started.stderr
    assert fleet.ready() == both
    assert "Nothing to change." in fleet.run("up", str(fleet.file)).stderr

    service = tinkex.ServiceClient(base_url=url, api_key="tml-test")
    models = [service.create_lora_training_client(TINY, rank=4) for _ in range(2)]
    for training in models:
        step(training)

    # A worker's process is killed: its actor starts another one.
    before = fleet.workers()
    os.kill(before[f"{TINY}#0"]["pid"], signal.SIGKILL)
    for training in models:
        step(training)
    wait_for(fleet, both)
    after = fleet.workers()[f"{TINY}#0"]
    assert after["crashes"] == 1
    assert after["pid"] != before[f"{TINY}#0"]["pid"]

    # A node is lost: its worker waits for another node, and its models go to the other worker.
    fleet.cluster.lose_node()
    for training in models:
        step(training)
    states = sorted(worker["state"] for worker in fleet.workers().values())
    assert states == ["ready", "waiting"]
    fleet.cluster.add_node()
    wait_for(fleet, both)

    # One replica leaves, with its models; then it comes back.
    drained = fleet.run("scale", TINY, "1")
    assert f"{TINY}#1: ended\n" in drained.stderr
    assert fleet.ready() == {f"{TINY}#0"}
    for training in models:
        step(training)
    sampler = models[0].save_weights_and_get_sampling_client()
    sampled = sampler.sample(
        types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2)
    )
    assert len(sampled.result().sequences[0].tokens) == 2
    assert "1 worker started." in fleet.run("scale", TINY, "2").stderr
    assert fleet.ready() == both

    assert "2 workers ended." in fleet.run("down").stderr
    assert fleet.workers() == {}


def test_mistakes_are_named(fleet, tmp_path):
    nobody = fleet.run("scale", "other", "2", check=False)
    assert nobody.returncode == 1
    assert "the fleet has no workers of other" in nobody.stderr
    refused = fleet.run("status", "--address", "127.0.0.1:9", check=False)
    assert "there is no Ray cluster at 127.0.0.1:9" in refused.stderr
    bad = tmp_path / "fleet.toml"
    bad.write_text("[[workers]]\n")
    assert "model = {} is not allowed" in fleet.run("up", str(bad), check=False).stderr


def test_a_program_without_the_token_is_refused(fleet):
    done = subprocess.run(
        [sys.executable, "-c", "import ray; ray.init(logging_level='ERROR'); print(ray.nodes())"],
        env={**os.environ, **fleet.env, "RAY_AUTH_TOKEN": secrets.token_hex(16)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "NodeID" not in done.stdout
    assert "Authentication token is missing or incorrect" in done.stderr
