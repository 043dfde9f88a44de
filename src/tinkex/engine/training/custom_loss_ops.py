"""
The operations that a custom loss may call: two tables from names in a graph to torch functions.

An operation has a signature and a rule for the size of its result. The tables exclude what would
give different numbers in a second run, expose uninitialized memory, read outside a tensor's
elements, or abort the process.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tinkex.engine.training import custom_loss_sizes as sizes
from tinkex.engine.training.custom_loss_arguments import Signature, signature
from tinkex.engine.training.custom_loss_sizes import (
    MAX_INT,
    MAX_ITEMS,
    MAX_TEXT,
    Refused,
    Rule,
    is_extent,
)

__all__ = ["ATTRIBUTES", "FUNCTIONS", "METHODS", "Operation", "checked_result"]


class Pair(NamedTuple):
    """The result of `max(dim)`, `sort` and similar operations."""

    values: Tensor
    indices: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operation:
    call: Callable[..., Any]
    parameters: Signature
    #: Upper bound of the `elements` of every tensor that the call allocates, from its arguments by
    #: name. May also make further checks.
    size: Rule = sizes.broadcast
    #: Elements processed besides those read and written.
    work: Rule | None = None
    #: Elements allocated besides the result. Most are kept for the backward pass.
    kept: Rule | None = None
    #: Creates a tensor, on the device of the run.
    makes: bool = False


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
        match operands:
            case (int() as left, int() as right):
                if call in (operator.pow, operator.ipow) and abs(left) > 1:
                    if right * abs(left).bit_length() > 2 * MAX_TEXT:
                        raise Refused(f"{left} ** {right} does not fit 64 bits")
                elif call in (operator.lshift, operator.ilshift) and right > MAX_TEXT:
                    raise Refused(f"{left} << {right} does not fit 64 bits")
        return call(*operands)

    return bounded


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, tuple) or isinstance(right, tuple):
        both = (left, right)
        if not all(isinstance(one, tuple) and all(map(is_extent, one)) for one in both):
            raise Refused("a tuple can be added to a tuple of integers only")
        return (*left, *right)
    return left + right


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


def _words(text: str) -> list[str]:
    return text.split()


def _all(
    namespace: Any, table: Mapping[str, str], size: Rule = sizes.broadcast, **more: Any
) -> dict[str, Operation]:
    """The functions of these names, with their signatures."""
    return {
        name: Operation(
            call=getattr(namespace, name),
            parameters=signature(text),
            size=size,
            kept=_KEPT.get(name.removesuffix("_")),
            **more,
        )
        for name, text in table.items()
    }


def _ruled(
    namespace: Any, table: Mapping[str, tuple[str, Rule]], **more: Any
) -> dict[str, Operation]:
    """The functions of these names, each with its signature and its size rule."""
    made = (_all(namespace, {name: text}, rule, **more) for name, (text, rule) in table.items())
    return {name: operation for one in made for name, operation in one.items()}


def _operation(
    call: Callable[..., Any], text: str, size: Rule = sizes.broadcast, **more: Any
) -> Operation:
    return Operation(call=call, parameters=signature(text), size=size, **more)


#: Elementwise operations: functions of torch, methods, and in-place methods (ending with _).
_ELEMENTWISE: Mapping[str, str] = {
    **dict.fromkeys(
        _words(
            "abs absolute acos acosh asin asinh atan atanh bitwise_not ceil cos cosh deg2rad "
            "digamma erf erfc erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan isneginf "
            "isposinf lgamma log log10 log1p log2 logical_not neg negative positive rad2deg "
            "reciprocal relu rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc"
        ),
        "input:tensor",
    ),
    **dict.fromkeys(
        _words(
            "bitwise_and bitwise_or bitwise_xor eq floor_divide fmod ge greater greater_equal gt le "
            "less less_equal logical_and logical_or logical_xor lt mul multiply ne not_equal "
            "remainder xlogy"
        ),
        "input:value other:value",
    ),
    **dict.fromkeys(
        _words(
            "arctan2 atan2 copysign fmax fmin heaviside hypot ldexp logaddexp logaddexp2 maximum "
            "minimum nextafter"
        ),
        "input:tensor other:value",
    ),
    **dict.fromkeys(("add", "sub", "subtract"), "input:value other:value alpha:number?"),
    **dict.fromkeys(
        ("addcdiv", "addcmul"), "input:tensor tensor1:tensor tensor2:tensor value:number?"
    ),
    **dict.fromkeys(("clamp", "clip"), "input:tensor min:value? max:value?"),
    **dict.fromkeys(("cumprod", "cumsum"), "input:tensor dim:int dtype:dtype?"),
    **dict.fromkeys(("float_power", "pow"), "input:value exponent:value"),
    **dict.fromkeys(("tril", "triu"), "input:tensor diagonal:int?"),
    "clamp_max": "input:tensor max:value",
    "clamp_min": "input:tensor min:value",
    "lerp": "input:tensor end:tensor weight:value",
    "logit": "input:tensor eps:number?",
    "masked_fill": "input:tensor mask:tensor value:value",
    "nan_to_num": "input:tensor nan:number? posinf:number? neginf:number?",
    "round": "input:tensor decimals:int?",
}
_DIVISIONS = dict.fromkeys(
    ("div", "divide", "true_divide"), ("input:value other:value rounding_mode:rounding?", sizes.div)
)

_ONE_DIM = "input:tensor dim:int? keepdim:bool? axis:int? keepdims:bool?"
_SPREAD = "input:tensor dim:dims_or_flag? unbiased:bool? keepdim:bool? correction:number?"

#: Operations with results no larger than the broadcast of their operands, and views.
_BOUNDED: Mapping[str, str] = {
    **dict.fromkeys(
        ("mean", "nanmean", "nansum", "sum"),
        "input:tensor dim:dims? keepdim:bool? dtype:dtype? axis:dims? keepdims:bool?",
    ),
    **dict.fromkeys(
        ("all", "amax", "amin", "any"), "input:tensor dim:dims? keepdim:bool? axis:dims?"
    ),
    **dict.fromkeys(("argmax", "argmin", "median", "nanmedian"), _ONE_DIM),
    **dict.fromkeys(("argsort", "sort"), "input:tensor dim:int? descending:bool? stable:bool?"),
    **dict.fromkeys(("cummax", "cummin", "logcumsumexp", "unsqueeze"), "input:tensor dim:int"),
    **dict.fromkeys(("detach", "fliplr", "flipud", "ravel", "t"), "input:tensor"),
    **dict.fromkeys(("log_softmax", "softmax"), "input:tensor dim:int? dtype:dtype?"),
    **dict.fromkeys(
        ("max", "min"), "input:tensor dim:dim_or_tensor? keepdim:bool? other:tensor? axis:int?"
    ),
    **dict.fromkeys(("std", "var"), _SPREAD),
    **dict.fromkeys(("swapdims", "transpose"), "input:tensor dim0:int dim1:int"),
    "broadcast_to": "input:tensor size:dims",
    "clone": "input:tensor memory_format:memory_format?",
    "count_nonzero": "input:tensor dim:dims?",
    "diagonal": "input:tensor offset:int? dim1:int? dim2:int?",
    "dot": "input:tensor tensor:tensor",
    "flatten": "input:tensor start_dim:int? end_dim:int?",
    "isclose": "input:tensor other:tensor rtol:number? atol:number? equal_nan:bool?",
    "kthvalue": "input:tensor k:int dim:int? keepdim:bool?",
    "logsumexp": "input:tensor dim:dims keepdim:bool?",
    "masked_select": "input:tensor mask:tensor",
    "movedim": "input:tensor source:dims destination:dims",
    "narrow": "input:tensor dim:int start:int length:int",
    "prod": "input:tensor dim:int? keepdim:bool? dtype:dtype? axis:int?",
    "roll": "input:tensor shifts:dims dims:dims?",
    "select": "input:tensor dim:int index:int",
    "squeeze": "input:tensor dim:dims?",
    "swapaxes": "input:tensor axis0:int axis1:int",
    "topk": "input:tensor k:int dim:int? largest:bool? sorted:bool?",
    "unflatten": "input:tensor dim:int sizes:dims",
}
_RULED: Mapping[str, tuple[str, Rule]] = {
    **_DIVISIONS,
    "chunk": ("input:tensor chunks:int dim:int?", sizes.chunk),
    "diag": ("input:tensor diagonal:int?", sizes.diag),
    "diff": ("input:tensor n:int? dim:int?", sizes.diff),
    "gather": ("input:tensor dim:int index:tensor sparse_grad:false?", sizes.gather),
    "index_add": (
        "input:tensor dim:int index:tensor source:tensor alpha:number?",
        sizes.index_add,
    ),
    "index_select": ("input:tensor dim:int index:tensor", sizes.index_select),
    "is_floating_point": ("input:tensor", sizes.one),
    "outer": ("input:tensor vec2:tensor", sizes.outer),
    "repeat_interleave": ("input:tensor repeats:int dim:int?", sizes.repeated),
    "scatter": ("input:tensor dim:int index:tensor src:value? value:number?", sizes.scatter),
    "scatter_add": ("input:tensor dim:int index:tensor src:tensor", sizes.scatter),
    "take_along_dim": ("input:tensor indices:tensor dim:int?", sizes.take_along_dim),
    "tile": ("input:tensor *dims:dims", sizes.repeated),
    "unbind": ("input:tensor dim:int?", sizes.unbind),
}
_MATMULS: Mapping[str, str] = {
    "bmm": "input:tensor mat2:tensor",
    "matmul": "input:tensor other:tensor",
    "mm": "input:tensor mat2:tensor",
    "mv": "input:tensor vec:tensor",
}


def _shared(namespace: Any) -> dict[str, Operation]:
    """The operations that are functions of torch and methods of Tensor."""
    return {
        **_all(namespace, _ELEMENTWISE),
        **_all(namespace, _BOUNDED),
        **_ruled(namespace, _RULED),
        **_all(namespace, _MATMULS, sizes.matmul, work=sizes.matmul_work),
        "numel": _operation(_numel, "input:any", sizes.one),
    }


_MADE = "dtype:dtype? device:device? layout:layout?"

#: Methods by name.
METHODS: Mapping[str, Operation] = {
    **_shared(Tensor),
    # `eq_` exists too and writes 0 and 1.
    **_all(Tensor, {f"{n}_": text for n, text in _ELEMENTWISE.items() if hasattr(Tensor, f"{n}_")}),
    **_ruled(Tensor, {f"{name}_": form for name, form in _DIVISIONS.items()}),
    **_all(
        Tensor,
        {
            **dict.fromkeys(
                _words("bfloat16 bool contiguous double float half int long"),
                "input:tensor memory_format:memory_format?",
            ),
            **dict.fromkeys(("expand", "view"), "input:tensor *shape:dims? size:dims?"),
            **dict.fromkeys(("expand_as", "reshape_as", "view_as"), "input:tensor other:tensor"),
            **dict.fromkeys(("flip", "permute"), "input:tensor *dims:dims"),
            "copy_": "input:tensor src:tensor",
            "fill_": "input:tensor value:value",
            "norm": "input:tensor p:order? dim:dims? keepdim:bool? dtype:dtype?",
            "reshape": "input:tensor *shape:dims?",
            "where": "input:tensor condition:tensor other:value",
            "zero_": "input:tensor",
        },
    ),
    **_all(Tensor, {"dim": "input:tensor", "ndimension": "input:tensor"}, sizes.one),
    **_ruled(
        Tensor,
        {
            "repeat": ("input:tensor *repeats:dims", sizes.repeated),
            "size": ("input:tensor dim:int?", sizes.one),
            "split": ("input:tensor split_size:sizes dim:int?", sizes.split),
        },
    ),
    **_all(
        Tensor,
        {
            **dict.fromkeys(
                ("new_ones", "new_zeros"), f"input:tensor *shape:dims? size:dims? {_MADE}"
            ),
            "new_full": f"input:tensor size:dims fill_value:number {_MADE}",
        },
        sizes.shaped,
        makes=True,
    ),
    "cpu": _operation(_identity, "input:tensor"),
    "cuda": _operation(_identity, "input:tensor device:any? non_blocking:bool?"),
    "to": _operation(
        _to,
        "input:tensor *target:target? other:tensor? dtype:dtype? device:device? "
        "non_blocking:bool? copy:bool? memory_format:memory_format?",
    ),
    "type": _operation(_to, "input:tensor dtype:dtype"),
    "type_as": _operation(_to, "input:tensor other:tensor"),
    "nelement": _operation(_numel, "input:any", sizes.one),
}

_LIKE = f"{_MADE} memory_format:memory_format?"

_TORCH: Mapping[str, Operation] = {
    **_shared(torch),
    **_all(
        torch,
        {
            **dict.fromkeys(("flip", "permute"), "input:tensor dims:dims"),
            **dict.fromkeys(("std_mean", "var_mean"), _SPREAD),
            "cosine_similarity": "x1:tensor x2:tensor dim:int? eps:number?",
            "dist": "input:tensor other:tensor p:number?",
            "norm": "input:tensor p:order? dim:dims? keepdim:bool? out:nothing? dtype:dtype?",
            "reshape": "input:tensor shape:dims",
            "rsub": "input:tensor other:value alpha:number?",
            "where": "condition:tensor input:value other:value",
        },
    ),
    **_all(
        torch,
        {
            **dict.fromkeys(("cat", "concat", "concatenate", "stack"), "tensors:tensors dim:int?"),
            **dict.fromkeys(("hstack", "vstack"), "tensors:tensors"),
        },
        sizes.joined,
    ),
    **_all(
        torch,
        {
            **dict.fromkeys(("ones_like", "zeros_like"), f"input:tensor {_LIKE}"),
            "full_like": f"input:tensor fill_value:number {_LIKE}",
        },
        makes=True,
    ),
    **_ruled(
        torch,
        {
            **dict.fromkeys(("ones", "zeros"), (f"*shape:dims? size:dims? {_MADE}", sizes.shaped)),
            "arange": (f"start:number end:number? step:number? {_MADE}", sizes.arange),
            "eye": (f"n:int m:int? {_MADE}", sizes.eye),
            "full": (f"size:dims fill_value:number {_MADE}", sizes.shaped),
            "linspace": (f"start:number end:number steps:int {_MADE}", sizes.linspace),
            "scalar_tensor": (f"s:number {_MADE}", sizes.one),
        },
        makes=True,
    ),
    **_ruled(
        torch,
        {
            "einsum": ("equation:equation *operands:tensor", sizes.einsum),
            "split": ("tensor:tensor split_size_or_sections:sizes dim:int?", sizes.split),
            "tile": ("input:tensor dims:dims", sizes.repeated),
        },
    ),
}

_OFF = "inplace:false?"
_LOSS = "input:tensor target:tensor size_average:nothing? reduce:nothing? reduction:reduction?"

_FUNCTIONAL: Mapping[str, Operation] = {
    **_all(
        functional,
        {
            **dict.fromkeys(
                _words("hardsigmoid hardswish mish relu relu6 selu silu"), f"input:tensor {_OFF}"
            ),
            **dict.fromkeys(_words("logsigmoid sigmoid softsign tanh tanhshrink"), "input:tensor"),
            **dict.fromkeys(
                ("log_softmax", "softmax", "softmin"),
                "input:tensor dim:int _stacklevel:int? dtype:dtype?",
            ),
            **dict.fromkeys(("celu", "elu"), f"input:tensor alpha:number? {_OFF}"),
            **dict.fromkeys(("l1_loss", "mse_loss"), f"{_LOSS} weight:tensor?"),
            "binary_cross_entropy_with_logits": (
                "input:tensor target:tensor weight:tensor? size_average:nothing? reduce:nothing? "
                "reduction:reduction? pos_weight:tensor?"
            ),
            "gelu": "input:tensor approximate:approximation?",
            "hardtanh": f"input:tensor min_val:number? max_val:number? {_OFF}",
            "huber_loss": (
                "input:tensor target:tensor reduction:reduction? delta:number? weight:tensor?"
            ),
            "kl_div": f"{_LOSS} log_target:bool?",
            "leaky_relu": f"input:tensor negative_slope:number? {_OFF}",
            "normalize": "input:tensor p:number? dim:int? eps:number? out:nothing?",
            "smooth_l1_loss": f"{_LOSS} beta:number?",
            "softplus": "input:tensor beta:number? threshold:number?",
            "threshold": f"input:tensor threshold:number value:number {_OFF}",
        },
    ),
    **_ruled(
        functional,
        {
            "one_hot": ("input:tensor num_classes:int", sizes.one_hot),
            "pad": ("input:tensor pad:dims mode:mode? value:number?", sizes.padded),
        },
    ),
    "cosine_similarity": _TORCH["cosine_similarity"],
}

_SPECIAL: Mapping[str, Operation] = _all(
    torch.special,
    {
        **dict.fromkeys(
            _words(
                "digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 log1p log_ndtr ndtr "
                "ndtri sinc"
            ),
            "input:tensor",
        ),
        **dict.fromkeys(("log_softmax", "softmax"), "input:tensor dim:int dtype:dtype?"),
        **dict.fromkeys(("xlog1py", "xlogy"), "input:value other:value"),
        "logit": "input:tensor eps:number?",
        "logsumexp": "input:tensor dim:dims keepdim:bool?",
    },
)

_OPERATORS: Mapping[str, Operation] = {
    **{
        name: _operation(getattr(operator, name), "input:value")
        for name in ("abs", "inv", "invert", "neg", "pos")
    },
    **{
        name: _operation(_plain(getattr(operator, name)), "input:value other:value")
        for name in _words(
            "and_ eq floordiv ge gt iadd iand ifloordiv ilshift imod imul ior ipow irshift isub "
            "itruediv ixor le lshift lt mod mul ne or_ pow rshift sub truediv xor"
        )
    },
    "add": _operation(_added, "input:addend other:addend"),
    "matmul": _TORCH["matmul"],
    "getitem": _operation(operator.getitem, "input:any index:any", sizes.getitem, kept=sizes.masks),
}

_MATH: Mapping[str, Operation] = _all(
    math,
    {
        **dict.fromkeys(
            _words(
                "acos asin atan ceil cos cosh erf erfc exp expm1 fabs floor isfinite isinf isnan "
                "lgamma log10 log1p log2 sin sinh sqrt tan tanh trunc"
            ),
            "x:number",
        ),
        **dict.fromkeys(("atan2", "copysign", "fmod", "hypot", "pow"), "x:number y:number"),
        "log": "x:number base:number?",
    },
    sizes.one,
)

#: Functions by the names that tracing records: the modules in which torch defines them.
FUNCTIONS: Mapping[str, Operation] = {
    "getattr": _operation(_attribute, "input:any name:text"),
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
        f"torch.{where}vector_norm": _operation(
            torch.linalg.vector_norm, "x:tensor ord:number? dim:dims? keepdim:bool? dtype:dtype?"
        )
        for where in ("linalg.", "_C._linalg.linalg_")
    },
}
