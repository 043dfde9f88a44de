"""The processes of an engine over two ranks: all end together, and nothing is lost."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tinkex
from engine import test_process
from engine.test_process import Engine
from processes import children, has_exited
from ranks.ranked import expect_tests
from serving import TINY, serving
from tinkex import types
from tinkex.wire.engine_settings import EngineSettings

pytestmark = pytest.mark.timeout(120)

RANKS = ("--gpus-per-replica", "2", "--device", "cpu")


@contextmanager
def process(folder: Path, **settings: float) -> Iterator[Engine]:
    """An engine process of two ranks, which may still be loading."""
    ours, theirs = socket.socketpair()
    made = EngineSettings(
        name="tiny",
        folder=folder,
        threads=1,
        device="cpu",
        ranks=2,
        **settings,  # type: ignore[arg-type]
    )
    command = [sys.executable, "-m", "tinkex.engine", "--fd", str(theirs.fileno())]
    with tempfile.NamedTemporaryFile() as log, ours:
        started = subprocess.Popen(
            [*command, "--settings", made.to_json()], pass_fds=(theirs.fileno(),), stderr=log
        )
        theirs.close()
        with ours.makefile("rb") as stream:
            try:
                yield Engine(ours, stream, started, Path(log.name))
            finally:
                started.kill()
                started.wait()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    """That of the tests of one process, with two ranks."""
    with process(tiny_model) as engine:
        assert engine.report().ready.device == "cpu"
        yield engine


for name, value in vars(test_process).items():
    if name.startswith("test_") and "engine" in inspect.signature(value).parameters:
        globals()[name] = value

expect_tests(globals(), 10)


def test_no_rank_outlives_rank_0_even_if_it_is_stopped(tiny_model: Path) -> None:
    with process(tiny_model) as engine:
        assert engine.report().ready.device == "cpu"
        (other,) = children(engine.process.pid)
        os.kill(other, signal.SIGSTOP)
        engine.process.kill()
        assert has_exited(other)
        # Only then is the socket at its end, and a new engine may start.
        engine.stream.read()


@pytest.mark.timeout(240)
def test_a_server_over_two_ranks_loses_nothing_when_any_of_them_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokens = list(range(20, 28))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},
    )
    losses: dict[bool, list[float]] = {}
    samples: dict[bool, list[int]] = {}
    with serving(
        f"{TINY}={tiny_model}", data=tmp_path / "data", args=(*RANKS, "--deterministic")
    ) as one:
        (web,) = children(one.process.pid)
        for kill in (False, True):
            with tinkex.ServiceClient(base_url=one.url) as service:
                training = service.create_lora_training_client(TINY, rank=4, seed=7)
                losses[kill] = []
                for step in range(6):
                    passed = training.forward_backward([datum], "cross_entropy")
                    stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
                    if kill and step in (2, 4):
                        (engine,) = children(web)
                        victim = children(engine)[0] if step == 2 else engine
                        os.kill(victim, signal.SIGKILL)
                    stepped.result(60)
                    losses[kill].append(float(passed.result(60).metrics["loss:sum"]))
                sampler = training.save_weights_and_get_sampling_client()
                asked = types.SamplingParams(max_tokens=12, seed=3, stop=[])
                answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, asked).result(60)
                samples[kill] = list(answer.sequences[0].tokens)
        (engine,) = children(web)
        ranks = [engine, *children(engine)]
        assert len(ranks) == 2
    assert losses[True] == losses[False]
    assert samples[True] == samples[False]
    assert all(has_exited(pid) for pid in ranks)
    assert any("killed from outside" in line for line in one.log)
