"""The operations of a decode step that are Triton kernels, in torch, for models of every family.

They read the same tables as the kernels: the addresses of adapters, the pages of sequences. So a test
without Triton shows what a step hands to kernels, and not that the kernels are right. On the device
"meta", which has no numbers, they return tensors of the right shapes.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tinkex.engine.sampling.token_sampling import _mixed, gumbel_noise

#: Of `early_start`: steps of more rows have products with A in launches of their own.
FEW_ROWS = 3


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs inside is no operation of torch, as in a kernel."""

    @functools.wraps(function)
    def launched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return launched


@dataclass(frozen=True, kw_only=True)
class LoraTables:
    base: Tensor
    offsets: Tensor
    ranks: Tensor
    scales: Tensor
    slots_B: Tensor
    rank: int
    rank_step: int
    counter: Tensor | None = None

    def matrix(self, slot: int, target: int, which: int, *shape: int) -> Tensor:
        address = self.base.data_ptr() + 4 * int(self.offsets[slot, target, which])
        memory = (ctypes.c_float * math.prod(shape)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.float32).view(shape)


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    tables: LoraTables
    target: int
    #: The rows as they were: B follows in `add_expanded`.
    h: list[Tensor | None]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert x.is_contiguous()
    return F.linear(x, weight, bias)


def add_norm(x: Tensor, y: None, weight: Tensor, eps: float) -> Tensor:
    assert x.is_contiguous()
    assert y is None
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@as_kernel
def shrink(x: Tensor, tables: LoraTables, target: int, projections: int) -> Shrunk:
    assert x.is_contiguous()
    assert projections == 1
    h: list[Tensor | None] = []
    for row, slot in enumerate(tables.slots_B.tolist()):
        rank = 0 if slot < 0 else int(tables.ranks[slot, target])
        A = tables.matrix(slot, target, 0, rank, x.shape[1]) if rank else None
        h.append(None if A is None else A @ x[row])
    return Shrunk(tables=tables, target=target, h=h)


@as_kernel
def linear_and_shrink(
    x: Tensor, weight: Tensor, bias: Tensor | None, tables: LoraTables, target: int, count: int
) -> tuple[Tensor, Shrunk]:
    assert len(x) <= FEW_ROWS
    return linear(x, weight, bias), shrink(x, tables, target, count)


@as_kernel
def add_expanded(y: Tensor, shrunk: Shrunk, *, exact: bool = False) -> None:
    assert y.is_contiguous()
    tables = shrunk.tables
    for row, (slot, h) in enumerate(zip(tables.slots_B.tolist(), shrunk.h, strict=True)):
        if h is not None:
            B = tables.matrix(slot, shrunk.target, 1, y.shape[1], len(h))
            y[row] += float(tables.scales[slot]) * (B @ h)


@as_kernel
def attend(
    q: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    positions_B: Tensor,
    last_B: Tensor,
    table: Tensor,
    page: int,
    scoring: Any,
) -> Tensor:
    rows, heads, _ = q.shape
    assert q.is_contiguous()
    if q.is_meta:
        return q.new_empty(rows, heads, values.shape[2])
    out = torch.zeros(rows, heads, values.shape[2])
    for row in range(rows):
        length = min(int(positions_B[row]), int(last_B[row])) + 1
        if length <= 0:
            continue
        first = 0 if scoring.window is None else max(0, length - scoring.window)
        at = torch.arange(first, length)
        slots = table[row, at // page] * page + at % page
        k, v = (
            each[slots].repeat_interleave(heads // each.shape[1], dim=1) for each in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", q[row], k) * scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : length - first]
        out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out


@as_kernel
def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Any,
    lora: LoraTables | None,
    targets: Mapping[str, int],
) -> Tensor:
    y = torch.zeros_like(x)
    if x.is_meta:
        return y
    count, hidden, _ = experts.in_EHO.shape
    inner = experts.down_EIH.shape[1]
    for row in range(len(x)):
        slot = -1 if lora is None else int(lora.slots_B[row])

        def pair(
            part: str, which: int, *shape: int, slot: int = slot
        ) -> tuple[float, Tensor | None]:
            assert lora is not None
            rank = 0 if slot < 0 else int(lora.ranks[slot, targets[part]])
            if not rank:
                return 0.0, None
            sizes = [rank if size < 0 else size for size in shape]
            return float(lora.scales[slot]), lora.matrix(slot, targets[part], which, *sizes)

        for place, expert in enumerate(index[row].tolist()):
            gate_up = x[row] @ experts.in_EHO[expert]
            if experts.in_bias_EO is not None:
                gate_up = gate_up + experts.in_bias_EO[expert]
            for part, columns in experts.columns.items() if slot >= 0 else ():
                scale, A = pair(part, 0, -1, hidden)
                _, B = pair(part, 1, count, inner, -1)
                if A is not None and B is not None:
                    gate_up[columns] += scale * (B[expert] @ (A @ x[row]))
            act = experts.gate(gate_up.unsqueeze(0))[0]
            out = act @ experts.down_EIH[expert]
            if experts.down_bias_EH is not None:
                out = out + experts.down_bias_EH[expert]
            if slot >= 0:
                scale, A = pair("w2", 0, count, -1, inner)
                _, B = pair("w2", 1, hidden, -1)
                if A is not None and B is not None:
                    out = out + scale * (B @ (A[expert] @ act))
            y[row] += weights[row, place] * out
    return y


@as_kernel
def convolve(
    x: Tensor, pool: Tensor, reads: Tensor, writes: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    if x.is_meta:
        return x.new_empty(x.shape)
    window = torch.cat([pool[reads], x.unsqueeze(2)], dim=2)
    pool[writes] = window[:, :, 1:]
    return F.silu((window * weight[:, 0]).sum(dim=2) + (0 if bias is None else bias))


@as_kernel
def advance(
    pool: Tensor,
    reads: Tensor,
    writes: Tensor,
    *,
    query_BKD: Tensor,
    key_BKD: Tensor,
    value_BHE: Tensor,
    decay_BH: Tensor,
    gain_BH: Tensor,
    delta: bool,
) -> Tensor:
    if pool.is_meta:
        return value_BHE.new_empty(value_BHE.shape)
    groups = value_BHE.shape[1] // key_BKD.shape[1]
    q, k = (each.repeat_interleave(groups, dim=1) for each in (query_BKD, key_BKD))
    if delta:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q = q / q.shape[-1] ** 0.5
    states = pool[reads] if delta else pool[reads].mT
    states = states * decay_BH.exp()[..., None, None]
    seen = torch.einsum("bhde,bhd->bhe", states, k) if delta else 0
    values = (value_BHE - seen) * gain_BH.unsqueeze(2)
    states = states + k.unsqueeze(3) * values.unsqueeze(2)
    pool[writes] = states if delta else states.mT
    return torch.einsum("bhde,bhd->bhe", states, q)


@as_kernel
def sample(
    logits_BV: Tensor,
    *,
    temperatures_B: Tensor,
    keys_2B: Tensor,
    steps_B: Tensor,
    ids_B: Tensor,
    positions_B: Tensor,
    ticks_B: Tensor,
    ring_tokens: Tensor,
    ring_logprobs: Tensor,
) -> None:
    for row, tick in enumerate(ticks_B.tolist()):
        if tick < 0:
            continue
        logits = logits_BV[row] / (float(temperatures_B[row]) or 1.0)
        low, high = (key & 0xFFFFFFFF for key in keys_2B[:, row].tolist())
        mixed = _mixed((high << 32 | low) ^ int(steps_B[row]))
        noise = gumbel_noise(len(logits), (mixed & 0xFFFFFFFF, mixed >> 32), logits.device)
        token = int((noise + logits if temperatures_B[row] else logits).argmax())
        ring_tokens[tick, row] = ids_B[row] = token
        ring_logprobs[tick, row] = logits.log_softmax(0)[token]
        for each in (positions_B, steps_B, ticks_B):
            each[row] += 1


#: What stands for modules of the engine that need Triton.
MODULES = ("decode_ops", "early_start", "expert_decode", "recurrent_kernels", "sampling_kernels")
