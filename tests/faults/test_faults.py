"""The short form of tests/faults/run.py: what a failing network does to results is nothing."""

from functools import partial
from pathlib import Path

import pytest

from faults.program import Plan
from faults.proof import BASE, TINY, check, through, through_echo, tiny_server
from faults.proxy import FAULTS, Dice
from tinkex.client.retry import RetryPolicy

SEED = 1

# The waits that a server asks for take as long as they take, more so on a busy machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and few samples that ask for themselves, so that the shared poll is used."""
    quick = partial(RetryPolicy, first_delay_s=0.02)
    monkeypatch.setattr("tinkex.client.calls.RetryPolicy", quick)
    monkeypatch.setattr("tinkex.client.poller.FEW", 4)


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
