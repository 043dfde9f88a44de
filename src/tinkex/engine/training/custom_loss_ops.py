"""
The operations that a custom loss may call: two tables from names in a graph to torch functions.

Torch checks the arguments. The tables exclude what would give different numbers in a second run,
expose uninitialized memory, read outside a tensor's elements, or abort the process.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tinkex.engine.training import custom_loss_sizes as sizes
from tinkex.engine.training.custom_loss_sizes import (
    MAX_INT,
    MAX_ITEMS,
    MAX_TEXT,
    Refused,
    Rule,
)

__all__ = ["ATTRIBUTES", "FUNCTIONS", "KEYWORDS", "METHODS", "Operation", "checked_result"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keywords of any operation. Torch has others that write into a tensor, draw random numbers or
#: choose a device.
KEYWORDS = _words(
    "_stacklevel alpha approximate atol axis axis0 axis1 beta chunks condition copy correction "
    "decimals delta descending destination device diagonal dim dim0 dim1 dim2 dims dtype end "
    "end_dim eps equal_nan equation exponent fill_value index indices input inplace k keepdim "
    "keepdims largest layout length log_target m mask mat2 max max_val memory_format min min_val "
    "mode n name nan negative_slope neginf non_blocking num_classes offset ord other out p pad "
    "pos_weight posinf reduce reduction repeats rounding_mode rtol s shape shifts size "
    "size_average sizes sorted source sparse_grad src stable start start_dim step steps target "
    "tensor tensor1 tensor2 tensors threshold unbiased value vec vec2 weight x x1 x2"
)
#: Arguments that may be None or False only.
OFF = frozenset(("inplace", "out", "sparse_grad"))


class Pair(NamedTuple):
    """The result of `max(dim)`, `sort` and similar operations."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    call: Callable[..., Any]
    #: Upper bound of the `elements` of every tensor that the call allocates, from its arguments.
    #: May also make further checks.
    size: Rule = sizes.broadcast
    #: Elements processed besides those read and written.
    work: Rule | None = None
    #: Elements allocated besides the result. Most are kept for the backward pass.
    kept: Rule | None = None
    #: Its integers are sizes, shifts or offsets, not values.
    extents: bool = False
    #: Changes its first argument.
    writes: bool = False
    #: Creates a tensor, on the device of the run.
    makes: bool = False
    #: Names of the arguments by position, where some are in `OFF`.
    names: tuple[str, ...] = ()


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
        case tuple() if isinstance(result, Pair) or type(result) is tuple:
            if len(result) > MAX_ITEMS:
                raise Refused(f"the result has {len(result)} items; allowed are {MAX_ITEMS}")
            return result
        case [Tensor() as values, Tensor() as indices] if hasattr(result, "indices"):
            return Pair(values, indices)
        case list():
            return checked_result(tuple(result))
        case _:
            raise Refused(f"the result is a {type(result).__name__}; allowed are tensors, numbers")


# ---- wrappers around torch and operator ---------------------------------------------------------


def _plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on tensors and numbers. The result of two integers is limited."""

    def bounded(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, Tensor | int | float):
                raise Refused(f"{sizes.shown(operand)}; allowed is a tensor or a number")
        match operands:
            case (int() as left, int() as right):
                if call in (operator.pow, operator.ipow) and abs(left) > 1:
                    if right * abs(left).bit_length() > 2 * MAX_TEXT:
                        raise Refused(f"{left} ** {right} does not fit 64 bits")
                elif call in (operator.lshift, operator.ilshift) and right > MAX_TEXT:
                    raise Refused(f"{left} << {right} does not fit 64 bits")
        return call(*operands)

    return bounded


def _of_numbers(call: Callable[..., float]) -> Callable[..., float]:
    """A function of `math`. It would also read the value of a tensor."""

    def checked(*numbers: Any) -> float:
        if not all(isinstance(number, int | float) for number in numbers):
            raise Refused("allowed is a number")
        return call(*numbers)

    return checked


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, tuple) and isinstance(right, tuple):
        if not all(isinstance(item, int) for item in (*left, *right)):
            raise Refused("a tuple can be added to a tuple of integers only")
        return (*left, *right)
    return _add(left, right)


_add = _plain(operator.add)


def _attribute(value: Any, name: str) -> Any:
    if not isinstance(value, ATTRIBUTES[name]):
        raise Refused(f"a {type(value).__name__} has no attribute {name!r} here")
    return getattr(value, name)


#: Readable attributes and the type that has them.
ATTRIBUTES: Mapping[str, type] = {
    **dict.fromkeys(("T", "device", "dtype", "mT", "ndim", "shape"), Tensor),
    **dict.fromkeys(("indices", "values"), Pair),
}


def _to(
    input: Tensor,
    *targets: Any,
    other: Tensor | None = None,
    dtype: torch.dtype | None = None,
    copy: bool = False,
    **_: Any,
) -> Tensor:
    """Converts the dtype. Device arguments are ignored: all tensors are on one device."""
    wanted = input.dtype
    for target in (*targets, other, dtype):
        if isinstance(target, torch.dtype):
            wanted = target
        elif isinstance(target, Tensor):
            wanted = target.dtype
    return input.to(wanted, copy=copy or any(flag is True for flag in targets[2:]))


def _identity(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _numel(value: Tensor | torch.Size) -> int:
    return int(value.numel())


# ---- the tables ---------------------------------------------------------------------------------


#: Operations made of several, whose intermediate results the backward pass keeps.
_KEPT: Mapping[str, Rule] = dict.fromkeys(
    ("cosine_similarity", "float_power", "huber_loss", "kl_div", "l1_loss", "mse_loss"),
    sizes.twice,
)


def _all(namespace: Any, names: str | Iterable[str], **more: Any) -> dict[str, Operation]:
    """The functions of these names."""
    names = names.split() if isinstance(names, str) else names
    return {
        name: Operation(call=getattr(namespace, name), kept=_KEPT.get(name), **more)
        for name in names
    }


def _ruled(namespace: Any, rules: Mapping[str, Rule], **more: Any) -> dict[str, Operation]:
    """The functions of these names, each with its size rule."""
    return {
        name: Operation(call=getattr(namespace, name), size=rule, **more)
        for name, rule in rules.items()
    }


#: Elementwise operations: functions of torch, methods, and in-place methods (ending with _).
_ELEMENTWISE = (
    "abs absolute acos acosh add addcdiv addcmul arctan2 asin asinh atan atan2 atanh bitwise_and "
    "bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip copysign cos cosh "
    "cumprod cumsum deg2rad digamma eq erf erfc erfinv exp exp2 expm1 float_power floor "
    "floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 isfinite "
    "isinf isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2 "
    "logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill "
    "maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal positive pow "
    "rad2deg reciprocal relu remainder round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt "
    "square sub subtract tan tanh trunc xlogy"
)
_DIVISIONS = dict.fromkeys(("div", "divide", "true_divide"), sizes.div)
_DIAGONAL = ("tril", "triu")
#: Operations with results no larger than the broadcast of their operands, and views.
_BOUNDED = (
    "all amax amin any argmax argmin argsort clone count_nonzero cummax cummin detach dot flatten "
    "isclose log_softmax logcumsumexp logsumexp masked_select max mean median min nanmean "
    "nanmedian nansum norm permute prod ravel softmax sort squeeze std sum swapaxes swapdims t "
    "transpose unsqueeze var"
)
_BOUNDED_WITH_EXTENTS = (
    "broadcast_to diagonal flip fliplr flipud kthvalue movedim narrow reshape roll select topk "
    "unflatten"
)
_MATMULS = ("bmm", "matmul", "mm", "mv")


def _shared(namespace: Any) -> dict[str, Operation]:
    """The operations that are functions of torch and methods of Tensor."""
    return {
        **_all(namespace, _ELEMENTWISE),
        **_all(namespace, _DIAGONAL, extents=True),
        **_all(namespace, _BOUNDED),
        **_all(namespace, _BOUNDED_WITH_EXTENTS, extents=True),
        **_all(namespace, _MATMULS, size=sizes.matmul, work=sizes.matmul_work),
        **_all(namespace, ("is_floating_point",), size=sizes.one),
        **_ruled(namespace, _DIVISIONS),
        **_ruled(
            namespace,
            {
                "gather": sizes.gather,
                "index_add": sizes.index_add,
                "index_select": sizes.index_select,
                "outer": sizes.outer,
                "scatter": sizes.scatter,
                "scatter_add": sizes.scatter,
                "take_along_dim": sizes.take_along_dim,
            },
        ),
        **_ruled(
            namespace,
            {
                "chunk": sizes.chunk,
                "diag": sizes.diag,
                "diff": sizes.diff,
                "repeat_interleave": sizes.on_meta(torch.repeat_interleave),
                "split": sizes.split,
                "tile": sizes.on_meta(Tensor.tile),
                "unbind": sizes.unbind,
            },
            extents=True,
        ),
        "numel": Operation(call=_numel, size=sizes.one),
    }


def _creating(namespace: Any, names: str, **more: Any) -> dict[str, Operation]:
    return _ruled(
        namespace,
        {name: sizes.on_meta(getattr(namespace, name), device="meta") for name in names.split()},
        makes=True,
        **more,
    )


#: Methods by name.
METHODS: Mapping[str, Operation] = {
    **_shared(Tensor),
    **{
        # `eq_` exists too and writes 0 and 1.
        f"{name}_": Operation(
            call=getattr(Tensor, f"{name}_"),
            size=_DIVISIONS.get(name, sizes.broadcast),
            kept=_KEPT.get(name),
            extents=name in _DIAGONAL,
            writes=True,
        )
        for name in (*_ELEMENTWISE.split(), *_DIAGONAL, *_DIVISIONS)
        if hasattr(Tensor, f"{name}_")
    },
    **_all(Tensor, "copy_ fill_ zero_", writes=True),
    **_all(Tensor, "bfloat16 bool contiguous double float half int long where"),
    **_all(Tensor, "dim ndimension size", size=sizes.one),
    **_all(Tensor, "expand expand_as reshape_as view view_as", extents=True),
    **_all(Tensor, ("repeat",), size=sizes.on_meta(Tensor.repeat), extents=True),
    **_creating(Tensor, "new_ones new_zeros", extents=True),
    **_creating(Tensor, "new_full"),
    **dict.fromkeys(("cpu", "cuda"), Operation(call=_identity)),
    **dict.fromkeys(("to", "type", "type_as"), Operation(call=_to)),
    "nelement": Operation(call=_numel, size=sizes.one),
}

_TORCH: Mapping[str, Operation] = {
    **_shared(torch),
    **_all(torch, "cosine_similarity dist rsub std_mean var_mean"),
    **_all(torch, "cat concat concatenate hstack stack vstack", size=sizes.joined),
    **_all(torch, "full_like ones_like zeros_like", makes=True),
    **_creating(torch, "eye ones zeros", extents=True),
    **_creating(torch, "full linspace scalar_tensor"),
    "arange": Operation(call=torch.arange, size=sizes.arange, makes=True),
    "einsum": Operation(call=torch.einsum, size=sizes.einsum),
    "where": Operation(call=torch.where, size=sizes.where),
}


def _functional(text: str) -> dict[str, Operation]:
    made = {}
    for name in text.split():
        call = getattr(functional, name)
        names = inspect.signature(call).parameters if inspect.isfunction(call) else ()
        made[name] = Operation(call=call, names=tuple(names), kept=_KEPT.get(name))
    return made


_FUNCTIONAL: Mapping[str, Operation] = {
    **_functional(
        "binary_cross_entropy_with_logits celu elu gelu hardsigmoid hardswish hardtanh huber_loss "
        "kl_div l1_loss leaky_relu log_softmax logsigmoid mish mse_loss normalize relu relu6 selu "
        "sigmoid silu smooth_l1_loss softmax softmin softplus softsign tanh tanhshrink threshold"
    ),
    "cosine_similarity": _TORCH["cosine_similarity"],
    "one_hot": Operation(call=functional.one_hot, size=sizes.one_hot),
    "pad": Operation(call=functional.pad, size=sizes.padded),
}

_SPECIAL: Mapping[str, Operation] = _all(
    torch.special,
    "digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 log1p log_ndtr log_softmax "
    "logit logsumexp ndtr ndtri sinc softmax xlog1py xlogy",
)

_OPERATORS: Mapping[str, Operation] = {
    **{
        name: Operation(call=_plain(getattr(operator, name)))
        for name in _words(
            "abs and_ eq floordiv ge gt inv invert le lshift lt mod mul ne neg or_ pos pow rshift "
            "sub truediv xor"
        )
    },
    **{
        name: Operation(call=_plain(getattr(operator, name)), writes=True)
        for name in _words(
            "iadd iand ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor"
        )
    },
    "add": Operation(call=_added),
    "matmul": _TORCH["matmul"],
    "getitem": Operation(call=operator.getitem, size=sizes.getitem, kept=sizes.masks),
}

_MATH: Mapping[str, Operation] = {
    name: Operation(call=_of_numbers(getattr(math, name)), size=sizes.one)
    for name in _words(
        "acos asin atan atan2 ceil copysign cos cosh erf erfc exp expm1 fabs floor fmod hypot "
        "isfinite isinf isnan lgamma log log10 log1p log2 pow sin sinh sqrt tan tanh trunc"
    )
}

#: Functions by the names that tracing records: the modules in which torch defines them.
FUNCTIONS: Mapping[str, Operation] = {
    "getattr": Operation(call=_attribute),
    **{f"operator.{name}": operation for name, operation in _OPERATORS.items()},
    **{f"math.{name}": operation for name, operation in _MATH.items()},
    **{f"torch.Tensor.{name}": operation for name, operation in METHODS.items()},
    **{f"torch.{name}": operation for name, operation in _TORCH.items()},
    **{f"torch.functional.{name}": _TORCH[name] for name in ("einsum", "norm", "split")},
    **{f"torch.nn.functional.{name}": operation for name, operation in _FUNCTIONAL.items()},
    **{
        f"torch._C._nn.{name}": _FUNCTIONAL[name] for name in ("gelu", "one_hot", "pad", "softplus")
    },
    "torch._C._nn.log_sigmoid": _FUNCTIONAL["logsigmoid"],
    **{
        f"torch.{where}{name}": operation
        for where in ("special.", "_C._special.special_")
        for name, operation in _SPECIAL.items()
    },
    **{
        f"torch.{where}vector_norm": Operation(call=torch.linalg.vector_norm)
        for where in ("linalg.", "_C._linalg.linalg_")
    },
}
