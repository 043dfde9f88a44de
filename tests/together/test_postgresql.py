"""A server with PostgreSQL: training continues after kills, and a second server does not start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

import tinkex
from ports import free_port
from postgres import Postgres
from processes import children, has_exited
from serving import TINY, Server, serving
from tinkex import types

STEPS = 4


def datum() -> types.Datum:
    tokens = [5, 9, 11, 20, 7, 13, 3, 8, 2]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
    )


def kill_all(server: Server) -> None:
    """Kills supervisor, web process and engine at once, as a power failure would."""
    web = children(server.process.pid)
    engines = [engine for one in web for engine in children(one)]
    for pid in (server.process.pid, *web, *engines):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    assert all(has_exited(pid) for pid in (*web, *engines))


def losses(training: tinkex.TrainingClient, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        passed = training.forward_backward([datum()], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        found.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return found


@pytest.mark.timeout(180)
def test_training_continues_after_all_processes_were_killed(
    tiny_model: Path, postgres: Postgres, tmp_path: Path
) -> None:
    url = postgres.database()
    model, data = f"{TINY}={tiny_model}", tmp_path / "data"
    where = ("--db", url, "--port", str(free_port()))
    with serving(model, data=data, args=where) as server:
        service = tinkex.ServiceClient(base_url=server.url)
        training = service.create_lora_training_client(TINY, rank=8, seed=3)
        before = losses(training, STEPS)
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=4, seed=7, temperature=1.0)
        prompt = types.ModelInput.from_ints([5, 9, 11])
        sampled = sampler.sample(prompt, 1, params).result().sequences[0].tokens
        # Accepted; maybe not finished when the processes are killed.
        passed = training.forward_backward([datum()], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        kill_all(server)
    with serving(model, data=data, args=where) as server:
        again = passed.result(60).metrics["loss:sum"]
        stepped.result(60)
        after = losses(training, STEPS)
        # A lost or repeated step would change the losses.
        everything = [*before, again, *after]
        assert everything == sorted(everything, reverse=True)
        assert sampler.sample(prompt, 1, params).result().sequences[0].tokens == sampled
        refused_beside(model, url, tmp_path / "other")
        service.close("success").result()
    assert not (data / "tinkex.db").exists()
    assert sa.make_url(url).password not in "".join(server.log)


def refused_beside(model: str, url: str, data: Path) -> None:
    """A second server with the same database does not start, even with another data folder."""
    command = [sys.executable, "-m", "tinkex.cli.main", "serve", model, "--port", "0"]
    second = subprocess.run(
        [*command, "--data", str(data), "--db", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert second.returncode != 0
    assert second.stdout == ""
    assert "another server (tinkex serve, process " in second.stderr
    assert "Use that server, stop it, or choose another database with --db." in second.stderr
