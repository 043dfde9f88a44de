"""The processes of an engine over two ranks: all end together, and nothing is lost."""

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

import sdk_envs
import tinkex
from engine.test_process import Engine, pass_of, step_of
from processes import children, has_exited
from qa.chaos.process_kills import run
from serving import TINY, serving
from tinkex import types
from tinkex.wire import engine_protocol
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


def test_a_rank_that_is_killed_ends_the_engine_in_the_same_way(tiny_model: Path) -> None:
    with process(tiny_model) as engine:
        assert engine.report().ready.device == "cpu"
        engine.create("m")
        assert engine.ask(run_pass=pass_of("m")).done.result
        (other,) = children(engine.process.pid)
        os.kill(other, signal.SIGKILL)
        # The server then knows that it was not the work that ended it.
        assert engine.process.wait(20) == -signal.SIGKILL
        assert "rank 1 ended (SIGKILL)" in engine.log.read_text()


def test_no_rank_outlives_rank_0_even_if_it_is_stopped(tiny_model: Path) -> None:
    with process(tiny_model) as engine:
        assert engine.report().ready.device == "cpu"
        (other,) = children(engine.process.pid)
        os.kill(other, signal.SIGSTOP)
        engine.process.kill()
        assert has_exited(other)
        # Only then is the socket at its end, and a new engine may start.
        engine.stream.read()


def test_a_rank_that_does_not_answer_ends_the_engine_with_a_reason(tiny_model: Path) -> None:
    with process(tiny_model, rank_timeout_s=15.0) as engine:
        assert engine.report().ready.device == "cpu"
        engine.create("m")
        (other,) = children(engine.process.pid)
        os.kill(other, signal.SIGSTOP)
        engine.order(run_pass=pass_of("m"))
        assert engine.process.wait(50) == engine_protocol.RANK_LOST_STATUS
        assert "did not answer for 15 s" in engine.log.read_text()
        assert has_exited(other)


@pytest.mark.parametrize("how", ["dies", "never_joins"])
def test_a_rank_that_never_joins_ends_the_engine_with_a_reason(
    how: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = {"dies": "os._exit(5)", "never_joins": "time.sleep(600)"}[how]
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys, time\nif '--rank' in sys.orig_argv:\n    {end}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with process(tiny_model, rank_timeout_s=3.0) as engine:
        status = engine.process.wait(30)
        log = engine.log.read_text()
    if how == "dies":
        assert (status, "rank 1 ended (exit status 5)" in log) == (5, True), log
    else:
        assert status == engine_protocol.RANK_LOST_STATUS
        assert "one did not answer for 3 s" in log


def test_a_failure_on_one_rank_only_ends_the_engine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
if "--rank" in sys.orig_argv:
    from tinkex.engine import engine
    def fails(*args, **kwargs):
        raise RuntimeError("only here")
    engine.optimizer_step = fails
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with process(tiny_model, rank_timeout_s=15.0) as engine:
        assert engine.report().ready.device == "cpu"
        engine.create("m")
        engine.order(optim_step=step_of("m"))
        assert engine.process.wait(50) == engine_protocol.RANK_LOST_STATUS
        assert "RuntimeError: only here" in engine.log.read_text()


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


@pytest.mark.sdk
@pytest.mark.timeout(240)
def test_kills_of_ranks_change_no_result_of_either_client(tiny_model: Path, tmp_path: Path) -> None:
    report = run(
        model=tiny_model,
        data=tmp_path / "data",
        sdk=sdk_envs.ensure("0.36.0"),
        seed=5,
        kills=2,
        deterministic=True,
        ranks=2,
        steps=4,
    )
    details = "\n".join([*report.lines(), *map(str, report.violations), *report.log[-100:]])
    assert report.is_good(deterministic=True), details
