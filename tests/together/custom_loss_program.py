"""
Custom losses with the official SDK 0.36.0 and torch, on the server and in the client.

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
"""

import json
import random
import sys
import warnings

# The SDK's environment has no torch; the test passes a folder that has it. It goes to the end of the
# path, so that all other packages are those of the SDK's environment.
sys.path.append(sys.argv[3])

import tinker
import torch
from tinker import types


def data(vocabulary: int) -> list[types.Datum]:
    draw = random.Random(5)
    made = []
    for length in (17, 9, 23):
        tokens = [draw.randrange(20, vocabulary) for _ in range(length + 1)]
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "old_logprobs": torch.tensor([draw.gauss(-6.0, 1.0) for _ in range(length)]),
                    "advantages": torch.tensor([draw.gauss(0.0, 1.0) for _ in range(length)]),
                    "logprobs": torch.zeros(length),  # not used
                },
            )
        )
    return made


def clipped(logprobs, old_logprobs, advantages):
    """PPO as a custom loss, with a value that depends on the whole datum."""
    ratio = torch.exp(logprobs - old_logprobs)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -surrogate.sum() + 0.1 * torch.logsumexp(logprobs, dim=0)
    return loss, {
        "custom/ratio:mean": ratio.mean(),
        "custom/tokens:sum": torch.ones_like(ratio).sum(),
    }


def by_hand(batch, logprobs_list):
    """The same as an older callable, which always runs in the client."""
    total = 0.0
    for datum, logprobs in zip(batch, logprobs_list, strict=True):
        inputs = datum.loss_fn_inputs
        loss, _ = clipped(
            logprobs, inputs["old_logprobs"].to_torch(), inputs["advantages"].to_torch()
        )
        total = total + loss
    return total, {"by_hand": float(total.detach())}


def ppo_twin(batch: list[types.Datum]) -> list[types.Datum]:
    """The same data for the built-in loss."""
    return [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "logprobs": datum.loss_fn_inputs["old_logprobs"],
                "advantages": datum.loss_fn_inputs["advantages"],
            },
        )
        for datum in batch
    ]


def plain_ppo(logprobs, old_logprobs, advantages):
    ratio = torch.exp(logprobs - old_logprobs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {}


def main(base_model: str, vocabulary: int) -> dict[str, object]:
    service = tinker.ServiceClient()
    batch = data(vocabulary)
    ranks = {"logprobs": 1, "old_logprobs": 1, "advantages": 1}

    def logprobs_after(train, steps: int = 2):
        client = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
        for _ in range(steps):
            output = train(client)
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        probe = [
            types.Datum(
                model_input=d.model_input,
                loss_fn_inputs={
                    "target_tokens": d.loss_fn_inputs["target_tokens"],
                    "weights": [1.0] * d.model_input.length,
                },
            )
            for d in batch
        ]
        found = client.forward(probe, "cross_entropy").result()
        return output.metrics, [x for out in found.loss_fn_outputs for x in out["logprobs"].data]

    handle = service.create_custom_loss(clipped, ranks).result()
    again = service.create_custom_loss(plain_ppo, ranks).result()
    server_metrics, server = logprobs_after(
        lambda c: c.forward_backward_custom(batch, handle).result()
    )
    client_metrics, client = logprobs_after(
        lambda c: c.forward_backward_custom(batch, by_hand).result()
    )
    _, own_ppo = logprobs_after(lambda c: c.forward_backward_custom(batch, again).result())
    _, built_in = logprobs_after(lambda c: c.forward_backward(ppo_twin(batch), "ppo").result())
    return {
        "loss_id": handle.loss_id,
        "server": server,
        "client": client,
        "server_metrics": server_metrics,
        "client_metrics": client_metrics,
        "own_ppo": own_ppo,
        "built_in": built_in,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]))) + "\n")
    sys.stdout.flush()
