"""The weights of models of the usual form, with projections of one input stacked in one matrix.

Models of the usual form are Llama, Qwen, Mistral and their relatives. Their layers can be computed
by fewer and larger products and fused kernels than transformers' code uses. The weights exist once:
the linear layers of the model become views of the stacked matrices. The form is recognized by the
parts that a layer has; a comparison of logits shows whether the result is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.model.attention import CacheShapes, SeenLayer
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.lm_head import Head
from tinkex.engine.model.lora import LoraLinear
from tinkex.engine.model.step_memory import PackedShape
from tinkex.engine.model.targets import HEAD

#: Kinds of rotary embeddings whose frequencies do not depend on the length of the sequence.
FIXED_ROPE = ("default", "linear", "llama3", "yarn")

#: Parts of a layer, in the order in which they are counted as targets.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class StackedLinear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class StackedLayer:
    input_norm: Tensor
    qkv: StackedLinear
    #: Weights of the norms of queries and keys, if the model has them.
    head_norms: tuple[Tensor, Tensor] | None
    scoring: Scoring
    output: StackedLinear
    mlp_norm: Tensor
    gate_up: StackedLinear
    down: StackedLinear


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
    #: Names of the linear layers, layer by layer, and of the output projection.
    targets: Sequence[str]

    @classmethod
    def of(cls, decoder: Any, embed: Any, head: Head) -> StackedWeights | None:
        """Stacks the weights; None if the model has another form."""
        eps = getattr(getattr(decoder, "norm", None), "variance_epsilon", None)
        if eps is None or not all(_is_usual(layer, eps) for layer in decoder.layers):
            return None
        names = {id(module): name for name, module in decoder.named_modules()}
        prefix = _prefix(decoder)
        targets: list[str] = []
        for layer in decoder.layers:
            for parent, parts in ((layer.self_attn, ATTENTION), (layer.mlp, MLP)):
                targets += [prefix + names[id(getattr(parent, part))] for part in parts]
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
        return cls(
            embedding=embed.weight,
            layers=[_stacked(layer) for layer in decoder.layers],
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
    def shape(self) -> PackedShape:
        """The sizes that say how much memory a pass takes."""
        first = self.layers[0]
        return PackedShape(
            layers=len(self.layers),
            hidden=self.embedding.shape[1],
            qkv=len(first.qkv.weight),
            gate_up=len(first.gate_up.weight),
            query_heads=self.query_heads,
            key_heads=self.key_heads,
            head_size=self.head_size,
            inner=first.down.weight.shape[1],
        )


def _prefix(decoder: Any) -> str:
    """The path of the decoder in the model, from the name of one of its linear layers."""
    linear = decoder.layers[0].self_attn.q_proj
    own = next(name for name, module in decoder.named_modules() if module is linear)
    return str(linear.name).removesuffix(own)


def _is_usual(layer: Any, eps: float) -> bool:
    parts = {name for name, _ in layer.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = {name for name, _ in attention.named_children()} - {*ATTENTION}
    linears: list[Any] = [getattr(attention, name, None) for name in ATTENTION]
    linears += [getattr(mlp, name, None) for name in MLP]
    others = {name for name, _ in mlp.named_children()} - {*MLP}
    return (
        all(isinstance(linear, LoraLinear) for linear in linears)
        and norms in (set(), {"q_norm", "k_norm"})
        and others <= {"act_fn"}
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        # SmolLM3 has layers without rotation, Granite a factor of what a layer adds.
        and getattr(attention, "use_rope", True)
        and getattr(layer, "residual_multiplier", 1.0) == 1.0
        and all(
            getattr(norm, "variance_epsilon", None) == eps
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        and all(getattr(attention, name).weight.dim() == 1 for name in norms)
        and all(len(getattr(attention, name).weight) == attention.head_dim for name in norms)
        and all(linear.weight.shape[1] % 16 == 0 for linear in linears)
    )


def _stacked(layer: Any) -> StackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight)
    return StackedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_stack(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        scoring=Scoring(float(attention.scaling)),
        output=StackedLinear(weight=attention.o_proj.weight, bias=attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_stack(mlp.gate_proj, mlp.up_proj),
        down=StackedLinear(weight=mlp.down_proj.weight, bias=mlp.down_proj.bias),
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
