"""User code with custom losses and text that must type-check; never run."""

from typing import assert_type

import torch

import tinkex
from tinkex import regularizers as reg
from tinkex import types
from tinkex.client.futures import Promise


def batch_loss(
    data: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    return logprobs[0].sum(), {}


def per_datum(
    logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (logprobs * advantages).sum(), {}


def use(
    service: tinkex.ServiceClient, training: tinkex.TrainingClient, data: list[types.Datum]
) -> None:
    assert_type(
        training.forward_backward_custom(data, batch_loss), Promise[types.ForwardBackwardOutput]
    )
    made = service.create_custom_loss(per_datum, {"logprobs": 1, "advantages": 1})
    assert_type(made.result(), tinkex.LossHandle)
    training.forward_backward_custom(data, made.result(), loss_type_input="logprobs")
    training.forward_backward_custom(
        data, reg.regularized(batch_loss, reg.Term(reg.KL("forward"), 0.1), reg.L1())
    )
    assert_type(training.encode("x"), list[int])
    types.ModelInput.from_text("x", training)
    types.ModelInput.from_text("x", training.get_tokenizer())


async def use_async(training: tinkex.TrainingClient, data: list[types.Datum]) -> None:
    assert_type(
        await training.forward_backward_custom_async(data, batch_loss),
        Promise[types.ForwardBackwardOutput],
    )
