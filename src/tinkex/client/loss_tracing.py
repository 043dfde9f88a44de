"""
Traces a loss written in Python into a graph that can be sent to the server.

Servers run only known operations. The same checks run here first, so that the error points at
the user's code.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tinkex.extras import needs
from tinkex.wire.custom_loss import (
    INPUT_NAME,
    MAX_INPUTS,
    METRIC_NAME,
    CustomLossGraph,
    CustomLossInput,
    CustomLossInputRank,
    CustomLossNode,
)

if TYPE_CHECKING:
    from torch import fx

#: Functions of these modules become nodes, and so does `getattr`, which fx uses for `x.shape`.
MODULES = frozenset({"torch", "math", "operator"})
#: Methods that do not return a tensor, so the rest of the function could not be traced.
LEAVES_TORCH = frozenset({"backward", "item", "numpy", "tolist"})

# Tracing patches module functions while it runs, so only one thread may trace at a time.
_tracing = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A loss that passed every check, to run locally and to send."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    module: fx.GraphModule
    graph: CustomLossGraph


def trace(fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> Traced:
    """Trace `fn`. A `ValueError` says which operation is not allowed, and where."""
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        inputs = _inputs(fn, input_ranks)
        module = _traced(fn)
        nodes = [_node(node) for node in module.graph.nodes]
    except _Refused as refusal:
        raise ValueError(f"custom loss {name!r}: {refusal}") from refusal.__cause__
    return Traced(name=name, inputs=inputs, module=module, graph=CustomLossGraph(nodes=nodes))


def digest(module: fx.GraphModule, inputs: tuple[CustomLossInput, ...]) -> str:
    """Equal for losses that compute the same from the same inputs, whatever their names."""
    identity = [module.code, [(each.name, each.rank) for each in inputs]]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class _Refused(Exception):
    """Why the loss is refused; the caller adds its name."""


# -- the function --------------------------------------------------------------------------------


def _inputs(fn: Callable[..., Any], ranks: Mapping[str, int]) -> tuple[CustomLossInput, ...]:
    if not inspect.isfunction(fn):
        raise _Refused(
            f"{type(fn).__name__} is not a plain function, and only those can be traced; write a "
            "`def` that calls it."
        )
    names = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise _Refused(
                f"parameter {parameter.name!r} is {parameter.kind.description}; inputs are plain "
                "parameters, one for each tensor."
            )
        if parameter.default is not parameter.empty:
            raise _Refused(
                f"parameter {parameter.name!r} has a default, but each datum carries every input. "
                "Write the constant into the function, or make it an input of rank 0."
            )
        if not INPUT_NAME.fullmatch(parameter.name):
            raise _Refused(
                f"parameter {parameter.name!r} must have a name of lowercase letters, digits and "
                "_, at most 64."
            )
        names.append(parameter.name)
    if not names or names[0] != "logprobs":
        raise _Refused(
            f"the first parameter must be 'logprobs'; found {names[0] if names else 'none'!r}."
        )
    if len(names) > MAX_INPUTS:
        raise _Refused(f"has {len(names)} parameters; at most {MAX_INPUTS} are allowed.")
    if set(ranks) != set(names):
        raise _Refused(
            f"input_ranks names {sorted(ranks)}, but the parameters are {sorted(names)}; "
            "give the rank of each parameter."
        )
    for name, rank in ranks.items():
        if rank not in (0, 1, 2) or (name == "logprobs" and rank == 0):
            allowed = "1 or 2" if name == "logprobs" else "0, 1 or 2"
            raise _Refused(f"input_ranks[{name!r}] is {rank!r}; allowed: {allowed}.")
    return tuple(
        CustomLossInput(name=name, rank=cast(CustomLossInputRank, int(ranks[name])))
        for name in names
    )


def _traced(fn: Callable[..., Any]) -> fx.GraphModule:
    with needs("A custom loss"):
        from torch import fx

    try:
        with _tracing:
            return fx.symbolic_trace(fn)
    except Exception as error:
        raise _Refused(
            f"torch.fx cannot trace it: {error} A custom loss cannot branch on the values of "
            "tensors, nor call anything outside torch, math and operator."
        ) from error


# -- its operations ------------------------------------------------------------------------------


def _node(node: fx.Node) -> CustomLossNode:
    match node.op:
        case "placeholder":
            target = str(node.target)
        case "call_function":
            target = _function(node.target)
        case "call_method":
            target = _method(str(node.target))
        case "output":
            _check_output(node.args[0])
            target = "output"
        case "get_attr":
            raise _Refused(
                f"it reads a tensor from outside ({node.target}); a custom loss may read only "
                "logprobs and its inputs. Make that tensor an input."
            )
        case _:
            raise _Refused(f"it calls a module ({node.target}); use functions of torch instead.")
    return CustomLossNode(
        op=cast(Any, node.op),
        name=node.name,
        target=target,
        args=[_argument(argument) for argument in node.args],
        kwargs={name: _argument(argument) for name, argument in node.kwargs.items()},
    )


def _function(function: Any) -> str:
    with needs("A custom loss"):
        from torch.fx.node import _get_qualified_name

    name = _get_qualified_name(function)
    if name.startswith("_operator."):
        name = name.removeprefix("_")
    if function is not getattr and name.partition(".")[0] not in MODULES:
        raise _Refused(
            f"it calls {name}(); allowed are functions of {', '.join(sorted(MODULES))}, and "
            "methods of tensors."
        )
    return name


def _method(name: str) -> str:
    with needs("A custom loss"):
        import torch

    if name in LEAVES_TORCH:
        raise _Refused(
            f"it calls .{name}(), which does not return a tensor; keep all values tensors."
        )
    if not callable(getattr(torch.Tensor, name, None)):
        raise _Refused(f"it calls .{name}(), which is not a method of tensors.")
    return name


def _check_output(output: Any) -> None:
    with needs("A custom loss"):
        from torch import fx

    if not isinstance(output, tuple) or len(output) != 2:
        raise _Refused("it must return a pair: the loss, and a dict of metrics.")
    loss, metrics = output
    if not isinstance(loss, fx.Node):
        raise _Refused(f"its loss is {loss!r}, not a tensor computed from the inputs.")
    if not isinstance(metrics, dict):
        raise _Refused(f"its metrics are a {type(metrics).__name__}, not a dict; {{}} for none.")
    for name, value in metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise _Refused(
                f"metric {name!r} must be called custom/NAME:sum or custom/NAME:mean, in lowercase "
                "letters; the suffix says how it is combined over datums."
            )
        if not isinstance(value, fx.Node):
            raise _Refused(f"metric {name!r} is {value!r}, not a tensor computed from the inputs.")


def _argument(value: Any) -> Any:
    with needs("A custom loss"):
        import torch
        from torch import fx

    match value:
        case fx.Node():
            return {"ref": value.name}
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return {"tuple": [_argument(item) for item in value]}
        case list():
            return [_argument(item) for item in value]
        case dict():
            return {"dict": {str(key): _argument(item) for key, item in value.items()}}
        case slice():
            return {"slice": [_argument(part) for part in (value.start, value.stop, value.step)]}
        case torch.device():
            return {"device": str(value)}
        case torch.dtype() | torch.layout() | torch.memory_format():
            kind = type(value).__name__
            return {kind: str(value).removeprefix("torch.")}
    if value is ...:
        return {"ellipsis": True}
    raise _Refused(f"an argument is a {type(value).__name__}, which cannot be sent.")
