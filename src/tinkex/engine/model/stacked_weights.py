"""The weights of models of the usual form, with projections of one input stacked in one matrix.

Models of the usual form are Llama, Qwen, Mistral and their relatives, also with experts instead of
an MLP in some layers. Their layers can be computed by fewer and larger products and fused kernels
than transformers' code uses. The weights exist once: the linear layers of the model become views of
the stacked matrices. The form is recognized by the parts that a layer has; a comparison of logits
shows whether the result is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.model.attention import CacheShapes, SeenLayer
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.experts import Experts, ExpertWeights
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.lora import LoraLinear
from tinkex.engine.model.step_memory import PackedShape
from tinkex.engine.model.targets import HEAD, ROUTERS

#: Kinds of rotary embeddings whose frequencies do not depend on the length of the sequence.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")

#: Parts of a layer, in the order in which they are counted as targets.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

#: What a mixture may have beside its experts and router, and a gate of its own.
SHARED = {"shared_expert": "shared_expert_gate", "shared_experts": None}


@dataclass(frozen=True, kw_only=True)
class StackedLinear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StackedMlp:
    gate_up: StackedLinear
    down: StackedLinear
    #: The place of its first projection among the targets; the others follow.
    target: int


@dataclass(frozen=True, kw_only=True)
class StackedExperts:
    #: The path of the experts in the model.
    name: str
    #: The family's own: from [T, H] to its logits, and to weights and numbers of experts [T, K].
    router: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    weights: ExpertWeights
    #: The places of w1, w3 and w2 among the targets.
    targets: Mapping[str, int]
    #: The expert of all tokens, if there is one, and [1, H], whose sigmoid weights its result.
    shared: StackedMlp | None
    shared_gate: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StackedLayer:
    #: The place of its first projection among the targets.
    target: int
    input_norm: Tensor
    qkv: StackedLinear
    #: Weights of the norms of queries and keys, if the model has them.
    head_norms: tuple[Tensor, Tensor] | None
    scoring: Scoring
    output: StackedLinear
    mlp_norm: Tensor
    mlp: StackedMlp | StackedExperts

    @property
    def dense(self) -> StackedMlp:
        """The MLP of a layer of a model without experts."""
        assert isinstance(self.mlp, StackedMlp)
        return self.mlp


@dataclass(frozen=True, kw_only=True)
class StackedWeights:
    embedding: Tensor
    layers: Sequence[StackedLayer]
    norm: Tensor
    eps: float
    #: Of the norms of queries and keys.
    head_eps: float
    #: Of the rotary embedding.
    frequencies: Tensor
    rope_scale: float
    query_heads: int
    key_heads: int
    head_size: int
    #: Names of what can be adapted, layer by layer, and of the output projection.
    targets: Sequence[str]

    @classmethod
    def of(cls, decoder: Any, embed: Any, head: Head) -> StackedWeights | None:
        """Stacks the weights; None if the model has another form."""
        eps = getattr(getattr(decoder, "norm", None), "variance_epsilon", None)
        if eps is None or not all(_is_usual(layer, eps) for layer in decoder.layers):
            return None
        rotary = getattr(decoder, "rotary_emb", None)
        first = decoder.layers[0].self_attn
        if (
            rotary is None
            or getattr(rotary, "rope_type", "default") not in FIXED_ROPE
            or 2 * len(rotary.inv_freq) != first.head_dim
            or head.bias_V is not None
            or head.softcap is not None
            or getattr(decoder, "embedding_multiplier", 1.0) != 1.0
            or any(layer.self_attn.head_dim != first.head_dim for layer in decoder.layers)
            or first.head_dim % 16
            or embed.weight.shape[1] % 16
        ):
            return None
        targets: list[str] = []
        return cls(
            embedding=embed.weight,
            layers=[_stacked(layer, targets) for layer in decoder.layers],
            norm=decoder.norm.weight,
            eps=float(eps),
            head_eps=float(getattr(first, "q_norm", decoder.norm).variance_epsilon),
            frequencies=rotary.inv_freq.float(),
            rope_scale=float(rotary.attention_scaling),
            query_heads=first.q_proj.weight.shape[0] // first.head_dim,
            key_heads=first.k_proj.weight.shape[0] // first.head_dim,
            head_size=int(first.head_dim),
            targets=[*targets, HEAD],
        )

    def with_attention(self, seen: Sequence[SeenLayer], context: int) -> StackedWeights | None:
        """
        With what transformers' code asked of the attention of each layer.

        `context` is the longest sequence. None if there are no kernels for it.
        """
        heads = (self.key_heads, self.head_size)
        if any(
            layer.shapes != CacheShapes(heads, heads) or layer.scoring.softcap is not None
            for layer in seen
        ):
            return None
        # A window that hides nothing would cost time.
        scorings = [
            layer.scoring if layer.scoring.slides(context) else layer.scoring._replace(window=None)
            for layer in seen
        ]
        layers = [
            replace(layer, scoring=scoring)
            for layer, scoring in zip(self.layers, scorings, strict=True)
        ]
        return replace(self, layers=layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, StackedExperts) for layer in self.layers)

    @property
    def shape(self) -> PackedShape | None:
        """The sizes that say how much memory a packed pass takes; None with experts."""
        if self.has_experts:
            return None
        first = self.layers[0]
        return PackedShape(
            layers=len(self.layers),
            hidden=self.embedding.shape[1],
            qkv=len(first.qkv.weight),
            gate_up=len(first.dense.gate_up.weight),
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            head_size=self.head_size,
            inner=first.dense.down.weight.shape[1],
        )


def _is_usual(layer: Any, eps: float) -> bool:
    parts = {name for name, _ in layer.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention = layer.self_attn
    norms = {name for name, _ in attention.named_children()} - {*ATTENTION}
    return (
        _are_linear(attention, ATTENTION)
        and norms in (set(), {"q_norm", "k_norm"})
        and (_is_mlp(layer.mlp) or _is_mixture(layer.mlp))
        # SmolLM3 has layers without rotation, Granite a factor of what a layer adds.
        and getattr(attention, "use_rope", True)
        and getattr(layer, "residual_multiplier", 1.0) == 1.0
        and all(
            getattr(norm, "variance_epsilon", None) == eps
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        and all(getattr(attention, name).weight.dim() == 1 for name in norms)
        and all(len(getattr(attention, name).weight) == attention.head_dim for name in norms)
    )


def _are_linear(parent: Any, names: Sequence[str]) -> bool:
    linears: list[Any] = [getattr(parent, name, None) for name in names]
    return all(
        isinstance(linear, LoraLinear) and linear.weight.shape[1] % 16 == 0 for linear in linears
    )


def _is_mlp(mlp: Any) -> bool:
    return (
        _are_linear(mlp, MLP)
        and {name for name, _ in mlp.named_children()} - {*MLP} <= {"act_fn"}
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    )


def _is_mixture(mlp: Any) -> bool:
    """Experts and their router, and an expert of all tokens if there is one."""
    parts = {name: part for name, part in mlp.named_children() if name not in ROUTERS}
    experts, router = getattr(parts.pop("experts", None), "tinkex_experts", None), _router(mlp)
    if not isinstance(experts, Experts) or router is None:
        return False
    for name, gate in SHARED.items():
        if name in parts and (gate is None or gate in parts):
            shared = parts.pop(name)
            weights = [] if gate is None else [parts.pop(gate).weight]
            if not _is_mlp(shared) or any(weight.shape[0] != 1 for weight in weights):
                return False
    return not parts and _returns_choices(router, experts.weights)


def _router(mlp: Any) -> Any:
    return next((part for name, part in mlp.named_children() if name in ROUTERS), None)


def _returns_choices(router: Any, weights: ExpertWeights) -> bool:
    """Whether a router takes [T, H] and returns its logits, and weights and numbers of experts."""
    count, hidden, _ = weights.in_EHO.shape
    try:
        with torch.inference_mode():
            logits, chosen, index = router(weights.in_EHO.new_zeros(1, hidden))
        return bool(
            logits.shape == (1, count)
            and chosen.shape == index.shape
            and chosen.is_floating_point()
            and index.dtype == torch.long
        )
    except Exception:  # noqa: BLE001  the code of another family may do anything
        return False


def _stacked(layer: Any, targets: list[str]) -> StackedLayer:
    """The weights of a layer. Adds the names of what can be adapted to `targets`."""
    attention = layer.self_attn
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight)
    linears = [getattr(attention, name) for name in ATTENTION]
    target = len(targets)
    targets += [linear.name for linear in linears]
    return StackedLayer(
        target=target,
        input_norm=layer.input_layernorm.weight,
        qkv=_stack(*linears[:3]),
        head_norms=norms,
        scoring=Scoring(float(attention.scaling)),
        output=StackedLinear(weight=attention.o_proj.weight, bias=attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        mlp=(_stacked_mlp if _is_mlp(layer.mlp) else _stacked_experts)(layer.mlp, targets),
    )


def _stacked_mlp(mlp: Any, targets: list[str]) -> StackedMlp:
    target = len(targets)
    targets += [getattr(mlp, name).name for name in MLP]
    return StackedMlp(
        gate_up=_stack(mlp.gate_proj, mlp.up_proj),
        down=StackedLinear(weight=mlp.down_proj.weight, bias=mlp.down_proj.bias),
        target=target,
    )


def _stacked_experts(mixture: Any, targets: list[str]) -> StackedExperts:
    experts: Experts = mixture.experts.tinkex_experts
    parts = (*experts.weights.columns, "w2")
    places = {part: len(targets) + at for at, part in enumerate(parts)}
    targets += [f"{experts.name}.{part}" for part in parts]
    name = next((name for name in SHARED if hasattr(mixture, name)), None)
    gate = None if name is None else SHARED[name]
    return StackedExperts(
        name=experts.name,
        router=_router(mixture),
        weights=experts.weights,
        targets=places,
        shared=None if name is None else _stacked_mlp(getattr(mixture, name), targets),
        shared_gate=None if gate is None else getattr(mixture, gate).weight,
    )


def _stack(*linears: LoraLinear) -> StackedLinear:
    """Moves the weights into one matrix, of which the layers keep views."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases: list[Any] = [linear.bias for linear in linears]
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [
                weight.new_zeros(len(linear.weight)) if each is None else each.detach()
                for linear, each in zip(linears, biases, strict=True)
            ]
        )
    start = 0
    for linear in linears:
        stop = start + len(linear.weight)
        linear.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        start = stop
    return StackedLinear(weight=weight, bias=bias)
