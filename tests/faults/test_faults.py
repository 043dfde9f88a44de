"""A short form of qa/faults/run.py: a faulty network does not change results."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import tinkex
from qa.faults.comparison import BASE, TINY, check, run_through_proxy, run_with_echo, tiny_server
from qa.faults.counting_server import echo_server
from qa.faults.proxy import FAULTS, FaultSchedule, fault_proxy
from qa.faults.workload import Plan
from tinkex import types
from tinkex.client.http.retry import RetryPolicy

SEED = 1

# Waits for Retry-After cannot be shortened, and take longer on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short backoff, and a low limit of single polls, so that samples use the shared poll."""
    quick = partial(RetryPolicy, first_delay_s=0.02)
    monkeypatch.setattr("tinkex.client.http.retried_call.RetryPolicy", quick)
    monkeypatch.setattr("tinkex.client.http.shared_poll.MAX_SELF_POLLING", 4)


def test_o2_o6_h2_h4_nothing_is_lost_and_nothing_runs_twice_on_a_faulty_network(tmp_path: Path):
    plan = Plan(base_model=BASE, steps=40, samples=120, sampler_every=5, save_every=4, load_every=9)
    baseline = run_with_echo(plan, tmp_path / "baseline", seed=SEED, rate=0.0)
    faulty = run_with_echo(plan, tmp_path / "faulty", seed=SEED, rate=0.25)
    check(plan, baseline, faulty)
    assert not baseline.proxy.faults
    # The run must contain most kinds of faults, on most endpoints.
    assert len(faulty.proxy.faults) >= len(FAULTS) - 3
    endpoints = {endpoint for endpoint, _ in faulty.proxy.faults_by_endpoint}
    assert {"forward_backward", "optim_step", "asample", "retrieve_future"} < endpoints
    assert "retrieve_futures" in faulty.proxy.requests
    assert "stream_sample" in faulty.proxy.requests


def test_weights_are_bit_identical_on_a_faulty_network(tiny_model: Path, tmp_path: Path):
    plan = Plan(base_model=TINY, steps=16, samples=40, sampler_every=2, save_every=2, load_every=3)
    with tiny_server(tiny_model, tmp_path) as server:
        baseline, faulty = (
            run_through_proxy(server.url, server.data, plan, seed=SEED, rate=rate)
            for rate in (0.0, 0.25)
        )
    check(plan, baseline, faulty)
    assert len(baseline.stored.weights) == 4
    assert faulty.proxy.faults


def test_the_same_seed_gives_the_same_faults():
    one, two, other = FaultSchedule(3, 0.5), FaultSchedule(3, 0.5), FaultSchedule(4, 0.5)
    faults = [
        [schedule.next_fault("asample")[0] for _ in range(50)] for schedule in (one, two, other)
    ]
    assert faults[0] == faults[1] != faults[2]
    assert set(faults[0]) - {None} <= FAULTS.keys()


def test_sessions_models_and_samplers_are_created_once_on_a_faulty_network(tmp_path: Path):
    """Injects faults into half of the requests, for endpoints that a long run calls rarely."""
    count = 10

    def run_session(url: str) -> list[int]:
        with tinkex.ServiceClient(base_url=url) as service:
            assert service.get_server_capabilities().supported_models[0].model_name == BASE
            service.create_sampling_client(base_model=BASE)
            training = service.create_lora_training_client(BASE, rank=4)
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)
            sampling = training.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=3, seed=1)
            prompt = types.ModelInput.from_ints([1, 2])
            return sampling.sample(prompt, 1, params).result(60).sequences[0].tokens

    with (
        echo_server(tmp_path) as (url, executor),
        fault_proxy(url, seed=SEED, rate=0.5) as proxy,
        ThreadPoolExecutor(count) as pool,
    ):
        results = list(pool.map(run_session, [proxy.url] * count))
    assert results == [results[0]] * count
    assert list(executor.steps().values()) == [1] * count
    assert len(executor.prompts()) == count
    with closing(sqlite3.connect(tmp_path / "tinkex.db")) as db:
        rows = [
            db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("sessions", "models", "samplers")
        ]
        finished = db.execute("SELECT count(*) FROM sessions WHERE finish_reason = 'success'")
        assert rows == [count, count, 2 * count]
        assert finished.fetchone()[0] == count
    faulty = {endpoint for endpoint, _ in proxy.faults_by_endpoint}
    assert faulty >= {
        "client/config",
        "client/dynamic_config",
        "create_session",
        "create_sampling_session",
        "create_model",
        "get_server_capabilities",
        "save_weights_for_sampler",
        "sessions/*/finish",
        "telemetry",
    }
