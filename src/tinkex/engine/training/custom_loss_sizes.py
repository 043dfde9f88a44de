"""
How many elements an operation of a custom loss creates, known before it runs.

A rule takes the checked arguments by name (`custom_loss_arguments`) and returns an upper bound for
every tensor that the call allocates. The default is the broadcast of all tensors. Views need no
rule: they allocate nothing, and their shape is checked when they exist. A rule also makes the
checks that torch does not make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

#: Items of one list, and tensors that one node may return (`split`).
MAX_ITEMS = 256
MAX_TEXT = 64
MAX_RANK = 8
#: Limit of integers that are sizes, shifts or offsets; other integers must fit 64 bits.
MAX_EXTENT = 2**31
MAX_INT = 2**63

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


def is_extent(value: Any) -> bool:
    """Torch computes sizes in 64 bits and does not detect every overflow."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_EXTENT


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


def broadcast(**bound: Any) -> int:
    return broadcast_elements(tensor.shape for tensor in tensors_in(bound.values()))


def one(**_: Any) -> int:
    return 1


def twice(**bound: Any) -> int:
    return 2 * broadcast(**bound)


def product(shape: Any) -> int:
    """`elements` of a shape from a request, which may also be one integer."""
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    if any(extent < 0 for extent in extents):
        raise Refused(f"shape {list(extents)}; sizes may not be negative")
    return elements(extents)


def shaped(*, shape: Any = (), size: Any = (), **_: Any) -> int:
    return product(shape) * product(size)


def eye(*, n: int, m: int | None = None, **_: Any) -> int:
    return product(n) * product(n if m is None else m)


def linspace(*, steps: int, **_: Any) -> int:
    return product(steps)


def repeated(*, input: Tensor, repeats: Any = (), dims: Any = (), **_: Any) -> int:
    return elements(input.shape) * product(repeats) * product(dims)


def arange(*, start: float, end: float | None = None, step: float = 1, **_: Any) -> int:
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or not all(map(math.isfinite, (start, end, step))):
        raise Refused(f"range from {start} to {end} by {step}")
    step = math.trunc(step) or step  # as torch does for integer dtypes
    return max(1, math.ceil((end - start) / step))


def joined(*, tensors: Sequence[Tensor], **_: Any) -> int:
    """`cat`, `stack` and similar operations."""
    return sum(elements(tensor.shape) for tensor in tensors)


def outer(*, input: Tensor, vec2: Tensor) -> int:
    return elements(input.shape) * elements(vec2.shape)


def diag(*, input: Tensor, diagonal: int = 0) -> int:
    if input.dim() != 1:
        return elements(input.shape)
    return (elements(input.shape) + abs(diagonal)) ** 2


def padded(*, input: Tensor, pad: Any, **_: Any) -> int:
    widths = pad if isinstance(pad, tuple | list) else (pad,)
    if len(widths) % 2 or len(widths) > 2 * input.dim():
        raise Refused(
            f"{len(widths)} widths for {input.dim()} dimensions; allowed are two for each"
        )
    shape = list(input.shape)
    for at in range(len(widths) // 2):
        shape[-1 - at] += widths[2 * at] + widths[2 * at + 1]
    return product(shape)


def one_hot(*, input: Tensor, num_classes: int = -1) -> int:
    if num_classes < 1:
        raise Refused("num_classes must be given, and at least 1")
    return elements(input.shape) * num_classes


def _matmul_sizes(*operands: Tensor) -> tuple[int, int, int, int]:
    """Batches, rows, inner size and columns of a product of matrices."""
    left, right = (tensor.shape for tensor in operands)
    if not left or not right:
        raise Refused("a product of matrices takes tensors of at least one dimension")
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return broadcast_elements((left[:-2], right[:-2])), rows, left[-1], columns


def matmul(*, input: Tensor, **second: Tensor) -> int:
    batches, rows, inner, columns = _matmul_sizes(input, *second.values())
    # Operands are broadcast over the batches too.
    return batches * max(map(elements, ((rows, columns), (rows, inner), (inner, columns))))


def matmul_work(*, input: Tensor, **second: Tensor) -> int:
    # A multiplication counts as an eighth, because integers and half precision are slow on a CPU.
    return math.prod(_matmul_sizes(input, *second.values())) // 8


def einsum(*, equation: str, operands: Sequence[Tensor]) -> int:
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


def split(*, dim: int = 0, **bound: Any) -> int:
    # Named differently in torch and Tensor.
    input = bound["input" if "input" in bound else "tensor"]
    size = bound["split_size" if "split_size" in bound else "split_size_or_sections"]
    if isinstance(size, tuple | list):
        return _parts(len(size))
    if size < 1:
        raise Refused(f"parts of size {shown(size)}; at least 1 is allowed")
    return _parts(-(-input.size(dim) // size))


def chunk(*, input: Tensor, chunks: int, dim: int = 0) -> int:
    return _parts(min(chunks, input.size(dim)))


def unbind(*, input: Tensor, dim: int = 0) -> int:
    return _parts(input.size(dim))


def diff(*, input: Tensor, n: int = 1, dim: int = -1) -> int:
    if n > MAX_RANK:  # torch processes the tensor n times
        raise Refused(f"differences of order {shown(n)}; allowed are {MAX_RANK}")
    return elements(input.shape)


def div(*, input: Any, other: Any, rounding_mode: str | None = None) -> int:
    # Dividing the lowest integer by -1 kills the process with a signal.
    if rounding_mode is not None and not any(
        value.dtype.is_floating_point if isinstance(value, Tensor) else isinstance(value, float)
        for value in (input, other)
    ):
        raise Refused("rounding_mode with integers; use torch.floor_divide, or float()")
    return broadcast(input=input, other=other)


# ---- rules of operations with an index ----------------------------------------------------------


def _check_index(index: Tensor, length: int, *, negative: bool = False) -> None:
    """Torch reads outside of the tensor for some indices that are broadcast."""
    if index.dtype is not torch.int64 and index.dtype is not torch.int32:
        raise Refused(f"index of {index.dtype}; allowed are int64 and int32")
    if index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index.detach()))
        if low < (-length if negative else 0) or high >= length:
            raise Refused(f"index from {low} to {high} in a dimension of {length}")


def _length(input: Tensor, dim: int) -> int:
    return input.shape[dim] if input.dim() else 1


def gather(*, input: Tensor, dim: int, index: Tensor, **_: Any) -> int:
    _check_index(index, _length(input, dim))
    return elements(index.shape)


def take_along_dim(*, input: Tensor, indices: Tensor, dim: int | None = None) -> int:
    _check_index(indices, input.numel() if dim is None else _length(input, dim))
    if dim is None:
        return elements(indices.shape)
    if input.dim() != indices.dim():
        raise Refused(f"{indices.dim()} dimensions of the index for {input.dim()}")
    return broadcast(input=input, indices=indices)


def index_select(*, input: Tensor, dim: int, index: Tensor) -> int:
    length = _length(input, dim)
    _check_index(index, length)
    return elements(input.shape) // (length or 1) * elements(index.shape)


def scatter(*, input: Tensor, dim: int, index: Tensor, src: Any = None, **_: Any) -> int:
    _check_index(index, _length(input, dim))
    if isinstance(src, Tensor) and src.dim() != index.dim():
        raise Refused(f"source of shape {list(src.shape)}, index of {list(index.shape)}")
    return elements(input.shape)


def index_add(*, input: Tensor, dim: int, index: Tensor, **_: Any) -> int:
    _check_index(index, _length(input, dim))
    return elements(input.shape)


def getitem(*, input: Any, index: Any = None) -> int:
    """`input[index]`. A boolean index selects at most all elements that it covers."""
    if isinstance(input, tuple | list):
        if not _is_slice(index) and (isinstance(index, bool) or not isinstance(index, int)):
            raise Refused(f"index {shown(index)} into a tuple; allowed are int and slice")
        return 1
    if not isinstance(input, Tensor):
        raise Refused(f"a {shown(input)} has no items; allowed are tensors and tuples")
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) > 2 * MAX_RANK:
        raise Refused(f"{len(parts)} indices; allowed are {2 * MAX_RANK}")
    if sum(part is ... for part in parts) > 1:
        raise Refused("an index has more than one ...; allowed is one")
    uncovered = input.dim() - sum(map(_dims_covered, parts))
    if uncovered < 0:
        raise Refused(f"{input.dim() - uncovered} indices for {input.dim()} dimensions")
    left = list(input.shape)
    sliced, chosen = 1, list[Sequence[int]]()
    for part in parts:
        match part:
            case EllipsisType():
                sliced *= elements(left[:uncovered])
                del left[:uncovered]
            case slice():
                sliced *= len(range(*part.indices(left.pop(0)))) or 1
            case Tensor() if part.dtype in (torch.bool, torch.uint8):
                chosen.append((part.numel(),))
                del left[: part.dim()]
            case Tensor():
                _check_index(part, left.pop(0), negative=True)
                chosen.append(part.shape)
            case list():
                left.pop(0)
                chosen.append((len(part),))
            case int():
                left.pop(0)
    return sliced * elements(left) * broadcast_elements(chosen)


def _is_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(
        end is None or (isinstance(end, int) and not isinstance(end, bool))
        for end in (part.start, part.stop, part.step)
    )


def _dims_covered(part: Any) -> int:
    """Dimensions of the tensor that this part of an index selects from."""
    match part:
        case None | EllipsisType():
            return 0
        case Tensor():
            return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
        case list() if part and all(map(is_extent, part)):
            return 1
        case int() if not isinstance(part, bool):
            return 1
        case slice() if _is_slice(part):
            return 1
    raise Refused(
        f"index {shown(part)}; allowed are integers and lists of them, slices of whole numbers, "
        "..., None and tensors"
    )


def masks(*, index: Any = None, **_: Any) -> int:
    """Torch turns a boolean index into positions: an integer for each element and dimension."""
    found = (part for part in tensors_in((index,)) if part.dtype in (torch.bool, torch.uint8))
    return sum(part.numel() * max(1, part.dim()) for part in found)
