"""Counters, gauges and latencies of the clients in a process."""

import json
import os
import time

import pytest

import tinkex
from tinkex import types
from tinkex.client.observe import instrumentation
from tinkex.client.observe.instrumentation import Histogram, Metrics
from tinkex.testing import Answer, FakeService, Lost
from waiting import until


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Work left running by other tests is counted elsewhere."""
    monkeypatch.setattr(instrumentation, "METRICS", Metrics())


def levels() -> set[float]:
    """Only operations; sessions of other tests may still send heartbeats."""
    gauges = tinkex.metrics_snapshot()["gauges"].items()
    return {value for name, value in gauges if name.startswith(("operations", "samples"))}


#: For tests with 429s: clients with the same key would be in slow start for a while.
BUSY = {"api_key": "tml-busy"}


def train(fake: FakeService, datum: types.Datum, **settings: str) -> None:
    with fake.client(**settings) as service:
        training = service.create_lora_training_client("fake/model")
        training.forward_backward([datum], "cross_entropy").result(5)
        training.optim_step(tinkex.AdamParams()).result(5)


def test_requests_operations_bytes_and_times_are_counted_by_name(fake, datum):
    train(fake, datum)
    seen = tinkex.metrics_snapshot()
    counters, latency = seen["counters"], seen["latency_s"]
    assert counters["operations_done.create_model"] == 1
    assert counters["operations_done.forward_backward"] == 1
    assert counters["operations_done.optim_step"] == 1
    assert counters["requests.forward_backward"] == counters["requests.optim_step"] == 1
    assert counters["requests.sessions"] == 1  # the id in its path is not part of the name
    body = next(seen.body for seen in fake.requests if seen.endpoint == "forward_backward")
    assert counters["bytes_sent.forward_backward"] == len(body)
    assert counters["bytes_received.retrieve_future"] > 0
    assert latency["operation.forward_backward"]["count"] == 1
    assert 0 < latency["operation.forward_backward"]["p50"] <= 5
    assert levels() == {0}
    assert seen["gauges"]["requests_in_flight.optim_step"] == 0
    json.dumps(seen)  # plain


def test_failures_retries_and_rate_limits_are_counted(fake, datum):
    fake.script(
        "optim_step",
        Lost(),
        Answer(status=500),
        Answer(status=429, headers={"retry-after-ms": "1"}),
    )
    train(fake, datum, **BUSY)
    with fake.client() as service, pytest.raises(tinkex.RequestFailedError):
        service.create_lora_training_client("no/model")
    seen = tinkex.metrics_snapshot()
    assert seen["counters"]["retries.optim_step"] == 3
    assert seen["counters"]["rate_limited.optim_step"] == 1
    assert seen["counters"]["statuses.none"] == 1
    assert seen["counters"]["statuses.429"] == 1
    assert seen["counters"]["operations_failed.create_model"] == 1


def test_the_duration_of_back_offs_is_measured(fake):
    fake.script("asample", Answer(status=429, headers={"retry-after-ms": "30"}))
    with fake.client(**BUSY) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        prompt = types.ModelInput.from_ints([1])
        sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result(5)
    assert tinkex.metrics_snapshot()["latency_s"]["wait.backoff"]["max"] >= 0.03


def test_waiting_samples_are_a_gauge_and_their_wait_is_a_latency(fake):
    hold = fake.hold("asample")
    service = fake.client()
    sampling = service.create_sampling_client(
        base_model="fake/model", retry_config=tinkex.RetryConfig(max_connections=1)
    )
    prompt = types.ModelInput.from_ints([1])
    futures = [sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(5)]
    hold.arrived.wait(5)
    gauges = tinkex.metrics_snapshot()["gauges"]
    assert gauges["samples_waiting.sample"] == 4
    assert gauges["operations_in_flight.sample"] == 1
    hold.release()
    for future in futures:
        future.result(5)
    service.close("success").result(5)
    seen = tinkex.metrics_snapshot()
    assert levels() == {0}
    assert seen["latency_s"]["wait.sample"]["count"] == 5


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_gauges_return_to_zero_however_the_wait_ends(fake, how):
    hold = fake.hold("asample")
    service = fake.client()
    sampling = service.create_sampling_client(
        base_model="fake/model", retry_config=tinkex.RetryConfig(max_connections=1)
    )
    prompt = types.ModelInput.from_ints([1])
    futures = [sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)) for _ in range(5)]
    hold.arrived.wait(5)
    if how == "cancel":
        for future in futures:
            future.cancel()
    hold.release()
    service.close("success").result(5)
    until(lambda: levels() == {0}, 5)


def test_reset_clears_counters_and_latencies_and_keeps_gauges(fake, datum):
    train(fake, datum)
    instrumentation.METRICS.change("operations_in_flight", "sample", 1)
    tinkex.reset_metrics()
    seen = tinkex.metrics_snapshot()
    assert "operations_done.optim_step" not in seen["counters"]
    assert "operation.optim_step" not in seen["latency_s"]
    assert seen["gauges"]["operations_in_flight.sample"] == 1


def test_percentiles_are_right_within_a_few_percent():
    times = Histogram()
    for number in range(1, 1001):
        times.observe(number / 1000)
    seen = times.snapshot()
    assert seen["count"] == 1000
    assert seen["mean"] == pytest.approx(0.5005)
    assert seen["p50"] == pytest.approx(0.5, rel=0.07)
    assert seen["p95"] == pytest.approx(0.95, rel=0.07)
    assert seen["p99"] == pytest.approx(0.99, rel=0.07)
    assert seen["max"] == 1.0
    assert Histogram().snapshot()["p99"] == 0.0
    for odd in (0.0, -1.0, 1e9):
        times.observe(odd)


def test_memory_is_bounded_however_many_names_there_are():
    here = Metrics()
    for number in range(3 * instrumentation.MAX_NAMES):
        here.count("requests", f"name-{number}")
        here.observe("request", f"name-{number}", 0.1)
    seen = here.snapshot()
    assert len(seen["counters"]) <= instrumentation.MAX_NAMES + 1
    assert len(seen["latency_s"]) <= instrumentation.MAX_NAMES + 1
    assert sum(seen["counters"].values()) == 3 * instrumentation.MAX_NAMES


def test_an_observation_is_cheap():
    here = Metrics()
    for _ in range(1000):
        here.observe("request", "asample", 0.1)
    started = time.process_time()
    for _ in range(20_000):
        here.observe("request", "asample", 0.1)
    each_s = (time.process_time() - started) / 20_000
    assert each_s < 10e-6  # 1 to 2 µs where nothing else runs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_counts_for_itself(fake, datum):
    train(fake, datum)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, json.dumps(tinkex.metrics_snapshot()["counters"]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100_000) == b"{}"
    os.close(read)
    os.close(write)
