"""Custom losses give the same losses and weights as the built-in ones, on the tiny model."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tinkex
from serving import TINY, Server
from tinkex import types

LENGTHS = (17, 9, 23)
#: With a large eps a step is proportional to the gradient, so that its size is compared and not its sign.
STEP = types.AdamParams(learning_rate=0.03, eps=1.0)


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=server.url) as made:
        yield made


@pytest.fixture(scope="module")
def batch(service: tinkex.ServiceClient) -> list[types.Datum]:
    draw = random.Random(5)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": [draw.gauss(0.5, 1.0) for _ in tokens[1:]],
                "logprobs": [draw.gauss(-6.0, 1.0) for _ in tokens[1:]],
                "advantages": [draw.gauss(0.0, 1.0) for _ in tokens[1:]],
            },
        )
        for tokens in ([draw.randrange(20, 60) for _ in range(length + 1)] for length in LENGTHS)
    ]


# The three losses for one datum; `logprobs` of a datum are those of the sampler.


def cross_entropy(logprobs, weights):
    return -(logprobs * weights).sum(), {"custom/weight:sum": weights.sum()}


def importance_sampling(logprobs, old, advantages):
    return -(torch.exp(logprobs - old) * advantages).sum(), {}


def ppo(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum(), {
        "custom/ratio:mean": ratio.mean()
    }


#: Built-in losses with the equal custom loss and the inputs that it reads.
LOSSES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "cross_entropy": (cross_entropy, ("weights",)),
    "importance_sampling": (importance_sampling, ("logprobs", "advantages")),
    "ppo": (ppo, ("logprobs", "advantages")),
}


@pytest.fixture(scope="module")
def handles(service: tinkex.ServiceClient) -> dict[str, tinkex.LossHandle]:
    ranks = {
        "cross_entropy": {"logprobs": 1, "weights": 1},
        "importance_sampling": {"logprobs": 1, "old": 1, "advantages": 1},
        "ppo": {"logprobs": 1, "old": 1, "advantages": 1},
    }
    made = {name: service.create_custom_loss(LOSSES[name][0], ranks[name]) for name in LOSSES}
    return {name: future.result(30) for name, future in made.items()}


def as_callable(name: str) -> Callable[..., Any]:
    per_datum, reads = LOSSES[name]

    def loss(data, logprobs):
        parts = [
            per_datum(each, *(datum.loss_fn_inputs[key].to_torch() for key in reads))[0]
            for datum, each in zip(data, logprobs, strict=True)
        ]
        return torch.stack(parts).sum(), {"parts:sum": len(parts)}

    return loss


def only(name: str, batch: list[types.Datum], *, as_handles_call_them: bool) -> list[types.Datum]:
    """The inputs of a loss. For handles, `logprobs` are those of the model."""
    keep = ("target_tokens", *LOSSES[name][1])
    return [
        dataclasses.replace(
            datum,
            loss_fn_inputs={
                "old" if as_handles_call_them and key == "logprobs" else key: tensor
                for key, tensor in datum.loss_fn_inputs.items()
                if key in keep
            },
        )
        for datum in batch
    ]


def trained(service, batch, train) -> tuple[dict[str, float], list[float]]:
    """Metrics of the first pass, and logprobs after two steps, which depend on the weights."""
    client = service.create_lora_training_client(TINY, rank=8, seed=1)
    first = train(client)
    client.optim_step(STEP)
    train(client).result(30)
    client.optim_step(STEP)
    probe = only("cross_entropy", batch, as_handles_call_them=False)
    found = client.forward(probe, "cross_entropy").result(30)
    said = [value for output in found.loss_fn_outputs for value in output["logprobs"].data]
    return first.result(30).metrics, said


@pytest.mark.parametrize("name", LOSSES)
def test_m2_custom_versions_of_built_in_losses_give_the_same_losses_and_weights(
    service, batch, handles, name
):
    plain = only(name, batch, as_handles_call_them=False)
    renamed = only(name, batch, as_handles_call_them=True)
    here = dataclasses.replace(handles[name], loss_id=None)
    ways = {
        "built in": lambda client: client.forward_backward(plain, name),
        "callable": lambda client: client.forward_backward_custom(plain, as_callable(name)),
        "uploaded": lambda client: client.forward_backward_custom(renamed, handles[name]),
        "traced, run here": lambda client: client.forward_backward_custom(renamed, here),
    }
    done = {way: trained(service, batch, train) for way, train in ways.items()}

    metrics, said = done.pop("built in")
    for way, (its_metrics, it_said) in done.items():
        assert its_metrics["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5), way
        assert it_said == pytest.approx(said, rel=1e-5, abs=1e-5), way
    assert done["callable"][0]["parts:sum"] == 3


def test_an_uploaded_loss_is_one_pass_with_the_metrics_of_its_graph(service, batch, handles):
    handle = handles["cross_entropy"]
    assert handle.loss_id is not None
    client = service.create_lora_training_client(TINY, rank=8, seed=1)
    data = only("cross_entropy", batch, as_handles_call_them=True)
    found = client.forward_backward_custom(data, handle).result(30)
    total = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)
    assert found.metrics["custom/weight:sum"] == pytest.approx(total, rel=1e-5)
    assert "surrogate_loss:sum" not in found.metrics
    # They are stored with the step.
    client.optim_step(STEP).result(30)
    rest = tinkex.RestClient(service.holder)
    (step,) = rest.get_training_run_metrics(client.model_id).result(30).points
    assert step.metrics["custom/weight:sum"] == pytest.approx(total, rel=1e-5)
    assert step.metrics["loss_sum"] == pytest.approx(found.metrics["loss:sum"])


def test_several_targets_per_position(service):
    """Logprobs of shape [positions, 3], as in distillation."""
    targets = [[30, 31, 32], [33, 34, 35], [36, 37, 38]]
    datum = types.Datum(types.ModelInput.from_ints([21, 22, 23]), {"target_tokens": targets})

    def loss(data, logprobs):
        (of_datum,) = logprobs
        assert of_datum.shape == (3, 3)
        return -of_datum.logsumexp(dim=-1).sum(), {}

    client = service.create_lora_training_client(TINY, rank=8, seed=1)
    before = client.forward_backward_custom([datum], loss).result(30)
    for _ in range(5):
        client.optim_step(types.AdamParams(learning_rate=1e-2))
        after = client.forward_backward_custom([datum], loss)
    assert after.result(30).metrics["loss:sum"] < before.metrics["loss:sum"]


def test_a_program_written_for_the_official_client_gets_the_same_numbers(
    server: Server, tiny_model: Path
) -> None:
    """Runs the program of `test_official_custom_loss` with tinkex."""
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    program = Path(__file__).with_name("custom_loss_program.py")
    done = subprocess.run(
        [sys.executable, "-m", "tinkex.as_tinker", program, TINY, str(vocabulary), "no-folder"],
        env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any-key"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss_id"]
    assert found["server_metrics"]["loss:sum"] == pytest.approx(
        found["client_metrics"]["by_hand"], rel=1e-4
    )
    assert found["server"] == pytest.approx(found["client"], abs=2e-4)
    assert found["own_ppo"] == pytest.approx(found["built_in"], abs=2e-4)
