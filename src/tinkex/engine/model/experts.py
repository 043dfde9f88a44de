"""The experts of a mixture: each token runs through some of them, with adapters of its own.

transformers calls `run_module` in place of its own code for experts. The experts of a layer have
shared-outer adapters, as in Tinker: for w1 (gate) and w3 (up) A is one matrix for all experts and B
one for each; for w2 (down) it is the other way round. So the products with the shared factors are
made once for each token, not once for each of its experts.

A slot is one expert of one token. Slots are sorted by expert; tokens of one adapter are adjacent in
the packed pass, so they are adjacent within each expert too. `expert_products` multiplies the slots
of each expert and adapter with their matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from tinkex.engine.model.expert_products import ExpertProducts, Routing
from tinkex.engine.model.lora import AdapterContext, AdapterSegment, Pair, RecordedAdapters
from tinkex.engine.model.matmul import add_mm_float32
from tinkex.engine.model.targets import Target, experts_targets

# T packed tokens, K experts of a token, S = T·K slots sorted by expert, E experts, H hidden size,
# I inner size of an expert, O outputs of its first projection (gate and up: 2 I), R rank

#: The name of `run_module` in transformers' experts interface.
NAME = "tinkex_experts"

#: transformers has the flags that say how an expert's weights are stored since this version.
NEEDED_TRANSFORMERS = (5, 17)


class ExpertWeights(NamedTuple):
    """The frozen weights of the experts of a layer, in one form for all families."""

    in_EHO: Tensor
    in_bias_EO: Tensor | None
    down_EIH: Tensor
    down_bias_EH: Tensor | None
    #: From gate and up [S, O] to what the down projection reads [S, I].
    gate: Callable[[Tensor], Tensor]
    #: The outputs of the first projection that w1 and w3 adapt. Without a gate there is no w3.
    columns: dict[str, slice]
    #: Whether `gate` is silu(gate) · up of two halves, for which there is a kernel.
    swiglu: bool = False

    @classmethod
    def of(cls, module: Any) -> ExpertWeights:
        first = module.gate_up_proj if module.has_gate else module.up_proj
        down = module.down_proj
        if not module.is_transposed:
            first, down = first.mT, down.mT
        biases: list[Tensor | None] = [None, None]
        if module.has_bias:
            biases = [module.gate_up_proj_bias if module.has_gate else module.up_proj_bias]
            biases.append(module.down_proj_bias)
        inner = down.shape[1]
        columns = {"w1": slice(None)}
        if module.has_gate and module.is_concatenated:
            columns = {"w1": slice(0, inner), "w3": slice(inner, 2 * inner)}
        elif module.has_gate:
            columns = {"w1": slice(0, None, 2), "w3": slice(1, None, 2)}
        gate = module._apply_gate if module.has_gate else module.act_fn
        return cls(first, biases[0], down, biases[1], gate, columns, _is_swiglu(module))

    def targets(self, name: str) -> list[Target]:
        """The projections that can be adapted; `name` is the path of the experts in the model."""
        count, hidden, _ = self.in_EHO.shape
        inner = self.down_EIH.shape[1]
        return experts_targets(name, self.columns, count=count, hidden=hidden, inner=inner)


def _is_swiglu(module: Any) -> bool:
    """Whether a family has transformers' own gate, with this activation."""
    usual = getattr(transformers.integrations.moe, "_default_apply_gate", None)
    return (
        bool(module.has_gate and module.is_concatenated)
        and type(module)._apply_gate is usual
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


class ExpertSlice(NamedTuple):
    """Tokens `start` to `stop` of a packed pass, and the matrices of their adapter."""

    start: int
    stop: int
    pairs: dict[str, Pair]


def expert_slices_of(segments: Sequence[AdapterSegment], name: str) -> list[ExpertSlice]:
    slices = []
    for start, stop, pairs in segments:
        own = {
            part: pairs[key] for part in ("w1", "w3", "w2") if (key := f"{name}.{part}") in pairs
        }
        if own:
            slices.append(ExpertSlice(start, stop, own))
    return slices


# -- the modules of a model -----------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """Whether transformers would call a function of its experts interface for this module."""
    return all(hasattr(module, flag) for flag in ("is_concatenated", "has_gate", "down_proj"))


class RoutedTokens(NamedTuple):
    """The experts of some tokens of a pass and their weights, as a router chose them."""

    start: int
    index_TK: Tensor
    weights_TK: Tensor


class Experts:
    """What the engine adds to an experts module of transformers."""

    def __init__(self, module: Any, name: str, context: AdapterContext) -> None:
        self.name, self._context = name, context
        self.weights = ExpertWeights.of(module)
        #: The experts of each token in the last pass.
        self.routed_TK: Tensor | None = None
        #: Used instead of what the router chooses.
        self.replayed: RoutedTokens | None = None

    def run(self, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self._context.recorded is not None:
            return self._run_recorded(x_TH, index_TK, weights_TK, self._context.recorded)
        self.routed_TK = index_TK
        if self.replayed is not None:
            start, index, weights = self.replayed
            index_TK = torch.cat([index_TK[:start], index])
            weights_TK = torch.cat([weights_TK[:start], weights])
        slices = expert_slices_of(self._context.segments, self.name)
        return run_experts(x_TH, index_TK, weights_TK, self.weights, slices)

    def _run_recorded(
        self, x_BH: Tensor, index_BK: Tensor, weights_BK: Tensor, adapters: RecordedAdapters
    ) -> Tensor:
        """
        The same with the adapters of tables.

        What the router chose is not kept: it is memory of a graph, and another thread may run.
        """
        from tinkex.engine.model import expert_decode

        routed = adapters.routed.get(self.name)
        if routed is not None:
            index_BK, weights_BK = routed.index_TK, routed.weights_TK
        parts = [*self.weights.columns, "w2"]
        targets = {part: adapters.targets[f"{self.name}.{part}"] for part in parts}
        x_BH = x_BH.contiguous()
        return expert_decode.run_experts(
            x_BH, index_BK, weights_BK, self.weights, adapters.tables, targets
        )


def run_module(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Called by transformers in every mixture."""
    experts: Experts = module.tinkex_experts
    return experts.run(hidden_states, top_k_index, top_k_weights)


def run_experts(
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    weights: ExpertWeights,
    slices: Sequence[ExpertSlice],
    *,
    grouped: bool | None = None,
) -> Tensor:
    """The sum of the experts of each token [T, H]. `grouped` chooses the kind of products."""
    if torch.is_grad_enabled() and (x_TH.requires_grad or weights_TK.requires_grad):
        y: Tensor = _ExpertsFunction.apply(  # type: ignore[no-untyped-call]
            x_TH, weights_TK, index_TK, weights, slices, grouped
        )
        return y
    return _forward(x_TH, weights_TK, index_TK, weights, slices, grouped)[0]


# -- forward and backward -------------------------------------------------------------------------


class _Kept(NamedTuple):
    """What the backward pass needs beside the input and the weights of the router."""

    gate_up_SO: Tensor
    #: Products with the shared factors: x Aᵀ of w1 and w3, and what B of w2 multiplies. Scaled.
    shrunk_TR: dict[str, Tensor]


def _forward(
    x_TH: Tensor,
    weights_TK: Tensor,
    index_TK: Tensor,
    weights: ExpertWeights,
    slices: Sequence[ExpertSlice],
    grouped: bool | None,
) -> tuple[Tensor, Routing, _Kept]:
    routing = Routing.of(index_TK, len(weights.in_EHO))
    products = ExpertProducts.of(routing, slices, x_TH, grouped=grouped)
    shrunk_TR: dict[str, Tensor] = {}
    gate_up_SO = products.multiply(x_TH[routing.tokens_S], weights.in_EHO)
    if weights.in_bias_EO is not None:
        gate_up_SO += weights.in_bias_EO[routing.experts_S]
    for part, columns in weights.columns.items():
        matrices = _factors(slices, part)
        if any(each is not None for each in matrices):
            u_TR = shrunk_TR[part] = _shrink(x_TH, slices, part)
            products.add(gate_up_SO[:, columns], u_TR[routing.tokens_S], matrices)
    act_SI = weights.gate(gate_up_SO)
    out_SH = products.multiply(act_SI, weights.down_EIH)
    if weights.down_bias_EH is not None:
        out_SH += weights.down_bias_EH[routing.experts_S]
    y_TH = routing.summed(out_SH, weights_TK).to(x_TH.dtype)
    matrices = _factors(slices, "w2")
    if any(each is not None for each in matrices):
        rank = max(each.shape[2] for each in matrices if each is not None)
        z_SR = act_SI.new_zeros(len(act_SI), rank)
        products.add(z_SR, act_SI, matrices)
        z_TR = shrunk_TR["w2"] = routing.summed(z_SR, weights_TK).to(x_TH.dtype)
        for start, stop, pair in _pairs(slices, "w2"):
            own_tR = z_TR[start:stop, : pair.B_OR.shape[1]].mul_(pair.scale)
            y_TH[start:stop].addmm_(own_tR, pair.B_OR.t())
    return y_TH, routing, _Kept(gate_up_SO, shrunk_TR)


def _shrink(x_TH: Tensor, slices: Sequence[ExpertSlice], part: str) -> Tensor:
    """The scaled products with A of w1 or w3; zero for tokens without one."""
    pairs = _pairs(slices, part)
    u_TR = x_TH.new_zeros(len(x_TH), max(len(pair.A_RI) for _, _, pair in pairs))
    for start, stop, pair in pairs:
        own_tR = u_TR[start:stop, : len(pair.A_RI)]
        torch.mm(x_TH[start:stop], pair.A_RI.t() * pair.scale, out=own_tR)
    return u_TR


def _pairs(slices: Sequence[ExpertSlice], part: str) -> list[tuple[int, int, Pair]]:
    return [(start, stop, pairs[part]) for start, stop, pairs in slices if part in pairs]


def _factors(slices: Sequence[ExpertSlice], part: str) -> list[Tensor | None]:
    """The factor with a matrix for each expert, [E, inputs, outputs] for each slice."""
    found: list[Tensor | None] = []
    for _, _, pairs in slices:
        pair = pairs.get(part)
        if pair is None:
            found.append(None)
        else:
            found.append((pair.A_RI if part == "w2" else pair.B_OR).mT)
    return found


def _transposed(matrices: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.mT for each in matrices]


def _gradients(slices: Sequence[ExpertSlice], part: str) -> list[Tensor | None]:
    """The gradients of those factors, as they are stored."""
    found: list[Tensor | None] = []
    for _, _, pairs in slices:
        pair = pairs.get(part)
        if pair is None:
            found.append(None)
        else:
            found.append(pair.grad_A_RI if part == "w2" else pair.grad_B_OR)
    return found


class _ExpertsFunction(torch.autograd.Function):
    """
    The experts with a backward pass for the tokens, the weights of the router, and the adapters.

    Autograd sees only the tokens and the weights of the router. Gradients of adapters are added
    directly to their flat vectors. The base weights are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weights_TK: Tensor,
        index_TK: Tensor,
        weights: ExpertWeights,
        slices: Sequence[ExpertSlice],
        grouped: bool | None,
    ) -> Tensor:
        y_TH, ctx.routing, kept = _forward(x_TH, weights_TK, index_TK, weights, slices, grouped)
        ctx.shrunk_names = list(kept.shrunk_TR)
        ctx.save_for_backward(x_TH, weights_TK, kept.gate_up_SO, *kept.shrunk_TR.values())
        ctx.weights, ctx.slices, ctx.grouped = weights, slices, grouped
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x_TH, weights_TK, gate_up_SO, *values = ctx.saved_tensors
        kept = _Kept(gate_up_SO, dict(zip(ctx.shrunk_names, values, strict=True)))
        dx_TH, dweights_TK = _backward(
            dy_TH.contiguous(),
            x_TH,
            weights_TK,
            kept,
            ctx.routing,
            ctx.weights,
            ctx.slices,
            ctx.grouped,
        )
        return dx_TH, dweights_TK, None, None, None, None


def _backward(
    dy_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    kept: _Kept,
    routing: Routing,
    weights: ExpertWeights,
    slices: Sequence[ExpertSlice],
    grouped: bool | None,
) -> tuple[Tensor, Tensor]:
    """The gradients by the tokens and by the weights of the router."""
    products = ExpertProducts.of(routing, slices, x_TH, grouped=grouped)
    weights_S1 = weights_TK.reshape(-1)[routing.order_S].unsqueeze(1)
    with torch.enable_grad():
        gate_up_SO = kept.gate_up_SO.detach().requires_grad_()
        act_SI = weights.gate(gate_up_SO)
    act = act_SI.detach()

    # What the output does with `act`, without the weights of the router.
    dy_SH = dy_TH[routing.tokens_S]
    dact_SI = products.multiply(dy_SH, weights.down_EIH.mT)
    if "w2" in kept.shrunk_TR:
        z_TR = kept.shrunk_TR["w2"]
        dz_TR = torch.zeros_like(z_TR)
        for start, stop, pair in _pairs(slices, "w2"):
            own_tR = dz_TR[start:stop, : pair.B_OR.shape[1]]
            torch.mm(dy_TH[start:stop], pair.B_OR * pair.scale, out=own_tR)
            if pair.grad_B_OR is not None:
                z_tR = z_TR[start:stop, : pair.B_OR.shape[1]]
                add_mm_float32(pair.grad_B_OR, dy_TH[start:stop].t(), z_tR)
        dz_SR = dz_TR[routing.tokens_S]
        products.add(
            dact_SI,
            dz_SR,
            _transposed(_factors(slices, "w2")),
        )
        weighted_SR = (dz_SR * weights_S1).to(act.dtype)
        products.add_outer(_gradients(slices, "w2"), weighted_SR, act)
    dweights_S = (dact_SI * act).sum(dim=1)
    if weights.down_bias_EH is not None:
        dweights_S += (dy_SH * weights.down_bias_EH[routing.experts_S]).sum(dim=1)

    weighted_SI = (dact_SI * weights_S1).to(act.dtype)
    (dgate_up_SO,) = torch.autograd.grad(act_SI, gate_up_SO, weighted_SI)
    dx_TH = routing.summed(products.multiply(dgate_up_SO, weights.in_EHO.mT))
    for part, columns in weights.columns.items():
        if part not in kept.shrunk_TR:
            continue
        u_TR, dout_SI = kept.shrunk_TR[part], dgate_up_SO[:, columns]
        products.add_outer(_gradients(slices, part), dout_SI, u_TR[routing.tokens_S])
        du_SR = x_TH.new_zeros(len(dout_SI), u_TR.shape[1])
        products.add(
            du_SR,
            dout_SI,
            _transposed(_factors(slices, part)),
        )
        du_TR = routing.summed(du_SR)
        for start, stop, pair in _pairs(slices, part):
            own_tR = du_TR[start:stop, : len(pair.A_RI)] * pair.scale
            if pair.grad_A_RI is not None:
                add_mm_float32(pair.grad_A_RI, own_tR.t(), x_TH[start:stop])
            dx_TH[start:stop].addmm_(own_tR, pair.A_RI)
    dweights_TK = torch.empty_like(dweights_S)
    dweights_TK[routing.order_S] = dweights_S
    return dx_TH, dweights_TK.view_as(weights_TK).to(weights_TK.dtype)
