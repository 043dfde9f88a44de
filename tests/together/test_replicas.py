"""Two real engines of one base model: one is killed under running clients."""

import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tinkex
from processes import children
from serving import TINY, Server, serving
from tinkex import types
from waiting import until

STEPS = 6


def datum(step: int) -> types.Datum:
    tokens = [20 + (step + place) % 40 for place in range(8)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 7},
    )


def train(service: tinkex.ServiceClient, seed: int, reached: threading.Event) -> list[float]:
    """Logprobs with the final weights."""
    training = service.create_lora_training_client(TINY, rank=4, seed=seed)
    for step in range(STEPS):
        training.forward_backward([datum(step)], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
        if step == STEPS // 2:
            reached.set()
    output = training.forward([datum(0)], "cross_entropy").result()
    return output.loss_fn_outputs[0]["logprobs"].tolist()


def sample(service: tinkex.ServiceClient, count: int) -> list[list[int]]:
    """Tokens of many samples from a saved adapter, with different prompts."""
    training = service.create_lora_training_client(TINY, rank=4, seed=3)
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=12, seed=5)
    futures = [
        sampler.sample(types.ModelInput.from_ints([10 + number, 11]), 1, params)
        for number in range(count)
    ]
    return [future.result().sequences[0].tokens for future in futures]


def tokens_sampled(server: Server) -> dict[str, float]:
    """By replica, from the metrics page."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    name = "tinkex_engine_tokens_sampled_total{"
    return {
        line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name)
    }


@pytest.mark.timeout(180)
def test_a_killed_engine_loses_nothing_and_the_other_replica_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    # Deterministic: a rebuilt model has the same bits.
    args = ("--replicas", "2", "--deterministic", "--device", "cpu,cpu")
    with serving(f"{TINY}={tiny_model}", data=tmp_path / "data", args=args) as server:
        (web,) = children(server.process.pid)
        engines = children(web)
        assert len(engines) == 2
        service = tinkex.ServiceClient(base_url=server.url)
        expected = [train(service, seed, threading.Event()) for seed in (1, 2)]
        tokens = sample(service, 12)
        # Engines report their counts at intervals.
        until(lambda: len(tokens_sampled(server)) == 2 and all(tokens_sampled(server).values()))
        with ThreadPoolExecutor(3) as threads:
            reached = [threading.Event(), threading.Event()]
            runs = [
                threads.submit(train, service, seed, event)
                for seed, event in zip((1, 2), reached, strict=True)
            ]
            sampled = threads.submit(sample, service, 12)
            assert all(event.wait(60) for event in reached)
            os.kill(engines[0], signal.SIGKILL)
            assert [run.result(90) for run in runs] == expected
            assert sampled.result(90) == tokens
        until(lambda: any("died" in line and "#" in line for line in server.log))
        (again,) = children(server.process.pid)
        assert again == web
