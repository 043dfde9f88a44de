"""Policy losses of single tokens, computed by hand: with advantages of 0, 1 and -1."""

import math

import pytest
import torch

from tinkex.engine.training.losses import LOSSES, value_and_gradient

RATIO = math.exp(0.1)
#: The loss of a token with an advantage of 1, and its derivative. Its logprob is -0.9, and was -1.
BY_HAND = {
    "importance_sampling": (-RATIO, -RATIO),
    "ppo": (-RATIO, -RATIO),
    "cispo": (0.9 * RATIO, -RATIO),
    "gspo": (-RATIO, -RATIO),
}


@pytest.mark.parametrize("loss", BY_HAND)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_of_a_prompt_counts_nothing_beside_one_of_the_answer(
    loss: str, advantage: float
) -> None:
    """The ratio of the prompt's token would be infinite, and infinity times 0 is not a number."""
    found = LOSSES[loss]
    inputs = {
        "logprobs": torch.tensor([[-200.0], [-1.0]]),
        "advantages": torch.tensor([[0.0], [advantage]]),
        "sequence_ratio_mask": torch.tensor([[0.0], [1.0]]),
        **{name: torch.tensor(value) for name, value in found.config.items()},
    }
    terms, gradient = value_and_gradient(found, torch.tensor([[-0.9], [-0.9]]), inputs)
    value, slope = BY_HAND[loss]
    assert terms.flatten().tolist() == pytest.approx([0.0, advantage * value], rel=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([0.0, advantage * slope], rel=1e-6)
