"""The sizes of one rank's part of a model that is not loaded. Only numbers, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tinkex.engine.model.model_shape import LayerShape, ModelShape
from tinkex.engine.model.unsupported import DEQUANTIZED, quantization_method

#: Linear layers of dense models, by how they are divided. The plan of transformers decides when a
#: model is loaded; these are the names that it has for the tested families.
BY_OUTPUTS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        *("qkv_proj", "gate_up_proj", "query_key_value", "dense_h_to_4h", "fc1", "c_fc"),
        *("q_b_proj", "kv_b_proj"),
        *(f"in_proj_{part}" for part in ("q", "k", "v", "z", "a", "b", "ba")),
        "x_proj",
    }
)
BY_INPUTS = frozenset(
    {"o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj", "out_proj"}
)
#: Each rank has these whole: the first products of latent attention, and the gate of a shared expert.
WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate"})
#: Of these, the ones with the outputs of key heads, which several ranks may share.
BY_KEY_HEADS = frozenset({"k_proj", "v_proj"})


class Undivided(ValueError):
    """A model that is not divided over so many GPUs; the text says why."""


def divided(shape: ModelShape, ranks: int) -> ModelShape:
    """The part of a rank, as the shape of a smaller model. Raises `Undivided`."""
    reason = next(_reasons(shape, ranks), None)
    if reason is not None:
        raise Undivided(reason)
    layers = [_divided_layer(layer, shape, ranks) for layer in shape.layers]
    removed = sum(
        _numbers(whole) - _numbers(own) for whole, own in zip(shape.layers, layers, strict=True)
    )
    sizes = {
        "num_attention_heads": shape.query_heads // ranks,
        "num_key_value_heads": shape.key_heads // key_parts(shape.key_heads, ranks),
        "head_dim": shape.head_size,
    }
    return replace(
        shape,
        config={**shape.config, **sizes},
        layers=layers,
        parameters=shape.parameters - removed,
    )


def fitting_counts(shape: ModelShape, most: int) -> list[int]:
    """Over how many GPUs, up to this number, a model can be divided."""
    return [count for count in range(1, most + 1) if not any(_reasons(shape, count))]


def heads_fit(heads: int, keys: int, ranks: int) -> bool:
    """Whether each rank has the same number of heads, with whole key heads or a part of one's."""
    return not heads % ranks and not max(keys, ranks) % min(keys, ranks)


def key_parts(keys: int, ranks: int) -> int:
    """In how many parts the key heads are divided: with more ranks, several have the same head."""
    return min(keys, ranks)


def _reasons(shape: ModelShape, ranks: int) -> Iterator[str]:
    if ranks == 1:
        return
    method = quantization_method(shape.config.get("quantization_config"))
    if method is not None and method not in DEQUANTIZED:
        yield f"weights that are quantized ({method}) are not divided"
    heads, keys = shape.query_heads, shape.key_heads
    if not heads_fit(heads, keys, ranks):
        yield f"{heads} attention heads and {keys} key heads are not divisible by {ranks}"
    for layer in shape.layers:
        for name, count in ({} if layer.recurrent is None else layer.recurrent.heads).items():
            if count % ranks:
                yield f"{count} {name} are not divisible by {ranks}"
        for experts in layer.experts.values():
            if experts.inner % ranks:
                yield f"experts of width {experts.inner} are not divided by {ranks}"
        for path, (outputs, inputs) in layer.linears.items():
            leaf = path.rpartition(".")[2]
            if leaf in WHOLE:
                continue
            if leaf not in BY_OUTPUTS | BY_INPUTS:
                yield f"{leaf} is not divided"
            elif leaf in BY_KEY_HEADS | {"qkv_proj"}:
                continue  # of whole heads
            elif (outputs if leaf in BY_OUTPUTS else inputs) % ranks:
                yield f"{leaf} of {outputs} outputs and {inputs} inputs is not divisible by {ranks}"


def _divided_layer(layer: LayerShape, shape: ModelShape, ranks: int) -> LayerShape:
    linears = {
        path: _divided_linear(path, sizes, shape, ranks) for path, sizes in layer.linears.items()
    }
    experts = {
        path: replace(each, inner=each.inner // ranks) for path, each in layer.experts.items()
    }
    recurrent = None if layer.recurrent is None else layer.recurrent.divided(ranks)
    return replace(layer, linears=linears, experts=experts, recurrent=recurrent)


def _divided_linear(
    path: str, sizes: tuple[int, int], shape: ModelShape, ranks: int
) -> tuple[int, int]:
    outputs, inputs = sizes
    leaf = path.rpartition(".")[2]
    if leaf in WHOLE:
        return sizes
    if leaf in BY_INPUTS:
        return outputs, inputs // ranks
    parts = key_parts(shape.key_heads, ranks)
    if leaf in BY_KEY_HEADS:
        return outputs // parts, inputs
    if leaf == "qkv_proj":
        queries = outputs * shape.query_heads // (shape.query_heads + 2 * shape.key_heads)
        return queries // ranks + (outputs - queries) // parts, inputs
    return outputs // ranks, inputs


def _numbers(layer: LayerShape) -> int:
    of_experts = sum(
        (3 if each.gated else 2) * each.count * each.hidden * each.inner
        for each in layer.experts.values()
    )
    others = 0 if layer.recurrent is None else layer.recurrent.others
    return of_experts + others + sum(math.prod(sizes) for sizes in layer.linears.values())
