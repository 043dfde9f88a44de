"""
The operations that a custom loss may call: two tables from names in a graph to torch functions.

An operation has its parameters, a rule for the size of its result, and whether it changes its first
argument. Excluded are operations that would give different numbers in a second run, expose
uninitialized memory, read outside a tensor's elements, or abort the process instead of raising.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "ATTRIBUTES",
    "FUNCTIONS",
    "MAX_INT",
    "MAX_ITEMS",
    "MAX_RANK",
    "MAX_TEXT",
    "METHODS",
    "PLACEHOLDER",
    "Operation",
    "Parameter",
    "Refused",
    "checked_result",
    "elements",
    "shown",
    "tensors_in",
]

#: Items of one list, and tensors that one node may return (`split`).
MAX_ITEMS = 256
MAX_TEXT = 64
MAX_RANK = 8
#: Limit of integers that are dimensions, shifts or sizes; other integers must fit 64 bits.
MAX_EXTENT = 2**31
MAX_INT = 2**63
EINSUM = re.compile(r"[a-zA-Z]{0,8}(,[a-zA-Z]{0,8}){0,7}->[a-zA-Z]{0,8}")


class Refused(Exception):
    """What is wrong and what is allowed. The code that catches it adds the node."""


def shown(value: object) -> str:
    """A value from a request for a message: always short and fast to format."""
    match value:
        case str():
            return repr(value) if len(value) <= MAX_TEXT else repr(value[:MAX_TEXT]) + "..."
        case int() if abs(value) >= MAX_INT:
            return "an integer beyond 64 bits"
        case int() | float() | None:
            return repr(value)
        case _:
            return type(value).__name__


class _Pair(NamedTuple):
    """The result of `max(dim)`, `sort` and similar operations."""

    values: Tensor
    indices: Tensor


# ---- signatures ---------------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_extent(value: Any) -> bool:
    return _is_int(value) and abs(value) <= MAX_EXTENT


def _is_ints(value: Any) -> bool:
    return (
        isinstance(value, tuple | list) and len(value) <= MAX_RANK and all(map(_is_extent, value))
    )


def _is_tensors(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and 0 < len(value) <= MAX_ITEMS
        and all(isinstance(item, Tensor) for item in value)
    )


def _is_value(value: Any) -> bool:
    return isinstance(value, Tensor | int | float)


#: Kinds of arguments: their description in messages, and the test.
KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "tensor": ("a tensor", lambda value: isinstance(value, Tensor)),
    "number": ("a number", lambda value: isinstance(value, int | float)),
    "value": ("a tensor or a number", _is_value),
    "addend": (
        "a tensor, a number or a tuple",
        lambda value: _is_value(value) or (isinstance(value, tuple) and len(value) <= MAX_RANK),
    ),
    "int": ("an integer", _is_extent),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "flag": ("true or false", lambda value: isinstance(value, int)),
    "false": ("false", lambda value: value is False),
    "text": ("a text", lambda value: isinstance(value, str)),
    "dims": ("an integer or several", lambda value: _is_extent(value) or _is_ints(value)),
    "shape": (
        f"at most {MAX_RANK} integers",
        lambda value: _is_extent(value) or _is_ints(value),
    ),
    "dim_or_tensor": (
        "a dimension or a tensor",
        lambda value: _is_extent(value) or isinstance(value, Tensor),
    ),
    "dims_or_flag": (
        "dimensions",
        lambda value: isinstance(value, bool) or _is_extent(value) or _is_ints(value),
    ),
    "sizes": ("an integer or several", lambda value: _is_extent(value) or _is_ints(value)),
    "tensors": (f"1 to {MAX_ITEMS} tensors", _is_tensors),
    "order": ("a number or 'fro'", lambda value: value == "fro" or isinstance(value, int | float)),
    "dtype": ("a dtype", lambda value: isinstance(value, torch.dtype)),
    "device": ("a device", lambda value: isinstance(value, torch.device | str)),
    "target": (
        "a dtype, a device or a tensor",
        lambda value: isinstance(value, torch.dtype | torch.device | str | Tensor | bool),
    ),
    "layout": ("a layout", lambda value: isinstance(value, torch.layout)),
    "memory_format": ("a memory format", lambda value: isinstance(value, torch.memory_format)),
    "nothing": ("nothing", lambda value: value is None),
    "any": ("a value", lambda _: True),
}

Bound = Mapping[str, Any]
Rule = Callable[[Bound], int]


class Parameter(NamedTuple):
    name: str
    kind: str
    #: An optional parameter may also be None.
    optional: bool
    #: Takes all remaining positional arguments.
    rest: bool

    def check(self, value: Any) -> None:
        allowed, test = KINDS[self.kind]
        if not test(value) and not (self.optional and value is None):
            raise Refused(f"argument {self.name!r} is {shown(value)}; allowed is {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    call: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    #: Upper bound of the `elements` of every tensor that the call allocates, from the checked
    #: arguments. May also make further checks.
    size: Rule
    #: Elements processed besides those read and written.
    work: Rule | None = None
    #: Changes its first argument.
    writes: bool = False
    #: Creates a tensor, on the device of the run.
    makes: bool = False

    def bind(self, count: int, kwargs: Mapping[str, Any]) -> tuple[Parameter, ...]:
        """The parameter of each positional argument."""
        slots: list[Parameter] = []
        for parameter in self.parameters:
            if parameter.rest:
                slots += [parameter] * (count - len(slots))
            if len(slots) == count:
                break
            slots.append(parameter)
        if len(slots) < count:
            raise Refused(f"{count} arguments; allowed are at most {len(slots)}")
        names = {parameter.name for parameter in self.parameters}
        for name in kwargs:
            if name not in names:
                raise Refused(
                    f"keyword {shown(name)}; allowed are {', '.join(sorted(names)) or 'none'}"
                )
            if any(slot.name == name for slot in slots):
                raise Refused(f"argument {name!r} is given twice")
        for parameter in self.parameters:
            given = parameter.name in kwargs or parameter in slots
            if not given and not parameter.optional:
                raise Refused(f"argument {parameter.name!r} is missing")
        return tuple(slots)

    def check(
        self, slots: Sequence[Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Bound:
        bound: dict[str, Any] = {}
        for slot, value in zip(slots, args, strict=True):
            slot.check(value)
            if not slot.rest:
                bound[slot.name] = value
            elif isinstance(value, tuple | list):  # view((2, 3)), as view(2, 3)
                bound[slot.name] = (*bound.get(slot.name, ()), *value)
            else:
                bound[slot.name] = (*bound.get(slot.name, ()), value)
        for parameter in self.parameters:
            if parameter.name in kwargs:
                parameter.check(kwargs[parameter.name])
                bound[parameter.name] = kwargs[parameter.name]
        return bound


def _parameters(text: str) -> tuple[Parameter, ...]:
    """Parses a signature such as `input:tensor dim:int? *shape:shape`."""
    made = []
    for word in text.split():
        name, _, kind = word.partition(":")
        optional, kind = kind.endswith("?"), kind.removesuffix("?")
        if kind not in KINDS:
            raise ValueError(f"{word}: unknown kind of argument")
        made.append(Parameter(name.removeprefix("*"), kind, optional, name.startswith("*")))
    return tuple(made)


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def checked_result(result: Any) -> Any:
    """The result in a form that later nodes may use; refuses other types."""
    if type(result) is Tensor:
        return result
    match result:
        case Tensor() | bool() | float() | None | torch.dtype() | torch.device() | torch.Size():
            return result
        case int():
            if abs(result) >= MAX_INT:
                raise Refused("the result is an integer that does not fit 64 bits")
            return result
        case tuple() if isinstance(result, _Pair) or type(result) is tuple:
            if len(result) > MAX_ITEMS:
                raise Refused(f"the result has {len(result)} items; allowed are {MAX_ITEMS}")
            return result
        case [Tensor() as values, Tensor() as indices] if hasattr(result, "indices"):
            return _Pair(values, indices)
        case list():
            return checked_result(tuple(result))
        case _:
            raise Refused(f"the result is a {type(result).__name__}; allowed are tensors, numbers")


# ---- sizes of results ---------------------------------------------------------------------------


def elements(shape: Sequence[int]) -> int:
    """
    The size of a tensor, with every dimension counted as at least one.

    A tensor of shape (0, N) has no elements, but its sum over the first dimension has N. This is
    the largest result that a reduction over any of the dimensions can have.
    """
    return math.prod(max(1, size) for size in shape)


def _broadcast(*shapes: Sequence[int]) -> int:
    """`elements` of the broadcast shape. Torch reports shapes that cannot be broadcast."""
    rank = max(map(len, shapes), default=0)
    aligned = [(*(1 for _ in range(rank - len(shape))), *shape) for shape in shapes]
    return elements([max(sizes) for sizes in zip(*aligned, strict=True)])


def _as_broadcast(bound: Bound) -> int:
    """For operations with at most one result element per element of the broadcast operands."""
    shapes = {tensor.shape for tensor in tensors_in(bound.values())}
    return elements(shapes.pop()) if len(shapes) == 1 else _broadcast(*shapes)


def _as_input(bound: Bound) -> int:
    return elements(bound["input"].shape)


def _as_reshaped(bound: Bound) -> int:
    """An empty tensor can be reshaped to any shape that contains a zero."""
    sizes = bound.get("shape") or bound.get("sizes") or bound.get("size") or ()
    sizes = sizes if isinstance(sizes, tuple | list) else (sizes,)
    kept = _as_input(bound)
    return kept if bound["input"].numel() else kept * elements(sizes)


def _as_either(bound: Bound) -> int:
    """`view_as` and `reshape_as`."""
    return max(_as_input(bound), elements(bound["other"].shape))


def _as_all(bound: Bound) -> int:
    return sum(elements(tensor.shape) for tensor in bound["tensors"])


def _one(_: Bound) -> int:
    return 1


def _product(shape: Any) -> int:
    sizes = shape if isinstance(shape, tuple | list) else (shape,)
    if any(size < 0 for size in sizes):
        raise Refused(f"shape {list(sizes)}; sizes may not be negative")
    return elements(sizes)


def _as_shape(bound: Bound) -> int:
    return _product(bound["shape"] if "shape" in bound else bound["size"])


def _as_expanded(bound: Bound) -> int:
    input_, sizes = bound["input"], bound["shape"] if "shape" in bound else bound["size"]
    sizes = sizes if isinstance(sizes, tuple | list) else (sizes,)
    old = (*(1 for _ in sizes), *input_.shape)[-len(sizes) :] if sizes else ()
    return elements(
        [was if size == -1 else _product(size) for size, was in zip(sizes, old, strict=True)]
    )


def _as_repeated(bound: Bound) -> int:
    return _product(bound["repeats"]) * _as_input(bound)


def _as_range(bound: Bound) -> int:
    start, end, step = bound["start"], bound.get("end"), bound.get("step")
    if end is None:
        start, end = 0, start
    step = 1 if step is None else step
    if step == 0 or not all(math.isfinite(part) for part in (start, end, step)):
        raise Refused(f"range from {start} to {end} by {step}")
    length: int = math.ceil((end - start) / step)
    return max(1, length)


def _as_steps(bound: Bound) -> int:
    return _product(bound["steps"])


def _as_square(bound: Bound) -> int:
    return _product(bound["n"]) * _product(bound.get("m") or bound["n"])


def _as_diagonal(bound: Bound) -> int:
    input_ = bound["input"]
    if input_.dim() != 1:
        return _as_input(bound)
    return int((_as_input(bound) + abs(bound.get("diagonal") or 0)) ** 2)


def _as_outer(bound: Bound) -> int:
    return _as_input(bound) * elements(bound["vec2"].shape)


def _matmul_sizes(bound: Bound) -> tuple[int, int, int, int]:
    """Batches, rows, inner size and columns of a product of matrices."""
    left, right = bound["input"], bound["other"]
    if not left.dim() or not right.dim():
        raise Refused("a product of matrices takes tensors of at least one dimension")
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    batches = _broadcast(left.shape[:-2], right.shape[:-2])
    return batches, rows, left.shape[-1], columns


def _as_matmul(bound: Bound) -> int:
    batches, rows, inner, columns = _matmul_sizes(bound)
    # Operands are broadcast over the batches too.
    return batches * max(
        elements(sizes) for sizes in ((rows, columns), (rows, inner), (inner, columns))
    )


def _matmul_work(bound: Bound) -> int:
    batches, rows, inner, columns = _matmul_sizes(bound)
    # A multiplication counts as an eighth, because integers and half precision are slow on a CPU.
    return batches * rows * inner * columns // 8


def _as_einsum(bound: Bound) -> int:
    """The product over all letters bounds every order of contraction."""
    text = bound["equation"].replace(" ", "")
    operands = bound["operands"]
    if not EINSUM.fullmatch(text):
        raise Refused(f"equation {shown(text)}; allowed are such as 'ij,j->i', without '...'")
    terms = text.partition("->")[0].split(",")
    if [len(term) for term in terms] != [tensor.dim() for tensor in operands]:
        raise Refused(f"equation {shown(text)} does not fit the dimensions of the operands")
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, operands, strict=True):
        for letter, extent in zip(term, tensor.shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    return math.prod(extents.values())


def _as_padded(bound: Bound) -> int:
    input_, pad = bound["input"], bound["pad"]
    pad = pad if isinstance(pad, tuple | list) else (pad,)
    if bound.get("mode", "constant") != "constant":
        raise Refused(f"mode {shown(bound['mode'])}; allowed is 'constant'")
    if len(pad) % 2 or len(pad) > 2 * input_.dim():
        raise Refused(f"{len(pad)} widths for {input_.dim()} dimensions; two for each are allowed")
    shape = list(input_.shape)
    for at in range(len(pad) // 2):
        shape[-1 - at] += pad[2 * at] + pad[2 * at + 1]
    return _product(shape)


def _as_one_hot(bound: Bound) -> int:
    classes = bound.get("num_classes", -1)
    if classes < 1:
        raise Refused("num_classes must be given, and at least 1")
    _inside(bound["input"], classes)
    return _as_input(bound) * int(classes)


def _as_pieces(bound: Bound) -> int:
    """`split`, `chunk`, `unbind`: they allocate no elements, but the number of views is limited."""
    input_ = bound["input"]
    dim = bound.get("dim") or 0
    if not input_.dim():
        raise Refused("a tensor without dimensions has no parts")
    length = int(input_.size(dim))
    match bound:
        case {"chunks": chunks}:
            count = min(chunks, length)
        case {"pieces": tuple() | list() as sizes}:
            count = len(sizes)
        case {"pieces": piece}:
            if piece < 1:
                raise Refused(f"parts of size {piece}; at least 1 is allowed")
            count = -(-length // piece)
        case _:
            count = length
    if count > MAX_ITEMS:
        raise Refused(f"{count} parts; allowed are {MAX_ITEMS}")
    return _as_input(bound)


def _as_differences(bound: Bound) -> int:
    if (bound.get("n") or 1) > MAX_RANK:  # torch processes the tensor n times
        raise Refused(f"differences of order {bound['n']}; allowed are {MAX_RANK}")
    return _as_input(bound)


def _as_divided(bound: Bound) -> int:
    # Dividing the lowest integer by -1 kills the process with a signal.
    whole = [not isinstance(value, float) for value in (bound["input"], bound["other"])]
    for at, value in enumerate((bound["input"], bound["other"])):
        if isinstance(value, Tensor):
            whole[at] = not value.dtype.is_floating_point
    if bound.get("rounding_mode") is not None and all(whole):
        raise Refused("rounding_mode with integers; use torch.floor_divide, or float()")
    return _as_broadcast(bound)


def _inside(index: Tensor, length: int, *, negative: bool = False) -> None:
    """Refuses an index out of range, which would abort the process on a GPU."""
    if index.dtype is not torch.int64 and index.dtype is not torch.int32:
        raise Refused(f"index of {index.dtype}; allowed are int64 and int32")
    if not index.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(index.detach()))
    if low < (-length if negative else 0) or high >= length:
        raise Refused(f"index from {low} to {high} in a dimension of {length}")


def _dim_length(bound: Bound) -> int:
    shape = bound["input"].shape
    return int(shape[bound["dim"]]) if shape else 1


def _as_index(bound: Bound) -> int:
    """`gather` and similar operations: one element for each element of the index."""
    index = bound["index"]
    length = _dim_length(bound)
    _inside(index, length)
    source = bound.get("src")
    if isinstance(source, Tensor) and source.dim() != index.dim():
        raise Refused(f"source of shape {list(source.shape)}, index of {list(index.shape)}")
    return elements(index.shape)


def _as_scattered(bound: Bound) -> int:
    _as_index(bound)
    return _as_input(bound)


def _as_along(bound: Bound) -> int:
    input_, index = bound["input"], bound["indices"]
    if bound.get("dim") is None:
        _inside(index, input_.numel())
        return elements(index.shape)
    _inside(index, _dim_length(bound))
    if input_.dim() != index.dim():
        raise Refused(f"{index.dim()} dimensions of the index for {input_.dim()}")
    return elements([*map(max, input_.shape, index.shape)])


def _as_selected(bound: Bound) -> int:
    length = _dim_length(bound)
    _inside(bound["index"], length)
    return -(-_as_input(bound) // max(1, length)) * elements(bound["index"].shape)


def _as_added(bound: Bound) -> int:
    _inside(bound["index"], _dim_length(bound))
    return _as_input(bound)


def _as_item(bound: Bound) -> int:
    """Upper bound of the elements of `input[index]`."""
    value, index = bound["input"], bound["index"]
    if isinstance(value, tuple | list):
        if not _is_int(index) and not (isinstance(index, slice) and _is_slice(index)):
            raise Refused(f"index {shown(index)} into a tuple; allowed are int and slice")
        return 1
    if not isinstance(value, Tensor):
        raise Refused(f"a {shown(value)} has no items; allowed are tensors and tuples")
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) > 2 * MAX_RANK:
        raise Refused(f"{len(parts)} indices; allowed are {2 * MAX_RANK}")
    if sum(part is ... for part in parts) > 1:
        raise Refused("an index has more than one ...; allowed is one")
    taken = sum(_dims_taken(part) for part in parts)
    if taken > value.dim():
        raise Refused(f"{taken} indices for {value.dim()} dimensions")
    left = list(value.shape)
    kept, chosen = 1, list[torch.Size | tuple[int, ...]]()
    whole = value.dim() - taken
    for part in parts:
        match part:
            case EllipsisType():
                for _ in range(whole):
                    kept *= max(1, left.pop(0))
                whole = 0
            case slice():
                kept *= max(1, len(range(*part.indices(left.pop(0)))))
            case Tensor() if part.dtype in (torch.bool, torch.uint8):
                chosen.append((int(part.numel()),))
                del left[: part.dim()]
            case Tensor():
                _inside(part, left.pop(0), negative=True)
                chosen.append(part.shape)
            case list():
                left.pop(0)
                chosen.append((len(part),))
            case int():
                left.pop(0)
            case _:  # None: a new dimension of one
                pass
    return kept * elements(left) * _broadcast(*chosen)


def _is_slice(part: slice) -> bool:
    return all(end is None or _is_int(end) for end in (part.start, part.stop, part.step))


def _dims_taken(part: Any) -> int:
    match part:
        case bool():
            pass
        case None | EllipsisType():
            return 0
        case int():
            return 1
        case slice() if _is_slice(part):
            return 1
        case Tensor():
            return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        case list() if part and all(map(_is_extent, part)):
            return 1
        case _:
            pass
    raise Refused(
        f"index {shown(part)}; allowed are integers and lists of them, slices of whole "
        "numbers, ..., None and tensors"
    )


# ---- wrappers around torch and operator ---------------------------------------------------------


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator. If both operands are integers, the size of the result is limited."""

    def bounded(left: Any, right: Any) -> Any:
        if _is_int(left) and _is_int(right):
            if call in (operator.pow, operator.ipow) and abs(left) > 1:
                if right * abs(left).bit_length() > 2 * MAX_TEXT:
                    raise Refused(f"{left} ** {right} does not fit 64 bits")
            elif call in (operator.lshift, operator.ilshift) and right > MAX_TEXT:
                raise Refused(f"{left} << {right} does not fit 64 bits")
        return call(left, right)

    return bounded


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, tuple) or isinstance(right, tuple):
        if not (_is_ints(left) and _is_ints(right)):
            raise Refused("a tuple can be added to a tuple of integers only")
        return (*left, *right)
    return left + right


def _as_attribute(bound: Bound) -> int:
    value = bound["input"]
    return elements(value.shape) if isinstance(value, Tensor) else 1


def _attribute(value: Any, name: str) -> Any:
    kind, get = ATTRIBUTES[name]
    if not isinstance(value, kind):
        raise Refused(f"a {type(value).__name__} has no attribute {name!r} here")
    return get(value)


#: Readable attributes: the type that has them, and how to read them.
ATTRIBUTES: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "T": (Tensor, lambda value: value.T),
    "device": (Tensor, lambda value: value.device),
    "dtype": (Tensor, lambda value: value.dtype),
    "indices": (_Pair, lambda value: value.indices),
    "mT": (Tensor, lambda value: value.mT),
    "ndim": (Tensor, lambda value: value.ndim),
    "shape": (Tensor, lambda value: value.shape),
    "values": (_Pair, lambda value: value.values),
}


def _to(
    input_: Tensor,
    *targets: Any,
    other: Tensor | None = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    **_: Any,
) -> Tensor:
    """Converts the dtype. Device arguments are ignored: all tensors are on one device."""
    wanted = input_.dtype
    for target in (*targets, other, dtype):
        if isinstance(target, torch.dtype):
            wanted = target
        elif isinstance(target, Tensor):
            wanted = target.dtype
    return input_.to(wanted, copy=copy or any(flag is True for flag in targets[2:]))


def _cast(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda input_, **_: input_.to(dtype)


def _identity(input_: Tensor, *_: Any, **__: Any) -> Tensor:
    return input_


def _like(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(input_: Tensor, *args: Any, **options: Any) -> Tensor:
        options.pop("device", None)  # always the device of the input
        return call(input_, *args, **options)

    return made


def _numel(value: Any) -> int:
    return math.prod(value) if isinstance(value, torch.Size) else int(value.numel())


# ---- the tables ---------------------------------------------------------------------------------


def _shared(namespace: Any) -> dict[str, Operation]:
    """The operations of `_SHARED` as functions of torch, or as methods of Tensor."""
    made = {}
    for name, form in _SHARED.items():
        text, *rules = (form,) if isinstance(form, str) else form
        size = rules[0] if rules else _as_broadcast
        work = rules[1] if len(rules) == 2 else None
        made[name] = _operation(getattr(namespace, name), text, size, work=work)
    return made


def _words(text: str) -> list[str]:
    return text.split()


def _operation(
    call: Callable[..., Any], text: str, size: Rule = _as_broadcast, **more: Any
) -> Operation:
    return Operation(call=call, parameters=_parameters(text), size=size, **more)


PLACEHOLDER = _operation(lambda: None, "", _one)

#: Elementwise operations: functions of torch, methods, and in-place methods (ending with _).
_ELEMENTWISE: Mapping[str, str] = {
    **dict.fromkeys(
        _words(
            "abs absolute acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad "
            "digamma erf erfc erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan isneginf "
            "isposinf lgamma log log10 log1p log2 logical_not neg negative positive rad2deg "
            "reciprocal relu rsqrt sigmoid sign signbit sgn sin sinc sinh sqrt square tan tanh trunc"
        ),
        "input:tensor",
    ),
    **dict.fromkeys(
        _words(
            "bitwise_and bitwise_or bitwise_xor eq ge gt le lt ne greater greater_equal less "
            "less_equal not_equal pow float_power remainder fmod floor_divide multiply mul xlogy "
            "logical_and logical_or logical_xor"
        ),
        "input:value other:value",
    ),
    **dict.fromkeys(
        _words(
            "atan2 arctan2 copysign fmax fmin heaviside hypot ldexp logaddexp logaddexp2 maximum "
            "minimum nextafter"
        ),
        "input:tensor other:value",
    ),
    **dict.fromkeys(_words("add sub subtract"), "input:value other:value alpha:number?"),
    "pow": "input:value exponent:value",
    "float_power": "input:value exponent:value",
    "round": "input:tensor decimals:int?",
    "clamp": "input:tensor min:value? max:value?",
    "clip": "input:tensor min:value? max:value?",
    "clamp_min": "input:tensor min:value",
    "clamp_max": "input:tensor max:value",
    "lerp": "input:tensor end:tensor weight:value",
    "logit": "input:tensor eps:number?",
    "addcmul": "input:tensor tensor1:tensor tensor2:tensor value:number?",
    "addcdiv": "input:tensor tensor1:tensor tensor2:tensor value:number?",
    "nan_to_num": "input:tensor nan:number? posinf:number? neginf:number?",
    "masked_fill": "input:tensor mask:tensor value:value",
    "tril": "input:tensor diagonal:int?",
    "triu": "input:tensor diagonal:int?",
    "cumsum": "input:tensor dim:int dtype:dtype?",
    "cumprod": "input:tensor dim:int dtype:dtype?",
}

_REDUCED = "input:tensor dim:dims? keepdim:bool? dtype:dtype? axis:dims? keepdims:bool?"
_ONE_DIM = "input:tensor dim:int? keepdim:bool? axis:int? keepdims:bool?"
_SPREAD = "input:tensor dim:dims_or_flag? unbiased:bool? keepdim:bool? correction:number?"
_EXTREME = "input:tensor dim:dim_or_tensor? keepdim:bool? other:tensor? axis:int?"
_SOFTMAX = "input:tensor dim:int? dtype:dtype?"

#: Operations with the same signature as a function of torch and as a method; never in place.
_SHARED: Mapping[str, str | tuple[str, Rule] | tuple[str, Rule, Rule]] = {
    **dict.fromkeys(("sum", "mean", "nansum", "nanmean"), _REDUCED),
    **dict.fromkeys(("amax", "amin"), "input:tensor dim:dims? keepdim:bool? axis:dims?"),
    **dict.fromkeys(("any", "all"), "input:tensor dim:dims? keepdim:bool? axis:dims?"),
    **dict.fromkeys(("argmax", "argmin", "median", "nanmedian"), _ONE_DIM),
    **dict.fromkeys(("std", "var"), _SPREAD),
    **dict.fromkeys(("max", "min"), _EXTREME),
    **dict.fromkeys(("softmax", "log_softmax"), _SOFTMAX),
    "prod": "input:tensor dim:int? keepdim:bool? dtype:dtype? axis:int?",
    "logsumexp": "input:tensor dim:dims keepdim:bool?",
    "count_nonzero": "input:tensor dim:dims?",
    "logcumsumexp": "input:tensor dim:int",
    "cummax": "input:tensor dim:int",
    "cummin": "input:tensor dim:int",
    "sort": "input:tensor dim:int? descending:bool? stable:bool?",
    "argsort": "input:tensor dim:int? descending:bool? stable:bool?",
    "topk": "input:tensor k:int dim:int? largest:bool? sorted:bool?",
    "kthvalue": "input:tensor k:int dim:int? keepdim:bool?",
    "isclose": "input:tensor other:tensor rtol:number? atol:number? equal_nan:bool?",
    **dict.fromkeys(
        ("div", "divide", "true_divide"),
        ("input:value other:value rounding_mode:text?", _as_divided),
    ),
    "unsqueeze": "input:tensor dim:int",
    "squeeze": "input:tensor dim:dims?",
    "flatten": "input:tensor start_dim:int? end_dim:int?",
    "ravel": "input:tensor",
    "unflatten": ("input:tensor dim:int sizes:shape", _as_reshaped),
    "transpose": "input:tensor dim0:int dim1:int",
    "swapaxes": "input:tensor axis0:int axis1:int",
    "swapdims": "input:tensor dim0:int dim1:int",
    "movedim": "input:tensor source:dims destination:dims",
    "t": "input:tensor",
    "clone": "input:tensor memory_format:memory_format?",
    "detach": "input:tensor",
    "narrow": "input:tensor dim:int start:int length:int",
    "select": "input:tensor dim:int index:int",
    "diagonal": "input:tensor offset:int? dim1:int? dim2:int?",
    "diag": ("input:tensor diagonal:int?", _as_diagonal),
    "diff": ("input:tensor n:int? dim:int?", _as_differences),
    "fliplr": "input:tensor",
    "flipud": "input:tensor",
    "roll": "input:tensor shifts:dims dims:dims?",
    "broadcast_to": ("input:tensor size:shape", _as_expanded),
    "repeat_interleave": ("input:tensor repeats:int dim:int?", _as_repeated),
    "chunk": ("input:tensor chunks:int dim:int?", _as_pieces),
    "unbind": ("input:tensor dim:int?", _as_pieces),
    "matmul": ("input:tensor other:tensor", _as_matmul, _matmul_work),
    "outer": ("input:tensor vec2:tensor", _as_outer),
    "dot": "input:tensor tensor:tensor",
    "masked_select": "input:tensor mask:tensor",
    "gather": ("input:tensor dim:int index:tensor sparse_grad:false?", _as_index),
    "take_along_dim": ("input:tensor indices:tensor dim:int?", _as_along),
    "index_select": ("input:tensor dim:int index:tensor", _as_selected),
    "scatter": ("input:tensor dim:int index:tensor src:value? value:number?", _as_scattered),
    "scatter_add": ("input:tensor dim:int index:tensor src:tensor", _as_scattered),
    "index_add": ("input:tensor dim:int index:tensor source:tensor alpha:number?", _as_added),
}

_LIKE = "input:tensor dtype:dtype? device:device? layout:layout? memory_format:memory_format?"
_MADE = "dtype:dtype? device:device? layout:layout?"
_NORM = "input:tensor p:order? dim:dims? keepdim:bool? out:nothing? dtype:dtype?"
_POINTWISE_LOSS = "input:tensor target:tensor size_average:nothing? reduce:nothing? reduction:text?"
_IN_PLACE = "inplace:false?"

#: Methods by name.
METHODS: Mapping[str, Operation] = {
    **{name: _operation(getattr(Tensor, name), text) for name, text in _ELEMENTWISE.items()},
    **{
        # `eq_` exists too and writes 0 and 1.
        f"{name}_": _operation(getattr(Tensor, f"{name}_"), text, writes=True)
        for name, text in _ELEMENTWISE.items()
        if hasattr(Tensor, f"{name}_")
    },
    **{
        f"{name}_": _operation(
            getattr(Tensor, f"{name}_"),
            "input:tensor other:value rounding_mode:text?",
            _as_divided,
            writes=True,
        )
        for name in ("div", "divide", "true_divide")
    },
    **_shared(Tensor),
    **{
        name: _operation(_cast(dtype), "input:tensor memory_format:memory_format?")
        for name, dtype in {
            "bfloat16": torch.bfloat16,
            "bool": torch.bool,
            "double": torch.float64,
            "float": torch.float32,
            "half": torch.float16,
            "int": torch.int32,
            "long": torch.int64,
        }.items()
    },
    "zero_": _operation(Tensor.zero_, "input:tensor", writes=True),
    "fill_": _operation(Tensor.fill_, "input:tensor value:value", writes=True),
    "copy_": _operation(Tensor.copy_, "input:tensor src:tensor", writes=True),
    "to": _operation(
        _to,
        "input:tensor *target:target? other:tensor? dtype:dtype? device:device? "
        "non_blocking:bool? copy:bool? memory_format:memory_format?",
    ),
    "type": _operation(_to, "input:tensor dtype:dtype"),
    "type_as": _operation(_to, "input:tensor other:tensor", _as_input),
    "cpu": _operation(_identity, "input:tensor"),
    "cuda": _operation(_identity, "input:tensor device:any? non_blocking:bool?"),
    "contiguous": _operation(Tensor.contiguous, "input:tensor memory_format:memory_format?"),
    "size": _operation(Tensor.size, "input:tensor dim:int?", _one),
    "dim": _operation(Tensor.dim, "input:tensor", _one),
    "ndimension": _operation(Tensor.dim, "input:tensor", _one),
    "numel": _operation(_numel, "input:any", _one),
    "nelement": _operation(_numel, "input:any", _one),
    "is_floating_point": _operation(Tensor.is_floating_point, "input:tensor", _one),
    "where": _operation(Tensor.where, "input:tensor condition:tensor other:value"),
    "norm": _operation(Tensor.norm, "input:tensor p:order? dim:dims? keepdim:bool? dtype:dtype?"),
    "mm": _operation(Tensor.mm, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "mv": _operation(Tensor.mv, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "bmm": _operation(Tensor.bmm, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "view": _operation(Tensor.view, "input:tensor *shape:shape? size:shape?", _as_reshaped),
    "reshape": _operation(Tensor.reshape, "input:tensor *shape:shape?", _as_reshaped),
    "view_as": _operation(Tensor.view_as, "input:tensor other:tensor", _as_either),
    "reshape_as": _operation(Tensor.reshape_as, "input:tensor other:tensor", _as_either),
    "permute": _operation(Tensor.permute, "input:tensor *dims:dims"),
    "flip": _operation(Tensor.flip, "input:tensor *dims:dims"),
    "expand": _operation(Tensor.expand, "input:tensor *shape:shape? size:shape?", _as_expanded),
    "expand_as": _operation(Tensor.expand_as, "input:tensor other:tensor"),
    "repeat": _operation(Tensor.repeat, "input:tensor *repeats:shape", _as_repeated),
    "tile": _operation(Tensor.tile, "input:tensor *repeats:shape", _as_repeated),
    "split": _operation(Tensor.split, "input:tensor pieces:sizes dim:int?", _as_pieces),
    "new_zeros": _operation(
        Tensor.new_zeros, f"input:tensor *shape:shape {_MADE}", _as_shape, makes=True
    ),
    "new_ones": _operation(
        Tensor.new_ones, f"input:tensor *shape:shape {_MADE}", _as_shape, makes=True
    ),
    "new_full": _operation(
        Tensor.new_full, f"input:tensor size:shape fill_value:number {_MADE}", _as_shape, makes=True
    ),
}

_TORCH: Mapping[str, Operation] = {
    **{name: _operation(getattr(torch, name), text) for name, text in _ELEMENTWISE.items()},
    **_shared(torch),
    "where": _operation(torch.where, "condition:tensor input:value other:value"),
    "numel": _operation(_numel, "input:any", _one),
    "is_floating_point": _operation(torch.is_floating_point, "input:tensor", _one),
    "rsub": _operation(torch.rsub, "input:tensor other:value alpha:number?"),
    "norm": _operation(torch.norm, _NORM),
    "std_mean": _operation(torch.std_mean, _SPREAD),
    "var_mean": _operation(torch.var_mean, _SPREAD),
    "dist": _operation(torch.dist, "input:tensor other:tensor p:number?"),
    "cosine_similarity": _operation(
        torch.cosine_similarity, "x1:tensor x2:tensor dim:int? eps:number?"
    ),
    "mm": _operation(torch.mm, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "mv": _operation(torch.mv, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "bmm": _operation(torch.bmm, "input:tensor other:tensor", _as_matmul, work=_matmul_work),
    "einsum": _operation(torch.einsum, "equation:text *operands:tensor", _as_einsum),
    "reshape": _operation(torch.reshape, "input:tensor shape:shape", _as_reshaped),
    "permute": _operation(torch.permute, "input:tensor dims:dims"),
    "flip": _operation(torch.flip, "input:tensor dims:dims"),
    "tile": _operation(torch.tile, "input:tensor repeats:shape", _as_repeated),
    "split": _operation(torch.split, "input:tensor pieces:sizes dim:int?", _as_pieces),
    **{
        name: _operation(getattr(torch, name), "tensors:tensors dim:int?", _as_all)
        for name in ("cat", "concat", "concatenate", "stack")
    },
    "hstack": _operation(torch.hstack, "tensors:tensors", _as_all),
    "vstack": _operation(torch.vstack, "tensors:tensors", _as_all),
    "zeros_like": _operation(_like(torch.zeros_like), _LIKE),
    "ones_like": _operation(_like(torch.ones_like), _LIKE),
    "full_like": _operation(_like(torch.full_like), f"input:tensor fill_value:number {_LIKE[13:]}"),
    "zeros": _operation(torch.zeros, f"*shape:shape? size:shape? {_MADE}", _as_shape, makes=True),
    "ones": _operation(torch.ones, f"*shape:shape? size:shape? {_MADE}", _as_shape, makes=True),
    "full": _operation(torch.full, f"size:shape fill_value:number {_MADE}", _as_shape, makes=True),
    "scalar_tensor": _operation(torch.scalar_tensor, f"s:number {_MADE}", _one, makes=True),
    "eye": _operation(torch.eye, f"n:int m:int? {_MADE}", _as_square, makes=True),
    "arange": _operation(
        torch.arange, f"start:number end:number? step:number? {_MADE}", _as_range, makes=True
    ),
    "linspace": _operation(
        torch.linspace, f"start:number end:number steps:int {_MADE}", _as_steps, makes=True
    ),
}

_FUNCTIONAL: Mapping[str, Operation] = {
    **{
        name: _operation(getattr(functional, name), f"input:tensor {_IN_PLACE}")
        for name in ("hardsigmoid", "hardswish", "mish", "relu", "relu6", "selu", "silu")
    },
    **{
        name: _operation(getattr(functional, name), "input:tensor")
        for name in ("logsigmoid", "sigmoid", "softsign", "tanh", "tanhshrink")
    },
    **{
        name: _operation(
            getattr(functional, name), "input:tensor dim:int _stacklevel:int? dtype:dtype?"
        )
        for name in ("softmax", "softmin", "log_softmax")
    },
    "softplus": _operation(functional.softplus, "input:tensor beta:number? threshold:number?"),
    "gelu": _operation(functional.gelu, "input:tensor approximate:text?"),
    "elu": _operation(functional.elu, f"input:tensor alpha:number? {_IN_PLACE}"),
    "celu": _operation(functional.celu, f"input:tensor alpha:number? {_IN_PLACE}"),
    "leaky_relu": _operation(
        functional.leaky_relu, f"input:tensor negative_slope:number? {_IN_PLACE}"
    ),
    "hardtanh": _operation(
        functional.hardtanh, f"input:tensor min_val:number? max_val:number? {_IN_PLACE}"
    ),
    "threshold": _operation(
        functional.threshold, f"input:tensor threshold:number value:number {_IN_PLACE}"
    ),
    "normalize": _operation(
        functional.normalize, "input:tensor p:number? dim:int? eps:number? out:nothing?"
    ),
    "cosine_similarity": _TORCH["cosine_similarity"],
    "mse_loss": _operation(functional.mse_loss, f"{_POINTWISE_LOSS} weight:tensor?"),
    "l1_loss": _operation(functional.l1_loss, f"{_POINTWISE_LOSS} weight:tensor?"),
    "smooth_l1_loss": _operation(functional.smooth_l1_loss, f"{_POINTWISE_LOSS} beta:number?"),
    "huber_loss": _operation(
        functional.huber_loss,
        "input:tensor target:tensor reduction:text? delta:number? weight:tensor?",
    ),
    "kl_div": _operation(functional.kl_div, f"{_POINTWISE_LOSS} log_target:bool?"),
    "binary_cross_entropy_with_logits": _operation(
        functional.binary_cross_entropy_with_logits,
        "input:tensor target:tensor weight:tensor? size_average:nothing? reduce:nothing? "
        "reduction:text? pos_weight:tensor?",
    ),
    "pad": _operation(
        functional.pad, "input:tensor pad:shape mode:text? value:number?", _as_padded
    ),
    "one_hot": _operation(functional.one_hot, "input:tensor num_classes:int", _as_one_hot),
}

_SPECIAL: Mapping[str, Operation] = {
    **{
        name: _operation(getattr(torch.special, name), "input:tensor")
        for name in _words(
            "digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 log1p log_ndtr ndtr "
            "ndtri sinc"
        )
    },
    "logit": _operation(torch.special.logit, "input:tensor eps:number?"),
    "logsumexp": _operation(torch.special.logsumexp, "input:tensor dim:dims keepdim:bool?"),
    "softmax": _operation(torch.special.softmax, "input:tensor dim:int dtype:dtype?"),
    "log_softmax": _operation(torch.special.log_softmax, "input:tensor dim:int dtype:dtype?"),
    "xlogy": _operation(torch.special.xlogy, "input:value other:value"),
    "xlog1py": _operation(torch.special.xlog1py, "input:value other:value"),
}

_OPERATORS: Mapping[str, Operation] = {
    **{
        name: _operation(getattr(operator, name), "input:value")
        for name in ("abs", "inv", "invert", "neg", "pos")
    },
    **{
        name: _operation(_plain(getattr(operator, name)), "input:value other:value")
        for name in _words(
            "and_ eq floordiv ge gt le lshift lt mod mul ne or_ pow rshift sub truediv xor"
        )
    },
    **{
        name: _operation(_plain(getattr(operator, name)), "input:value other:value", writes=True)
        for name in _words(
            "iadd iand ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor"
        )
    },
    "add": _operation(_added, "input:addend other:addend"),
    "matmul": _TORCH["matmul"],
    "getitem": _operation(operator.getitem, "input:any index:any", _as_item),
}

_MATH: Mapping[str, Operation] = {
    **{
        name: _operation(getattr(math, name), "x:number", _one)
        for name in _words(
            "acos asin atan ceil cos cosh erf erfc exp expm1 fabs floor isfinite isinf isnan "
            "lgamma log10 log1p log2 sin sinh sqrt tan tanh trunc"
        )
    },
    **{
        name: _operation(getattr(math, name), "x:number y:number", _one)
        for name in ("atan2", "copysign", "fmod", "hypot", "pow")
    },
    "log": _operation(math.log, "x:number base:number?", _one),
}

#: Functions by the names that tracing records: the modules in which torch defines them.
FUNCTIONS: Mapping[str, Operation] = {
    "getattr": _operation(_attribute, "input:any name:text", _as_attribute),
    **{f"operator.{name}": operation for name, operation in _OPERATORS.items()},
    **{f"math.{name}": operation for name, operation in _MATH.items()},
    **{f"torch.Tensor.{name}": operation for name, operation in METHODS.items()},
    **{f"torch.{name}": operation for name, operation in _TORCH.items()},
    **{f"torch.functional.{name}": _TORCH[name] for name in ("einsum", "norm", "split")},
    **{f"torch.nn.functional.{name}": operation for name, operation in _FUNCTIONAL.items()},
    **{f"torch._C._nn.{name}": _FUNCTIONAL[name] for name in ("gelu", "one_hot", "softplus")},
    "torch._C._nn.log_sigmoid": _FUNCTIONAL["logsigmoid"],
    "torch._C._nn.pad": _FUNCTIONAL["pad"],
    **{
        f"torch.{where}{name}": operation
        for where in ("special.", "_C._special.special_")
        for name, operation in _SPECIAL.items()
    },
    **{
        f"torch.{where}vector_norm": _operation(
            torch.linalg.vector_norm, "x:tensor ord:number? dim:dims? keepdim:bool? dtype:dtype?"
        )
        for where in ("linalg.", "_C._linalg.linalg_")
    },
}
