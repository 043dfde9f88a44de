"""What a step takes in memory: activations of training, logits, gathered keys. Only numbers.

The fused kernels of a GPU keep what `PackedShape` counts for each token of a pass. What autograd
keeps of transformers' code is measured when a model is loaded, and estimated before that
(`model_shape`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: The rank of the adapter with which the activations of a pass are measured.
PROBE_RANK = 8

#: Peak memory of a backward pass relative to the saved activations. Measured on a 135M model on a
#: CPU with 512 and 1024 tokens: 1.7 MB per token at the peak, 1.2 MB saved.
PEAK_FACTOR = 1.4

#: The rank of adapters for which memory is planned.
PLANNED_RANK = 32

#: Maximum bytes of the float32 logits that exist at a time.
LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

#: Maximum bytes of the gathered keys and values of one layer in a decode step on a GPU. Constant, so
#: that deterministic results do not depend on free memory.
GATHERED_BYTES = 1 << 30

#: Adapted projections of a layer of the usual form.
PROJECTIONS = 7


#: The gated delta rule works in chunks of this many tokens.
DELTA_CHUNK = 64


def logit_tokens(device: str, vocabulary: int) -> int:
    """Of how many tokens the logits are computed at a time."""
    return max(16, LOGIT_BYTES[device] // (4 * vocabulary))


@dataclass(frozen=True, kw_only=True)
class PackedShape:
    """The sizes of a model of the usual form."""

    layers: int
    hidden: int
    #: Outputs of the projections to queries, keys and values, and to gate and up, together.
    qkv: int
    gate_up: int
    query_heads: int
    key_heads: int
    head_size: int
    #: Inputs of the down projection.
    inner: int

    def kept_numbers(self, rank: int) -> int:
        """What a layer keeps for each token until its backward pass."""
        rotated = (self.query_heads + self.key_heads) * self.head_size
        attended = self.query_heads * self.head_size
        numbers = 2 * self.hidden + self.qkv + rotated + attended
        return numbers + self.gate_up + 2 * self.query_heads + rank * PROJECTIONS

    @property
    def temporary_numbers(self) -> int:
        """What the backward pass of one layer needs beside that, in the larger of its two halves."""
        query, key = (heads * self.head_size for heads in (self.query_heads, self.key_heads))
        mlp = self.inner + 2 * self.qkv + 4 * self.hidden
        # Gradients by queries, by keys and values of each query head, and a float32 sum.
        attention = self.hidden + 6 * query + 2 * key + self.qkv
        return max(mlp, attention)

    def bytes_per_token(self, *, rank: int, element: int) -> int:
        """Peak memory of a pass with gradients for each token; a number has `element` bytes."""
        return element * (self.layers * self.kept_numbers(rank) + self.temporary_numbers)

    def checkpoint_bytes_per_token(self, *, rank: int, element: int) -> int:
        """The same with checkpointing: the inputs of all layers, and all of one layer."""
        inputs = self.layers * self.hidden
        return element * (inputs + self.kept_numbers(rank) + self.temporary_numbers)
