"""Flash attention of a GPU over packed segments, with windows and sinks.

It calls torch's kernels directly instead of through autograd, which costs the processor more than
the rest of a layer together and has no place for sinks: the kernels know none, but their result is
corrected by the log-sum-exp of the scores. The stock backward kernel is exact with the corrected
result and log-sum-exp. Soft caps are not possible here.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.model.attention_scores import Scoring, pad_values, with_sinks

# T packed tokens, H query heads, K key heads, D width of keys, E width of values


@functools.cache
def has_flash_kernels() -> bool:
    """Whether torch's private operations have the parameters that are used here."""
    try:
        schemas = [
            torch.ops.aten._flash_attention_forward.default._schema,
            torch.ops.aten._flash_attention_backward.default._schema,
        ]
    except AttributeError:
        return False
    positional = [
        [each.name for each in schema.arguments if not each.kwarg_only] for schema in schemas
    ]
    by_name = [{each.name for each in schema.arguments if each.kwarg_only} for schema in schemas]
    places = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    heads = ["query", "key", "value"]
    return all({"scale", "window_size_left", "window_size_right"} <= each for each in by_name) and (
        positional
        == [
            [*heads, *places, "return_debug_mask"],
            ["grad_out", *heads, "out", "logsumexp", *places, "rng_state", "unused"],
        ]
    )


class Segments(NamedTuple):
    """Where queries and keys of each segment are. The last query of a segment sees all its keys."""

    #: int32 [segments + 1]
    query_starts: Tensor
    key_starts: Tensor
    max_queries: int
    max_keys: int


class FlashResult(NamedTuple):
    out_THD: Tensor
    #: What the backward kernel needs.
    lse: Tensor
    state: Tensor
    unused: Tensor


def flash_forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments, scoring: Scoring
) -> FlashResult:
    """Values must be as wide as keys."""
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q_THD, k_TKD, v_TKD, *segments, 0.0, True, False, scale=scoring.scaling, **_window(scoring)
    )
    if scoring.sinks is not None:
        if lse.shape != (q_THD.shape[1], len(q_THD)):
            raise RuntimeError(
                f"flash attention of torch {torch.__version__} returns the log-sum-exp as "
                f"{tuple(lse.shape)}, not as [heads, tokens]: sinks cannot be added. Install "
                "another version of torch."
            )
        by_head, lse = with_sinks(out.transpose(0, 1), lse, scoring.sinks.unsqueeze(1))
        out = by_head.transpose(0, 1).contiguous()
    return FlashResult(out, lse, state, unused)


def flash_backward(
    gradient_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    result: FlashResult,
    segments: Segments,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(gradient_THD, q_THD, k_TKD, v_TKD, result.out_THD, result.lse),
        *(*segments, 0.0, True, result.state, result.unused),
        scale=scoring.scaling,
        **_window(scoring),
    )
    return found


def _window(scoring: Scoring) -> dict[str, int]:
    """Without a window no arguments: the call of other models stays as it is."""
    if scoring.window is None:
        return {}
    return {"window_size_left": scoring.window - 1, "window_size_right": 0}


def attend_flash(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, segments: Segments, scoring: Scoring
) -> Tensor:
    """The same for autograd, and for values of any width: [T, H, E]."""
    out: Tensor = _FlashFunction.apply(  # type: ignore[no-untyped-call]
        q_THD, k_TKD, pad_values(v_TKE, k_TKD.shape[2]), segments, scoring
    )
    return out[..., : v_TKE.shape[2]]


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring
    ) -> Tensor:
        result = flash_forward(q, k, v, segments, scoring)
        ctx.save_for_backward(q, k, v, *result)
        ctx.segments, ctx.scoring = segments, scoring
        return result.out_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *result = ctx.saved_tensors
        (g,) = gradients
        found = flash_backward(
            g.contiguous(), q, k, v, FlashResult(*result), ctx.segments, ctx.scoring
        )
        return (*found, None, None)
