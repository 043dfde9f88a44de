"""The sizes of one rank's part of a model that is not loaded. Only numbers, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tinkex.engine.model.model_shape import LayerShape, ModelShape

#: Linear layers of dense models, by how they are divided. The plan of transformers decides when a
#: model is loaded; these are the names that it has for the tested families.
BY_OUTPUTS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        *("query_key_value", "dense_h_to_4h", "fc1", "c_fc"),
    }
)
BY_INPUTS = frozenset({"o_proj", "down_proj", "dense", "dense_4h_to_h", "fc2", "c_proj"})


class Undivided(ValueError):
    """A model that is not divided over so many GPUs; the text says why."""


def divided(shape: ModelShape, ranks: int) -> ModelShape:
    """The part of a rank, as the shape of a smaller model. Raises `Undivided`."""
    reason = next(_reasons(shape, ranks), None)
    if reason is not None:
        raise Undivided(reason)
    layers = [_divided_layer(layer, ranks) for layer in shape.layers]
    removed = sum(
        _numbers(whole) - _numbers(own) for whole, own in zip(shape.layers, layers, strict=True)
    )
    sizes = {
        "num_attention_heads": shape.query_heads // ranks,
        "num_key_value_heads": shape.key_heads // ranks,
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


def _reasons(shape: ModelShape, ranks: int) -> Iterator[str]:
    if ranks == 1:
        return
    if shape.experts is not None:
        yield "a mixture of experts is served on one GPU"
    if any(layer.recurrent is not None for layer in shape.layers):
        yield "a model with recurrent layers is served on one GPU"
    heads, keys = shape.query_heads, shape.key_heads
    if heads % ranks or keys % ranks:
        yield f"{heads} attention heads and {keys} key heads are not divisible by {ranks}"
    for layer in shape.layers:
        for path, (outputs, inputs) in layer.linears.items():
            leaf = path.rpartition(".")[2]
            if leaf not in BY_OUTPUTS | BY_INPUTS:
                yield f"{leaf} is not divided"
            elif (outputs if leaf in BY_OUTPUTS else inputs) % ranks:
                yield f"{leaf} of {outputs} outputs and {inputs} inputs is not divisible by {ranks}"


def _divided_layer(layer: LayerShape, ranks: int) -> LayerShape:
    linears = {
        path: (outputs // ranks, inputs)
        if path.rpartition(".")[2] in BY_OUTPUTS
        else (outputs, inputs // ranks)
        for path, (outputs, inputs) in layer.linears.items()
    }
    return replace(layer, linears=linears)


def _numbers(layer: LayerShape) -> int:
    return sum(math.prod(sizes) for sizes in layer.linears.values())
