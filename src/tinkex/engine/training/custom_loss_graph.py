"""
Losses that users wrote: a graph from the wire, checked, then run one node at a time.

The graph is untrusted data. Nothing in it is evaluated or looked up by name in a module: the
targets that work are the keys of the tables in `graph_operations`, every argument is checked
against a signature before the call, and the size of every result is known before it is made.
"""

from __future__ import annotations

import difflib
import math
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.training.custom_loss_ops import (
    ATTRIBUTES,
    FUNCTIONS,
    MAX_INT,
    MAX_ITEMS,
    MAX_RANK,
    MAX_TEXT,
    METHODS,
    PLACEHOLDER,
    Operation,
    Parameter,
    Refused,
    elements,
    settled,
    shown,
    tensors_in,
)
from tinkex.wire.custom_loss import (
    INPUT_NAME,
    MAX_INPUTS,
    METRIC_NAME,
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
)
from tinkex.wire.errors import UserFailure

__all__ = ["Graph"]

MAX_NAME = 256
MAX_NODES = 2_000
#: Lists inside lists of one argument.
MAX_DEPTH = 8
#: Values over all arguments of all nodes.
MAX_VALUES = 50_000
MAX_METRICS = 64

#: Elements a single value may have: this many, or so many times those of the largest input.
LARGEST_VALUE = 8 * 2**20  # 64 MiB of float64
LARGEST_GROWTH = 64
#: Over a whole run, as multiples of the above. Autograd keeps what was written until the backward
#: pass; what was read bounds the time of that pass.
WRITTEN = 8
TOUCHED = 32

NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
DEVICE = re.compile(r"(cpu|cuda|mps|xpu|meta)(:[0-9]{1,3})?")

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
LAYOUTS: Mapping[str, torch.layout] = {"strided": torch.strided}
MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}


class Graph:
    """A custom loss that passed every check which needs no data; pickles as its wire form."""

    __slots__ = ("_graph", "_loss", "_metrics", "_steps", "_writes", "inputs", "name")

    name: str
    inputs: tuple[CustomLossInput, ...]
    _graph: CustomLossGraph
    _steps: tuple[_Step, ...]
    _loss: str
    #: Name of the metric -> name of the node.
    _metrics: Mapping[str, str]
    #: Whether any node changes a tensor in place.
    _writes: bool

    def __init__(self) -> None:
        raise TypeError("a Graph is made by Graph.rebuild(name, inputs, graph)")

    @classmethod
    def rebuild(cls, name: str, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> Graph:
        """Check a graph from the wire. `UserFailure` names the node, what it has, what it may."""
        try:
            if len(name) > MAX_NAME:
                raise Refused(f"its name has {len(name)} characters; allowed are {MAX_NAME}")
            _check_inputs(inputs)
            steps, loss, metrics = _read(inputs, graph.nodes)
        except Refused as refusal:
            raise UserFailure(f"custom loss {shown(name)}: {refusal}") from None
        made = object.__new__(cls)
        for field, value in (
            ("name", name),
            ("inputs", tuple(inputs)),
            ("_graph", graph.model_copy(deep=True)),
            ("_steps", steps),
            ("_loss", loss),
            ("_metrics", metrics),
            ("_writes", any(step.operation.writes for step in steps)),
        ):
            object.__setattr__(made, field, value)
        return made

    def run(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """
        The loss of one datum, with autograd through `logprobs`, and its metrics.

        `logprobs` are the model's own; an input of that name is not looked at. A run that takes
        longer than `deadline_s` seconds is refused. A loss that is not finite is returned as it
        is: the optimizer step refuses its gradient and can say more.
        """
        return self._results(logprobs, inputs, _Clock(deadline_s), watched=False)

    def value_and_gradient(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss, its derivative by each logprob, and the metrics; the time is for all of it."""
        leaf = logprobs.detach().requires_grad_()
        loss, metrics = self._results(leaf, inputs, _Clock(deadline_s), watched=True)
        try:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except (Refused, RuntimeError) as error:
            # Such as a value that its own gradient needs, changed in place.
            raise UserFailure(
                f"custom loss {shown(self.name)}: the backward pass failed: {_first_line(error)}"
            ) from None
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        return loss.detach(), gradient, metrics

    def _results(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], clock: _Clock, *, watched: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Torch warns about odd numbers (a deviation of one element); the user is not here to read.
        with torch.set_grad_enabled(logprobs.requires_grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                values = self._run(logprobs, inputs, clock, watched=watched)
                loss = _loss(values[self._loss], wants_gradient=logprobs.requires_grad)
                metrics = {
                    name: _metric(name, values[node], logprobs.device)
                    for name, node in self._metrics.items()
                }
            except Refused as refusal:
                raise UserFailure(f"custom loss {shown(self.name)}: {refusal}") from None
        return loss, metrics

    def _run(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], clock: _Clock, *, watched: bool
    ) -> dict[str, Any]:
        given = [logprobs, *(_given(declared, inputs) for declared in self.inputs[1:])]
        for declared, tensor in zip(self.inputs, given, strict=True):
            if tensor.dim() != declared.rank:
                raise Refused(
                    f"input {declared.name!r} has {tensor.dim()} dimensions, "
                    f"the loss was made for {declared.rank}"
                )
        if self._writes:  # into copies: the caller's tensors stay as they are
            given = [tensor.clone() for tensor in given]
        budget = _Budget(given)
        values: dict[str, Any] = {}
        waiting = iter(given)
        for step in self._steps:
            clock.check(step.where)
            if step.operation is PLACEHOLDER:
                values[step.name] = next(waiting)
                continue
            values[step.name] = result = step.run(values, budget, logprobs.device)
            if watched and isinstance(result, Tensor) and result.requires_grad:
                clock.watch(result, step.where)
        return values

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Graph does not change: {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Graph does not change: {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Graph.rebuild, (self.name, self.inputs, self._graph)

    def __repr__(self) -> str:
        inputs = ", ".join(declared.name for declared in self.inputs)
        return f"<Graph {self.name}({inputs}) of {len(self._steps)} nodes>"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


# ---- from the wire to steps ---------------------------------------------------------------------


class _Ref(NamedTuple):
    node: str


class _Slice(NamedTuple):
    start: Any
    stop: Any
    step: Any


class _Device(NamedTuple):
    """Any device a user names means the one the loss runs on."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    name: str
    #: Name and target, for messages.
    where: str
    operation: Operation
    #: The parameter each positional argument is for.
    slots: tuple[Parameter, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, values: Mapping[str, Any], budget: _Budget, device: torch.device) -> Any:
        operation = self.operation
        args = [_resolve(arg, values, device) for arg in self.args]
        kwargs = {key: _resolve(arg, values, device) for key, arg in self.kwargs.items()}
        try:
            bound = operation.check(self.slots, args, kwargs)
            size = operation.size(bound)
            budget.allow(size, bound, operation.work(bound) if operation.work else 0)
            if operation.makes:
                kwargs["device"] = device
            result = settled(operation.call(*args, **kwargs))
            budget.spend(result)
        except torch.OutOfMemoryError:
            raise  # the engine's matter, not the user's
        except Refused as refusal:
            raise Refused(f"{self.where}: {refusal}") from None
        except (
            ArithmeticError,
            AttributeError,
            IndexError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise Refused(f"{self.where}: {_first_line(error)}") from None
        return result


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise Refused(f"has {len(inputs)} inputs; allowed are 1 to {MAX_INPUTS}")
    for place, declared in enumerate(inputs):
        if not INPUT_NAME.fullmatch(declared.name):
            raise Refused(
                f"input {place} is called {shown(declared.name)}; "
                f"a name has small letters, digits and _, at most {MAX_TEXT}"
            )
    if inputs[0].name != "logprobs":
        raise Refused(f"the first input is {inputs[0].name!r}; it must be 'logprobs'")
    if inputs[0].rank == 0:
        raise Refused("input 'logprobs' has rank 0; it may have 1 or 2")
    if len({declared.name for declared in inputs}) < len(inputs):
        raise Refused("two inputs have the same name")


def _read(
    inputs: Sequence[CustomLossInput], nodes: Sequence[CustomLossNode]
) -> tuple[tuple[_Step, ...], str, Mapping[str, str]]:
    if len(nodes) > MAX_NODES:
        raise Refused(f"has {len(nodes)} nodes; allowed are {MAX_NODES}")
    reader = _Reader()
    steps: list[_Step] = []
    expected = [declared.name for declared in inputs]
    for place, node in enumerate(nodes):
        if not NODE_NAME.fullmatch(node.name):
            raise Refused(f"node {place} is called {shown(node.name)}; a name is an identifier")
        where = f"node {node.name!r} ({shown(node.target)[1:-1]})"
        try:
            if node.op == "output":
                if place != len(nodes) - 1:
                    raise Refused("an output ends the graph, and nodes follow this one")
                if len(reader.known) < len(inputs) or expected:
                    raise Refused(f"no node reads input {expected[0]!r}; each has a placeholder")
                loss, metrics = _read_output(node, reader)
                return tuple(steps), loss, metrics
            if node.name in reader.known:
                raise Refused("an earlier node has the same name")
            steps.append(_read_step(node, where, reader, expected))
        except Refused as refusal:
            raise Refused(f"{where}: {refusal}") from None
    raise Refused("has no output; the last node must be one")


def _read_step(node: CustomLossNode, where: str, reader: _Reader, expected: list[str]) -> _Step:
    match node.op:
        case "placeholder":
            if node.args or node.kwargs:
                raise Refused("a placeholder takes no arguments; inputs have no defaults")
            if not expected or node.target != expected[0]:
                wanted = f"{expected[0]!r}" if expected else "no further one"
                raise Refused(
                    f"the placeholder is for {shown(node.target)}; "
                    f"in the order of the inputs it must be for {wanted}"
                )
            expected.pop(0)
            reader.add(node.name, depends=node.target == "logprobs")
            return _Step(
                name=node.name,
                where=where,
                operation=PLACEHOLDER,
                slots=(),
                args=(),
                kwargs={},
            )
        case "call_function":
            table, what = FUNCTIONS, "function"
        case "call_method":
            table, what = METHODS, "method"
        case _:
            raise Refused(
                f"operation {shown(node.op)} is not offered; allowed are placeholder, "
                "call_function, call_method and output: a loss reads its inputs, "
                "no modules and no tensors from outside"
            )
    operation = table.get(node.target)
    if operation is None:
        raise Refused(_unknown(node.target, what, table))
    reader.begin()
    args = tuple(reader.read(arg) for arg in _items(node.args, list))
    kwargs = {key: reader.read(arg) for key, arg in _items(node.kwargs, dict).items()}
    slots = operation.bind(len(args), kwargs)
    if operation is FUNCTIONS["getattr"]:
        attribute = args[1] if len(args) == 2 else None
        if not isinstance(attribute, str) or attribute not in ATTRIBUTES:
            allowed = ", ".join(sorted(ATTRIBUTES))
            raise Refused(f"attribute {shown(attribute)}; allowed are {allowed}")
    reader.add(node.name)
    return _Step(
        name=node.name,
        where=where,
        operation=operation,
        slots=slots,
        args=args,
        kwargs=kwargs,
    )


def _read_output(node: CustomLossNode, reader: _Reader) -> tuple[str, Mapping[str, str]]:
    shape = "an output is one pair: a reference to the loss, and a dict from metric to reference"
    reader.begin()
    match node.args:
        case [{"tuple": [loss, {"dict": dict(metrics), **more}], **rest}] if not rest and not more:
            pass
        case _:
            raise Refused(shape)
    if node.kwargs:
        raise Refused(shape)
    if len(metrics) > MAX_METRICS:
        raise Refused(f"{len(metrics)} metrics; allowed are {MAX_METRICS}")
    refs = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name):
            raise Refused(
                f"metric {shown(name)}; a name is custom/NAME:sum or custom/NAME:mean, "
                "with small letters, digits and _./- in NAME, at most 64"
            )
        ref = reader.read(value)
        if not isinstance(ref, _Ref):
            raise Refused(f"metric {name!r} is not a reference; {shape}")
        refs[name] = ref.node
    ref = reader.read(loss)
    if not isinstance(ref, _Ref):
        raise Refused(shape)
    if not reader.known[ref.node]:
        raise Refused(f"the loss {ref.node!r} does not depend on the logprobs")
    return ref.node, refs


def _unknown(target: str, what: str, table: Mapping[str, Operation]) -> str:
    last = target.rpartition(".")[2]
    for pattern, reason in NEVER:
        if re.fullmatch(pattern, last):
            return f"{what} {shown(target)} is not offered: {reason}"
    near = difflib.get_close_matches(target[:MAX_TEXT], table, n=1, cutoff=0.75)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return (
        f"{what} {shown(target)} is not offered{hint}. Allowed are {len(table)} {what}s "
        "that compute on tensors; write the loss with those, or use it as a callable"
    )


#: Last parts of names that are refused on purpose -> why.
NEVER = (
    (
        "item|tolist|numpy|backward|__.*__",
        "values leave a tensor only as the loss or as a metric",
    ),
    (
        "(rand|bernoulli|normal|multinomial|poisson|dropout|uniform|exponential_).*|.*_dropout",
        "a step that is run again must give the same numbers; send random numbers as an input",
    ),
    (
        "(new_)?empty.*|resize.*|set_|as_strided.*",
        "it reads memory that no operation has written; use torch.zeros",
    ),
)


def _items(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Refused(f"arguments are a {type(value).__name__}, not a {kind.__name__}")
    return value


class _Reader:
    """Reads arguments: plain values, lists, and objects with one key."""

    def __init__(self) -> None:
        #: Nodes so far, and whether their value depends on the logprobs.
        self.known: dict[str, bool] = {}
        self._values = 0
        self._depends = False

    def begin(self) -> None:
        self._depends = False

    def add(self, name: str, *, depends: bool = False) -> None:
        self.known[name] = depends or self._depends

    def read(self, value: Any, depth: int = 0) -> Any:
        self._values += 1
        if self._values > MAX_VALUES:
            raise Refused(f"the graph has more than {MAX_VALUES} values as arguments")
        if depth > MAX_DEPTH:
            raise Refused(f"arguments are nested deeper than {MAX_DEPTH}")
        match value:
            case None | bool():
                return value
            case int():
                if abs(value) >= MAX_INT:
                    raise Refused("a whole number does not fit 64 bits")
                return value
            case float():
                return value
            case str():
                return self._text(value)
            case list():
                return self._list(value, depth)
            case dict() if len(value) == 1:
                ((tag, inner),) = value.items()
                return self._tagged(tag, inner, depth)
            case _:
                raise Refused(
                    f"argument of type {type(value).__name__}; "
                    "allowed are plain values, lists, and objects with one key"
                )

    def _text(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise Refused(f"{shown(value)}: a text of at most {MAX_TEXT} characters is allowed")
        return value

    def _list(self, value: Any, depth: int) -> list[Any]:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise Refused(f"{shown(value)}: a list of at most {MAX_ITEMS} items is allowed")
        return [self.read(item, depth + 1) for item in value]

    def _tagged(self, tag: Any, value: Any, depth: int) -> Any:
        match tag:
            case "ref":
                name = value if isinstance(value, str) else None
                if name not in self.known:
                    raise Refused(f"reference to {shown(value)}, which is no earlier node")
                self._depends = self._depends or self.known[name]
                return _Ref(name)
            case "tuple":
                return tuple(self._list(value, depth))
            case "slice":
                parts = self._list(value, depth)
                if len(parts) != 3:
                    raise Refused(f"a slice of {len(parts)} parts; it has start, stop and step")
                return _Slice(*parts)
            case "ellipsis":
                if value is not True:
                    raise Refused("an ellipsis is written {'ellipsis': true}")
                return ...
            case "float":
                if value not in ("inf", "-inf", "nan"):
                    raise Refused(f"float {shown(value)}; allowed are 'inf', '-inf' and 'nan'")
                return float(value)
            case "dtype":
                return _named("dtype", value, DTYPES)
            case "layout":
                return _named("layout", value, LAYOUTS)
            case "memory_format":
                return _named("memory_format", value, MEMORY_FORMATS)
            case "device":
                if not isinstance(value, str) or not DEVICE.fullmatch(value):
                    raise Refused(f"device {shown(value)}; allowed are such as 'cpu', 'cuda:0'")
                return _Device(value)
            case _:
                raise Refused(
                    f"argument with the key {shown(tag)}; allowed are ref, tuple, slice, "
                    "ellipsis, float, dtype, device, layout and memory_format"
                )


def _named(what: str, value: Any, table: Mapping[str, Any]) -> Any:
    known = table.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if known is None:
        raise Refused(f"{what} {shown(value)}; allowed are {', '.join(table)}")
    return known


def _resolve(arg: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    kind = type(arg)  # every argument of every datum comes by here: no patterns
    if kind is _Ref:
        return values[arg.node]
    if kind is tuple or kind is list:
        return kind(_resolve(item, values, device) for item in arg)
    if kind is _Slice:
        return slice(*(_resolve(part, values, device) for part in arg))
    return device if kind is _Device else arg


# ---- what goes in and comes out -----------------------------------------------------------------


class _Clock:
    """The time of one run: looked at before each node, and on the way back."""

    def __init__(self, limit_s: float | None) -> None:
        self._stop_at = math.inf if limit_s is None else time.monotonic() + limit_s

    def check(self, where: str) -> None:
        if time.monotonic() > self._stop_at:
            raise Refused(
                f"{where}: the time for one datum is over; "
                "use fewer or smaller operations, or shorter data"
            )

    def watch(self, result: Tensor, where: str) -> None:
        """Look at the clock when the gradient of a result is known."""
        if self._stop_at < math.inf:
            result.register_hook(lambda _: self.check(where))  # type: ignore[no-untyped-call]


class _Budget:
    """Elements that one run may still make and read."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        widest = max(tensor.numel() for tensor in inputs)
        self.largest = max(LARGEST_VALUE, LARGEST_GROWTH * widest)
        self._to_write = WRITTEN * self.largest
        self._to_touch = TOUCHED * self.largest

    def allow(self, size: int, bound: Mapping[str, Any], work: int) -> None:
        """Before an operation: refuse what would come out too large."""
        if size > self.largest:
            raise Refused(f"the result would have {size} elements; allowed are {self.largest}")
        self._to_touch -= size + work + sum(tensor.numel() for tensor in tensors_in(bound.values()))
        if size > self._to_write or self._to_touch < 0:
            raise Refused(
                "the operations of the loss together read or write too many elements; "
                f"allowed for this datum are {TOUCHED * self.largest} read and "
                f"{WRITTEN * self.largest} written"
            )

    def spend(self, result: Any) -> None:
        for tensor in tensors_in((result,)):
            self._to_write -= tensor.numel()
            if (size := elements(tensor.shape)) > self.largest:
                # It holds no memory, but a later reduction over its empty dimension would.
                raise Refused(
                    f"the result has shape {list(tensor.shape)}, which counts as {size} elements "
                    f"(an empty dimension counts as one); allowed are {self.largest}"
                )
            if tensor.dim() > MAX_RANK:
                raise Refused(f"the result has {tensor.dim()} dimensions; allowed are {MAX_RANK}")


def _given(declared: CustomLossInput, inputs: Mapping[str, Tensor]) -> Tensor:
    tensor = inputs.get(declared.name)
    if tensor is None:
        has = ", ".join(sorted(inputs)) or "none"
        raise Refused(f"the datum has no input {declared.name!r}; it has {has}")
    return tensor


def _loss(value: Any, *, wants_gradient: bool) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refused(f"the loss is a {type(value).__name__}; it must be a tensor of one number")
    if value.numel() != 1:
        raise Refused(f"the loss has shape {list(value.shape)}; it must be one number: sum it up")
    if not value.dtype.is_floating_point:
        raise Refused(f"the loss is of {value.dtype}; it must be a floating-point number")
    if wants_gradient and not value.requires_grad:
        raise Refused(
            "the loss has no gradient by the logprobs: "
            "they go in only through detach(), comparisons or whole numbers"
        )
    return value.reshape(())


def _metric(name: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(float(value), device=device)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise Refused(f"metric {name!r} is of {shape}; it must be one number")
    return value.detach().reshape(())
