"""Recurrent layers over packed tokens: the gated delta rule (Qwen3-Next, Qwen3.5) and Mamba 2 (Nemotron-H).

Instead of keys and values of every token, such a layer keeps a state of fixed size for each sequence:
the last inputs of a short convolution, and one matrix for each head. The projections are computed for
all packed tokens at once, so that adapters are added as everywhere else; the convolution and the rule
that changes the matrix are computed for each segment.

A training pass starts every segment without a state. Sampling reads and writes the states of its
sequences in a pool, see `StateUse`. Prompts and training use transformers' code of the rule, which
works in chunks; decoding computes one token from the last state, in steps that a CUDA graph records by
the kernels of `recurrent_kernels`. Chunks and tokens round differently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tinkex.engine.model.attention import (
    CacheShapes,
    Packing,
    PackingLost,
    SeenLayer,
    StateLayer,
    StateShapes,
    StateUse,
)
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.lora import Columns
from tinkex.engine.model.step_memory import DELTA_CHUNK

# T packed tokens, S segments, N segments that are computed together, L their longest, C channels of
# the convolution, W inputs of the convolution that are kept, H heads, D width of keys, E width of values

#: The rules work in chunks of at most this many tokens, and pad segments to full chunks.
CHUNK = 256

NO_KEYS = CacheShapes((0, 0), (0, 0))


def is_delta_net(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("conv1d", "A_log", "dt_bias", "head_k_dim"))


def is_mamba(module: nn.Module) -> bool:
    """Mamba 2 with a norm that takes the gate, in the form that Nemotron-H has."""
    names = ("conv1d", "A_log", "dt_bias", "ssm_state_size", "time_step_limit")
    if not all(hasattr(module, name) for name in names):
        return False
    own_code = sys.modules[type(module).__module__]
    return hasattr(own_code, "mamba2_chunk_scan") and not isinstance(module.norm, nn.Identity)


def is_recurrent(module: nn.Module) -> bool:
    return is_delta_net(module) or is_mamba(module)


def replace_recurrent_layers(model: nn.Module) -> None:
    """Makes these layers of a model compute packed tokens. Their weights and projections stay."""
    for module in model.modules():
        if is_delta_net(module):
            module.forward = partial(_delta_net, module)
        elif is_mamba(module):
            module.forward = partial(_mamba, module)


def joint_projections(parent: nn.Module, leaf: str) -> dict[str, Columns] | None:
    """
    The adapted projections that the linear layer `leaf` makes together, and their columns.

    None if it makes one projection only. The names are those of the hosted service.
    """
    layer: Any = parent
    blocks, sizes = 1, dict[str, int]()
    if is_mamba(parent) and leaf == "in_proj":
        sizes = dict.fromkeys(("gate_proj", "x_proj"), layer.intermediate_size)
    elif is_delta_net(parent) and leaf == "in_proj_qkv":
        sizes = {"in_proj_q": layer.key_dim, "in_proj_k": layer.key_dim}
        sizes["in_proj_v"] = layer.value_dim
    elif is_delta_net(parent) and leaf == "in_proj_qkvz":
        # Head by head: the query, the key, and the values and gates that belong to them.
        blocks = layer.num_k_heads
        values = layer.value_dim // blocks
        sizes = {"in_proj_q": layer.head_k_dim, "in_proj_k": layer.head_k_dim}
        sizes |= dict.fromkeys(("in_proj_v", "in_proj_z"), values)
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = Columns(blocks, start, start + size)
        start += size
    return found or None


# -- the two kinds of layers ----------------------------------------------------------------------


def _delta_net(module: Any, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """[1, T, hidden] in and out. Called by the model's code, which hands the packing through."""
    matrix = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
    layer = _PackedLayer.of(module, arguments, matrix)
    mixed_TC, z_THE, b_TH, a_TH = _delta_net_inputs(module, hidden_states)
    mixed_TC = layer.convolve(mixed_TC)
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    query, key, value = torch.split(mixed_TC, sizes, dim=1)
    value = value.reshape(len(value), -1, module.head_v_dim)
    query, key = (each.reshape(len(each), -1, module.head_k_dim) for each in (query, key))
    decay_TH = -module.A_log.float().exp() * F.softplus(a_TH.float() + module.dt_bias)

    def out(out_THE: Tensor) -> Tensor:
        normed = module.norm(out_THE.flatten(0, 1), z_THE.flatten(0, 1)).view_as(out_THE)
        output: Tensor = module.out_proj(normed.flatten(1).unsqueeze(0))
        return output

    if layer.is_recorded:
        return out(layer.advance(query, key, value, decay_TH, b_TH.sigmoid(), delta=True))
    # Several value heads may share a key head.
    groups = module.num_v_heads // module.num_k_heads
    query, key = (each.repeat_interleave(groups, dim=1) for each in (query, key))
    code = sys.modules[type(module).__module__]

    def rule(name: str, inputs: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = inputs
        found: tuple[Tensor, Tensor] = getattr(code, name)(
            *(query, key, value),
            g=decay,
            beta=beta,
            initial_state=before,
            output_final_state=before is not None,
            use_qk_l2norm_in_kernel=True,
        )
        return found

    out_THE = layer.apply(
        (query, key, value, decay_TH, b_TH.sigmoid()),
        chunks=partial(rule, "torch_chunk_gated_delta_rule"),
        token=partial(rule, "torch_recurrent_gated_delta_rule"),
        # A padded token has decay and beta 0, so it changes no state.
        padded_to=DELTA_CHUNK,
    )
    return out(out_THE)


def _delta_net_inputs(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the convolution reads [T, C], the gate of the output [T, H, E], and b and a [T, H]."""
    if hasattr(module, "in_proj_qkvz"):
        joint, gates = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        query, key, value, z, b, a = module.fix_query_key_value_ordering(joint, gates)
        mixed = torch.cat([each.flatten(2) for each in (query, key, value)], dim=2)
    else:
        mixed = module.in_proj_qkv(hidden)
        z = module.in_proj_z(hidden).unflatten(2, (-1, module.head_v_dim))
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    return mixed[0], z[0], b[0], a[0]


def _mamba(module: Any, hidden_states: Tensor, **arguments: Any) -> Tensor:
    """The same for Mamba 2. Its matrix has a row for each value and a column for each key."""
    heads, groups, width = module.num_heads, module.n_groups, module.ssm_state_size
    layer = _PackedLayer.of(module, arguments, (heads, module.head_dim, width))
    projected_TO = module.in_proj(hidden_states)[0]
    inner = module.intermediate_size
    gate, mixed_TC, step_TH = torch.split(projected_TO, [inner, module.conv_dim, heads], dim=1)
    mixed_TC = layer.convolve(mixed_TC)
    value, key, query = torch.split(mixed_TC, [inner, groups * width, groups * width], dim=1)
    value = value.reshape(len(value), heads, module.head_dim)
    key, query = (each.reshape(len(each), groups, width) for each in (key, query))
    rate_H = -module.A_log.float().exp()

    def time_step(step: Tensor) -> Tensor:
        step = F.softplus(step + module.dt_bias.to(step.dtype))
        limited: Tensor = step.clamp(*module.time_step_limit).float()
        return limited

    def skipped(read: Tensor, value: Tensor) -> Tensor:
        total: Tensor = read + module.D.float().unsqueeze(1) * value.float()
        return total.to(value.dtype)

    def out(out_THE: Tensor) -> Tensor:
        normed = module.norm(out_THE.flatten(1), gate)
        output: Tensor = module.out_proj(normed.to(hidden_states.dtype).unsqueeze(0))
        return output

    if layer.is_recorded:
        gain_TH = time_step(step_TH)
        value_float = value.float()
        read = layer.advance(query, key, value_float, gain_TH * rate_H, gain_TH, delta=False)
        return out(skipped(read, value))
    scan = sys.modules[type(module).__module__].mamba2_chunk_scan

    def chunks(inputs: Sequence[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
        value, step, key, query = inputs
        found = scan(
            *(value, step, rate_H, key, query),
            chunk_size=module.chunk_size,
            D=module.D,
            dt_bias=module.dt_bias,
            dt_softplus=True,
            dt_limit=module.time_step_limit,
            initial_states=before,
            return_final_states=before is not None,
        )
        return (found[0], found[1]) if before is not None else (found, found)

    def token(inputs: Sequence[Tensor], before: Tensor) -> tuple[Tensor, Tensor]:
        value_NHE, step_NH, key_NGD, query_NGD = (each[:, 0] for each in inputs)
        step_NH = time_step(step_NH)
        key, query = (
            each.float().repeat_interleave(heads // groups, dim=1) for each in (key_NGD, query_NGD)
        )
        decay = (step_NH * rate_H).exp()[..., None, None]
        change = (step_NH.unsqueeze(2) * value_NHE.float()).unsqueeze(3) * key.unsqueeze(2)
        after_NHED = before * decay + change
        read = (after_NHED @ query.unsqueeze(3))[..., 0]
        return skipped(read, value_NHE).unsqueeze(1), after_NHED

    out_THE = layer.apply((value, step_TH, key, query), chunks=chunks, token=token, padded_to=1)
    return out(out_THE)


# -- what they share ------------------------------------------------------------------------------

#: From inputs [N, L, ...] and states [N, H, ...] to outputs and states. Without states, those that
#: come back are not used.
Rule = Callable[[Sequence[Tensor], Any], tuple[Tensor, Tensor]]


class _PackedLayer(NamedTuple):
    """A layer in one pass."""

    conv: nn.Conv1d
    activation: Any
    is_silu: bool
    packing: Packing
    #: The pool and what this pass uses of it; None in training.
    states: StateLayer | None
    use: StateUse | None

    @classmethod
    def of(
        cls, module: Any, arguments: dict[str, Any], matrix: tuple[int, int, int]
    ) -> _PackedLayer:
        packing: Packing | None = arguments.get("packing")
        if packing is None:
            raise PackingLost
        if packing.layers_seen is not None:
            channels, taps = module.conv1d.out_channels, module.conv1d.kernel_size[0]
            shapes = StateShapes((channels, taps - 1), matrix)
            packing.layers_seen[module.layer_idx] = SeenLayer(NO_KEYS, Scoring(1.0), shapes)
        states, use = None, None
        if packing.cache is not None:
            states, use = packing.cache.state_layers[module.layer_idx], packing.cache.states
        name = module.activation
        return cls(module.conv1d, ACT2FN[name], name in ("silu", "swish"), packing, states, use)

    @property
    def is_recorded(self) -> bool:
        """Whether a graph may record this step: rows have slots to write to."""
        return self.use is not None and self.use.written_S is not None

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        gain: Tensor,
        *,
        delta: bool,
    ) -> Tensor:
        """The rule for one token of each row, by a kernel that also writes the states."""
        from tinkex.engine.model import recurrent_kernels

        assert self.states is not None
        assert self.use is not None
        assert self.use.written_S is not None
        found: Tensor = recurrent_kernels.advance(
            *(self.states.matrix, self.use.slots_S, self.use.written_S),
            query_BKD=query,
            key_BKD=key,
            value_BHE=value,
            decay_BH=decay,
            gain_BH=gain,
            delta=delta,
        )
        return found

    def convolve(self, mixed_TC: Tensor) -> Tensor:
        """
        The causal convolution of each segment.

        All segments are one row for it, each behind the inputs that came before it.
        """
        weight, lengths = self.conv.weight, self.packing.lengths
        if self.use is not None and self.use.written_S is not None and self.is_silu:
            from tinkex.engine.model import recurrent_kernels

            assert self.states is not None
            found: Tensor = recurrent_kernels.convolve(
                *(mixed_TC, self.states.conv, self.use.slots_S, self.use.written_S),
                *(weight, self.conv.bias),
            )
            return found
        kept = weight.shape[2] - 1
        if self.states is None or self.use is None:
            before_SWC = mixed_TC.new_zeros(len(lengths), kept, mixed_TC.shape[1])
        else:
            before_SWC = self.use.before(self.states.conv).mT
        if set(lengths) == {1}:
            rows_SRC = torch.cat([before_SWC, mixed_TC.unsqueeze(1)], dim=1)
            summed = (rows_SRC.float() * weight[:, 0].t().float()).sum(dim=1)
            if self.conv.bias is not None:
                summed = summed + self.conv.bias.float()
            out_TC, last_SWC = summed.to(mixed_TC.dtype), rows_SRC[:, 1:]
        else:
            parts = torch.split(mixed_TC, list(lengths))
            rows = [torch.cat(pair) for pair in zip(before_SWC, parts, strict=True)]
            row_1CR = torch.cat(rows).t().unsqueeze(0)
            out_CR = F.conv1d(row_1CR, weight, self.conv.bias, groups=weight.shape[0])[0]
            # An output whose inputs are of two segments belongs to none.
            own = [
                torch.arange(length) + start + at * kept
                for at, (start, length) in enumerate(
                    zip(self.packing.starts, lengths, strict=False)
                )
            ]
            out_TC = out_CR.t()[torch.cat(own).to(mixed_TC.device)]
            last_SWC = torch.stack([row[len(row) - kept :] for row in rows])
        if self.states is not None and self.use is not None:
            self.use.write(self.states.conv, last_SWC.mT)
        activated: Tensor = self.activation(out_TC)
        return activated

    def apply(
        self, inputs: Sequence[Tensor], *, chunks: Rule, token: Rule, padded_to: int
    ) -> Tensor:
        """
        The rule for each segment, [T, H, E].

        `inputs` have a row for each token. Segments may be padded with zeros to a multiple of
        `padded_to` tokens.
        """
        lengths, use = self.packing.lengths, self.use
        before = None
        if self.states is not None and use is not None:
            before = use.before(self.states.matrix)
            if set(lengths) == {1}:
                out_S1HE, after = token([each.unsqueeze(1) for each in inputs], before)
                use.write(self.states.matrix, after)
                return out_S1HE[:, 0]
        parts = [torch.split(each, list(lengths)) for each in inputs]
        found: dict[int, Tensor] = {}
        for segments in _batches(lengths, padded_to):
            longest = max(lengths[at] for at in segments)
            padded = [_padded([part[at] for at in segments], longest) for part in parts]
            out, after = chunks(padded, None if before is None else before[segments])
            for row, at in zip(out, segments, strict=True):
                found[at] = row[: lengths[at]]
            if self.states is not None and use is not None:
                use.write(self.states.matrix, after, segments)
        return torch.cat([found[at] for at in range(len(found))])


def _batches(lengths: Sequence[int], padded_to: int) -> list[list[int]]:
    """Segments of the same padded length, which are computed together."""
    found: dict[int, list[int]] = {}
    for at, length in enumerate(lengths):
        found.setdefault(-(-length // padded_to), []).append(at)
    return list(found.values())


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    return torch.stack(
        [F.pad(row, (0, 0) * (row.dim() - 1) + (0, length - len(row))) for row in rows]
    )
