"""
Signatures of the operations of custom losses: the name and kind of each argument.

Torch accepts more than an operation should: a tensor to write into as the fifth argument, or a
tensor in place of an integer, whose value a size rule does not see. So an argument without a
declared name is refused, and a number is a Python number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.training.custom_loss_sizes import (
    MAX_EXTENT,
    MAX_ITEMS,
    MAX_RANK,
    Refused,
    is_extent,
    shown,
)

DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:[0-9]{1,3})?")
EINSUM = re.compile(r"[a-zA-Z]{0,8}(,[a-zA-Z]{0,8}){0,7}->[a-zA-Z]{0,8}")


class Device(NamedTuple):
    """A device named in the graph. It always stands for the device that the loss runs on."""

    text: str


def _is_value(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float))  # runs for every argument: faster than a union


def _is_sizes(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return len(value) <= MAX_ITEMS and all(map(is_extent, value))
    return is_extent(value)


def _is_dims(value: Any) -> bool:
    return _is_sizes(value) and not (isinstance(value, tuple | list) and len(value) > MAX_RANK)


def _is_tensors(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and 0 < len(value) <= MAX_ITEMS
        and all(isinstance(item, Tensor) for item in value)
    )


def _is_order(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value == "fro")


def _is_device(value: Any) -> bool:
    if isinstance(value, str):
        return DEVICE.fullmatch(value) is not None
    return isinstance(value, torch.device | Device)


def _is_equation(value: Any) -> bool:
    return isinstance(value, str) and EINSUM.fullmatch(value.replace(" ", "")) is not None


Test = Callable[[Any], bool]


def _of(kinds: Any) -> Test:
    return lambda value: isinstance(value, kinds)


def _one_of(*texts: str) -> tuple[str, Test]:
    return " or ".join(map(repr, texts)), lambda value: isinstance(value, str) and value in texts


#: Kinds of arguments: their description in messages, and the test.
KINDS: Mapping[str, tuple[str, Test]] = {
    "tensor": ("a tensor", _of(Tensor)),
    "tensors": (f"1 to {MAX_ITEMS} tensors", _is_tensors),
    "number": ("a number", _of(int | float)),
    "value": ("a tensor or a number", _is_value),
    "addend": (
        "a tensor, a number or a tuple",
        lambda value: _is_value(value) or (isinstance(value, tuple) and len(value) <= MAX_RANK),
    ),
    "int": (f"an integer of at most {MAX_EXTENT}", is_extent),
    "dims": (f"an integer of at most {MAX_EXTENT}, or at most {MAX_RANK} of them", _is_dims),
    "sizes": (f"an integer, or at most {MAX_ITEMS} of them", _is_sizes),
    "dim_or_tensor": (
        "an integer or a tensor",
        lambda value: is_extent(value) or isinstance(value, Tensor),
    ),
    "dims_or_flag": (
        "integers, true or false",
        lambda value: isinstance(value, bool) or _is_dims(value),
    ),
    "bool": ("true or false", _of(bool)),
    "false": ("false", lambda value: value is False),
    "nothing": ("nothing", lambda value: value is None),
    "order": ("a number or 'fro'", _is_order),
    "dtype": ("a dtype", _of(torch.dtype)),
    "device": ("a device such as 'cpu' or 'cuda:0'", _is_device),
    "target": (
        "a dtype, a device or a tensor",
        lambda value: isinstance(value, torch.dtype | Tensor | bool) or _is_device(value),
    ),
    "layout": ("a layout", _of(torch.layout)),
    "memory_format": ("a memory format", _of(torch.memory_format)),
    "equation": ("an equation such as 'ij,j->i', without '...'", _is_equation),
    "rounding": _one_of("floor", "trunc"),
    "approximation": _one_of("none", "tanh"),
    "mode": _one_of("constant"),
    "reduction": _one_of("none", "mean", "sum", "batchmean", "elementwise_mean"),
    "text": ("a text", _of(str)),
    "any": ("a value", lambda _: True),
}


class Parameter(NamedTuple):
    name: str
    #: What is allowed, for messages, and the test.
    allowed: str
    test: Test
    #: An optional parameter may also be None.
    optional: bool
    #: Takes all remaining positional arguments.
    rest: bool

    def check(self, value: Any) -> None:
        if not self.test(value) and not (self.optional and value is None):
            raise Refused(f"argument {self.name!r} is {shown(value)}; allowed is {self.allowed}")


Signature = tuple[Parameter, ...]


def signature(text: str) -> Signature:
    """Parses a signature such as `input:tensor dim:int? *shape:dims`."""
    made = []
    for word in text.split():
        name, _, kind = word.partition(":")
        optional, kind = kind.endswith("?"), kind.removesuffix("?")
        if kind not in KINDS:
            raise ValueError(f"{word}: unknown kind of argument")
        rest, name = name.startswith("*"), name.removeprefix("*")
        made.append(Parameter(name, *KINDS[kind], optional, rest))
    return tuple(made)


def bind(parameters: Signature, count: int, names: Sequence[str]) -> Signature:
    """The parameter of each argument: first those by position, then those by keyword."""
    slots: list[Parameter] = []
    for parameter in parameters:
        if parameter.rest:
            slots += [parameter] * (count - len(slots))
        if len(slots) == count:
            break
        slots.append(parameter)
    if len(slots) < count:
        raise Refused(f"{count} arguments; allowed are at most {len(slots)}")
    by_name = {parameter.name: parameter for parameter in parameters}
    for name in names:
        if name not in by_name:
            allowed = ", ".join(sorted(by_name)) or "none"
            raise Refused(f"keyword {shown(name)}; allowed are {allowed}")
        if by_name[name] in slots:
            raise Refused(f"argument {name!r} is given twice")
        slots.append(by_name[name])
    for parameter in parameters:
        if not parameter.optional and parameter not in slots:
            raise Refused(f"argument {parameter.name!r} is missing")
    return tuple(slots)


def checked(slots: Signature, values: Sequence[Any]) -> dict[str, Any]:
    """The arguments by name. All arguments of a `rest` parameter are one tuple."""
    bound: dict[str, Any] = {}
    for slot, value in zip(slots, values, strict=True):
        slot.check(value)
        if value is None:  # as if not given
            continue
        if slot.rest:  # view((2, 3)) is view(2, 3)
            more = value if isinstance(value, tuple | list) else (value,)
            bound[slot.name] = (*bound.get(slot.name, ()), *more)
        else:
            bound[slot.name] = value
    return bound
