"""
How many elements an operation of a custom loss creates, known before it runs.

A rule takes the arguments of the call and returns an upper bound for every tensor that the call
allocates. The default is the broadcast of all tensors. Views need no rule: they allocate nothing,
and their shape is checked when they exist. A rule also makes the checks that torch does not make.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

#: Items of one list, and tensors that one node may return (`split`).
MAX_ITEMS = 256
MAX_TEXT = 64
MAX_RANK = 8
#: Limit of integers that are sizes, shifts or offsets; other integers must fit 64 bits.
MAX_EXTENT = 2**31
MAX_INT = 2**63
EINSUM = re.compile(r"[a-zA-Z]{0,8}(,[a-zA-Z]{0,8}){0,7}->[a-zA-Z]{0,8}")

Rule = Callable[..., int]


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


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


def check_extents(values: Iterable[Any]) -> None:
    """Torch computes sizes in 64 bits and does not detect every overflow."""
    for value in values:
        if isinstance(value, tuple | list):
            check_extents(value)
        elif isinstance(value, int) and abs(value) > MAX_EXTENT:
            raise Refused(f"integer {shown(value)}; allowed are at most {MAX_EXTENT}")


def elements(shape: Sequence[int]) -> int:
    """
    The size of a tensor, with every dimension counted as at least one.

    A tensor of shape (0, N) has no elements, but its sum over the first dimension has N. This is
    the largest result that a reduction over any of the dimensions can have.
    """
    return math.prod(shape) or math.prod(size or 1 for size in shape)


def broadcast_elements(shapes: Iterable[Sequence[int]]) -> int:
    """`elements` of the broadcast shape. Torch reports shapes that cannot be broadcast."""
    distinct = set(map(tuple, shapes))
    if len(distinct) == 1:
        return elements(distinct.pop())
    rank = max(map(len, distinct), default=0)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in distinct]
    return elements([max(sizes) for sizes in zip(*aligned, strict=True)])


# ---- rules --------------------------------------------------------------------------------------


def broadcast(*args: Any, **kwargs: Any) -> int:
    return broadcast_elements(tensor.shape for tensor in tensors_in((*args, *kwargs.values())))


def one(*_: Any, **__: Any) -> int:
    return 1


def twice(*args: Any, **kwargs: Any) -> int:
    return 2 * broadcast(*args, **kwargs)


def on_meta(call: Callable[..., Tensor], **options: Any) -> Rule:
    """The exact shape, from a run on the meta device, which has no elements."""

    def size(*args: Any, **kwargs: Any) -> int:
        moved = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args]
        return elements(call(*moved, **kwargs | options).shape)

    return size


def arange(start: float, end: float | None = None, step: float = 1, **_: Any) -> int:
    """Here the meta device takes 60 times as long as the operation."""
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or not all(map(math.isfinite, (start, end, step))):
        raise Refused(f"range from {start} to {end} by {step}")
    return max(1, math.ceil((end - start) / step))


def joined(tensors: Any, *_: Any, **__: Any) -> int:
    """`cat`, `stack` and similar operations."""
    if not isinstance(tensors, tuple | list):
        raise Refused(f"{shown(tensors)}; allowed are 1 to {MAX_ITEMS} tensors")
    return sum(elements(tensor.shape) for tensor in tensors_in(tensors))


def outer(input: Tensor, vec2: Tensor) -> int:
    return elements(input.shape) * elements(vec2.shape)


def diag(input: Tensor, diagonal: int = 0) -> int:
    if input.dim() != 1:
        return elements(input.shape)
    return (elements(input.shape) + abs(diagonal)) ** 2


def padded(input: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> int:
    if mode != "constant":
        raise Refused(f"mode {shown(mode)}; allowed is 'constant'")
    check_extents(pad)
    return on_meta(functional.pad)(input, pad)


def one_hot(input: Tensor, num_classes: int = -1) -> int:
    if num_classes < 1:
        raise Refused("num_classes must be given, and at least 1")
    check_extents((num_classes,))
    return elements(input.shape) * num_classes


def _matmul_sizes(*args: Any, **kwargs: Any) -> tuple[int, int, int, int]:
    """Batches, rows, inner size and columns of a product of matrices."""
    left, right, *_ = (tensor.shape for tensor in tensors_in((*args, *kwargs.values())))
    if not left or not right:
        raise Refused("a product of matrices takes tensors of at least one dimension")
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return broadcast_elements((left[:-2], right[:-2])), rows, left[-1], columns


def matmul(*args: Any, **kwargs: Any) -> int:
    batches, rows, inner, columns = _matmul_sizes(*args, **kwargs)
    # Operands are broadcast over the batches too.
    return batches * max(map(elements, ((rows, columns), (rows, inner), (inner, columns))))


def matmul_work(*args: Any, **kwargs: Any) -> int:
    # A multiplication counts as an eighth, because integers and half precision are slow on a CPU.
    return math.prod(_matmul_sizes(*args, **kwargs)) // 8


def einsum(equation: str, *operands: Tensor) -> int:
    """The product over all letters bounds every order of contraction."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if [len(term) for term in terms] != [tensor.dim() for tensor in operands]:
        raise Refused(f"equation {shown(equation)} does not fit the dimensions of the operands")
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, operands, strict=True):
        for letter, extent in zip(term, tensor.shape, strict=True):
            extents[letter] = max(extent, extents.get(letter, 1))
    return math.prod(extents.values())


# Parts are views, but the number of them is limited.


def _parts(count: int) -> int:
    if count > MAX_ITEMS:
        raise Refused(f"{count} parts; allowed are {MAX_ITEMS}")
    return 1


def split(input: Tensor, size: Any, dim: int = 0) -> int:
    if isinstance(size, tuple | list):
        return _parts(len(size))
    if size < 1:
        raise Refused(f"parts of size {shown(size)}; at least 1 is allowed")
    return _parts(-(-input.size(dim) // size))


def chunk(input: Tensor, chunks: int, dim: int = 0) -> int:
    return _parts(min(chunks, input.size(dim)))


def unbind(input: Tensor, dim: int = 0) -> int:
    return _parts(input.size(dim))


def diff(input: Tensor, n: int = 1, dim: int = -1) -> int:
    if n > MAX_RANK:  # torch processes the tensor n times
        raise Refused(f"differences of order {shown(n)}; allowed are {MAX_RANK}")
    return elements(input.shape)


def where(condition: Tensor, input: Any, other: Any) -> int:
    """All three, because torch returns the indices of `condition` if the others are missing."""
    return broadcast(condition, input, other)


def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> int:
    # Dividing the lowest integer by -1 kills the process with a signal.
    if rounding_mode is not None and not any(
        value.dtype.is_floating_point if isinstance(value, Tensor) else isinstance(value, float)
        for value in (input, other)
    ):
        raise Refused("rounding_mode with integers; use torch.floor_divide, or float()")
    return broadcast(input, other)


# ---- rules of operations with an index ----------------------------------------------------------


def _check_index(index: Tensor, length: int) -> None:
    """Torch reads outside of the tensor for some indices that are broadcast."""
    if index.dtype is not torch.int64 and index.dtype is not torch.int32:
        raise Refused(f"index of {index.dtype}; allowed are int64 and int32")
    if index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index.detach()))
        if low < 0 or high >= length:
            raise Refused(f"index from {low} to {high} in a dimension of {length}")


def _length(input: Tensor, dim: int) -> int:
    return input.shape[dim] if input.dim() else 1


def gather(input: Tensor, dim: int, index: Tensor, **_: Any) -> int:
    _check_index(index, _length(input, dim))
    return elements(index.shape)


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> int:
    _check_index(indices, input.numel() if dim is None else _length(input, dim))
    if dim is None:
        return elements(indices.shape)
    if input.dim() != indices.dim():
        raise Refused(f"{indices.dim()} dimensions of the index for {input.dim()}")
    return broadcast(input, indices)


def index_select(input: Tensor, dim: int, index: Tensor) -> int:
    length = _length(input, dim)
    _check_index(index, length)
    return elements(input.shape) // (length or 1) * elements(index.shape)


def scatter(input: Tensor, dim: int, index: Tensor, *source: Any, **sources: Any) -> int:
    _check_index(index, _length(input, dim))
    for tensor in tensors_in((*source, *sources.values())):
        if tensor.dim() != index.dim():
            raise Refused(f"source of shape {list(tensor.shape)}, index of {list(index.shape)}")
    return elements(input.shape)


def index_add(input: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> int:
    _check_index(index, _length(input, dim))
    return elements(input.shape)


def getitem(value: Any, index: Any) -> int:
    """`value[index]`. A boolean index selects at most all elements that it covers."""
    if not isinstance(value, Tensor):
        if not isinstance(value, tuple | list) or not isinstance(index, int | slice):
            raise Refused(f"a {shown(value)} has no item {shown(index)}; it has to be a tensor")
        return 1
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, bool | str):
            raise Refused(f"index {shown(part)}; allowed are integers, slices, None and tensors")
    match index:
        case Tensor(dtype=torch.bool | torch.uint8):
            return elements(value.shape)
        case Tensor() if value.dim():
            return elements(index.shape) * elements(value.shape[1:])
        case list():
            return on_meta(Tensor.__getitem__)(value, index)
        case tuple() if any(isinstance(part, Tensor | list) for part in index):
            return on_meta(Tensor.__getitem__)(value, index)
        case _:
            return 1


def masks(value: Any, index: Any) -> int:
    """Torch turns a boolean index into positions: an integer for each element and dimension."""
    found = (part for part in tensors_in((index,)) if part.dtype in (torch.bool, torch.uint8))
    return sum(part.numel() * max(1, part.dim()) for part in found)
