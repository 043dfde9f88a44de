"""The short form of qa/faults/run.py: what a failing network does to results is nothing."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import tinkex
from qa.faults.comparison import BASE, TINY, check, through, through_echo, tiny_server
from qa.faults.counting_server import echoing
from qa.faults.proxy import FAULTS, Dice, in_front_of
from qa.faults.workload import Plan
from tinkex import types
from tinkex.client.http.retry import RetryPolicy

SEED = 1

# The waits that a server asks for take as long as they take, more so on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and few samples that ask for themselves, so that the shared poll is used."""
    quick = partial(RetryPolicy, first_delay_s=0.02)
    monkeypatch.setattr("tinkex.client.http.api_calls.RetryPolicy", quick)
    monkeypatch.setattr("tinkex.client.http.polling.FEW", 4)


def test_o2_o6_h2_h4_nothing_is_lost_and_nothing_runs_twice_on_a_failing_network(tmp_path: Path):
    plan = Plan(base_model=BASE, steps=40, samples=120, sampler_every=5, save_every=4, load_every=9)
    calm = through_echo(plan, tmp_path / "calm", seed=SEED, rate=0.0)
    faulty = through_echo(plan, tmp_path / "faulty", seed=SEED, rate=0.25)
    check(plan, calm, faulty)
    assert not calm.proxy.met
    # Most kinds, on most endpoints: the run is not an easy one by accident.
    assert len(faulty.proxy.met) >= len(FAULTS) - 3
    endpoints = {endpoint for endpoint, _ in faulty.proxy.met_by}
    assert {"forward_backward", "optim_step", "asample", "retrieve_future"} < endpoints
    assert "retrieve_futures" in faulty.proxy.requests
    assert "stream_sample" in faulty.proxy.requests


def test_the_weights_are_the_same_to_the_last_bit(tiny_model: Path, tmp_path: Path):
    plan = Plan(base_model=TINY, steps=16, samples=40, sampler_every=2, save_every=2, load_every=3)
    with tiny_server(tiny_model, tmp_path) as server:
        calm, faulty = (
            through(server.url, server.data, plan, seed=SEED, rate=rate) for rate in (0.0, 0.25)
        )
    check(plan, calm, faulty)
    assert len(calm.stored.weights) == 4
    assert faulty.proxy.met


def test_the_same_seed_brings_the_same_faults():
    one, two, other = Dice(3, 0.5), Dice(3, 0.5), Dice(4, 0.5)
    thrown = [[dice.throw("asample")[0] for _ in range(50)] for dice in (one, two, other)]
    assert thrown[0] == thrown[1] != thrown[2]
    assert set(thrown[0]) - {None} <= FAULTS.keys()


def test_sessions_models_and_samplers_begin_once_and_end_on_a_failing_network(tmp_path: Path):
    """The endpoints that a long run asks a few times only, spoiled every second time."""
    count = 10

    def whole_life(url: str) -> list[int]:
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
        echoing(tmp_path) as (url, executor),
        in_front_of(url, seed=SEED, rate=0.5) as proxy,
        ThreadPoolExecutor(count) as pool,
    ):
        lives = list(pool.map(whole_life, [proxy.url] * count))
    assert lives == [lives[0]] * count
    assert list(executor.steps().values()) == [1] * count
    assert len(executor.prompts()) == count
    with closing(sqlite3.connect(tmp_path / "tinkex.db")) as db:
        rows = [
            db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("sessions", "models", "samplers")
        ]
        ended = db.execute("SELECT count(*) FROM sessions WHERE finish_reason = 'success'")
        assert rows == [count, count, 2 * count]
        assert ended.fetchone()[0] == count
    spoiled = {endpoint for endpoint, _ in proxy.met_by}
    assert spoiled >= {
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
