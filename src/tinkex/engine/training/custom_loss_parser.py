"""
Parses a custom loss from a request: untrusted nodes become checked steps.

Nothing is evaluated or looked up by name in a module: a node may only call the operations in the
tables of `custom_loss_ops`, with plain values and results of earlier nodes as arguments.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tinkex.engine.training.custom_loss_arguments import DEVICE, Device, Signature, bind
from tinkex.engine.training.custom_loss_ops import ATTRIBUTES, FUNCTIONS, METHODS, Operation
from tinkex.engine.training.custom_loss_sizes import MAX_INT, MAX_ITEMS, MAX_TEXT, Refused, shown
from tinkex.wire.custom_loss import CustomLossInput, CustomLossNode

MAX_INPUTS = 16
MAX_NODES = 2_000
#: Nesting depth of lists in one argument.
MAX_DEPTH = 8
#: Values in all arguments of all nodes.
MAX_VALUES = 50_000
MAX_METRICS = 64

INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

#: Names in torch that an argument may have, by its key.
TORCH_NAMES: Mapping[str, tuple[str, ...]] = {
    "dtype": (
        *("bfloat16", "bool", "float16", "float32", "float64"),
        *("int16", "int32", "int64", "int8", "uint8"),
    ),
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format"),
}


class Ref(NamedTuple):
    node: str


class Slice(NamedTuple):
    start: Any
    stop: Any
    step: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    name: str
    #: Node name and target, for messages.
    where: str
    #: None for an input.
    operation: Operation | None
    #: The parameter of each argument, then of each keyword.
    slots: Signature = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise Refused(f"has {len(inputs)} inputs; allowed are 1 to {MAX_INPUTS}")
    for index, declared in enumerate(inputs):
        if not INPUT_NAME.fullmatch(declared.name):
            raise Refused(
                f"input {index} has the name {shown(declared.name)}; a name consists of at most "
                f"{MAX_TEXT} lowercase letters, digits and _"
            )
    if inputs[0].name != "logprobs":
        raise Refused(f"the first input is {inputs[0].name!r}; it must be 'logprobs'")
    if inputs[0].rank == 0:
        raise Refused("input 'logprobs' has rank 0; it may have 1 or 2")
    if len({declared.name for declared in inputs}) < len(inputs):
        raise Refused("two inputs have the same name")


def parse_nodes(
    inputs: Sequence[CustomLossInput], nodes: Sequence[CustomLossNode]
) -> tuple[tuple[Step, ...], str, Mapping[str, str]]:
    if len(nodes) > MAX_NODES:
        raise Refused(f"has {len(nodes)} nodes; allowed are {MAX_NODES}")
    reader = _ArgumentReader()
    steps: list[Step] = []
    expected = [declared.name for declared in inputs]
    for index, node in enumerate(nodes):
        if not NODE_NAME.fullmatch(node.name):
            raise Refused(f"node {index} has the name {shown(node.name)}; it must be an identifier")
        where = f"node {node.name!r} ({shown(node.target)[1:-1]})"
        try:
            if node.op == "output":
                if index != len(nodes) - 1:
                    raise Refused("the output must be the last node, but nodes follow this one")
                if len(reader.known) < len(inputs) or expected:
                    raise Refused(f"input {expected[0]!r} has no placeholder; each input needs one")
                loss, metrics = _parse_output(node, reader)
                return tuple(steps), loss, metrics
            if node.name in reader.known:
                raise Refused("an earlier node has the same name")
            steps.append(_parse_step(node, where, reader, expected))
        except Refused as refusal:
            raise Refused(f"{where}: {refusal}") from None
    raise Refused("has no output; the last node must be one")


def _parse_step(
    node: CustomLossNode, where: str, reader: _ArgumentReader, expected: list[str]
) -> Step:
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
            return Step(name=node.name, where=where, operation=None)
        case "call_function":
            table, what = FUNCTIONS, "function"
        case "call_method":
            table, what = METHODS, "method"
        case _:
            raise Refused(
                f"a node of the kind {shown(node.op)} is not offered; allowed are placeholder, "
                "call_function, call_method and output: a loss can read only its inputs, "
                "not modules or other tensors"
            )
    operation = table.get(node.target)
    if operation is None:
        raise Refused(_unknown_target(node.target, what, table))
    reader.begin()
    args = tuple(reader.read(arg) for arg in _check_type(node.args, list))
    kwargs = {key: reader.read(arg) for key, arg in _check_type(node.kwargs, dict).items()}
    slots = bind(operation.parameters, len(args), tuple(kwargs))
    for slot, value in zip(slots, (*args, *kwargs.values()), strict=True):
        if value is None or isinstance(value, int | float | str | torch.dtype):
            slot.check(value)
    if operation is FUNCTIONS["getattr"]:
        attribute = args[1] if len(args) == 2 else None
        if not isinstance(attribute, str) or attribute not in ATTRIBUTES:
            allowed = ", ".join(sorted(ATTRIBUTES))
            raise Refused(f"attribute {shown(attribute)}; allowed are {allowed}")
    reader.add(node.name)
    return Step(
        name=node.name, where=where, operation=operation, slots=slots, args=args, kwargs=kwargs
    )


def _parse_output(node: CustomLossNode, reader: _ArgumentReader) -> tuple[str, Mapping[str, str]]:
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
                "where NAME has at most 64 lowercase letters, digits and _./-"
            )
        ref = reader.read(value)
        if not isinstance(ref, Ref):
            raise Refused(f"metric {name!r} is not a reference; {shape}")
        refs[name] = ref.node
    ref = reader.read(loss)
    if not isinstance(ref, Ref):
        raise Refused(shape)
    if not reader.known[ref.node]:
        raise Refused(f"the loss {ref.node!r} does not depend on the logprobs")
    return ref.node, refs


def _unknown_target(target: str, what: str, table: Mapping[str, Operation]) -> str:
    last = target.rpartition(".")[2]
    for pattern, reason in FORBIDDEN:
        if re.fullmatch(pattern, last):
            return f"{what} {shown(target)} is not offered: {reason}"
    near = difflib.get_close_matches(target[:MAX_TEXT], table, n=1, cutoff=0.75)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return (
        f"{what} {shown(target)} is not offered{hint}. Allowed are {len(table)} {what}s "
        "that compute on tensors; use those, or pass the loss as a Python callable"
    )


#: Patterns of function names (their last part) that are refused on purpose, and the reason.
FORBIDDEN = (
    (
        "item|tolist|numpy|backward|__.*__",
        "values may leave a tensor only as the loss or as a metric",
    ),
    (
        "(rand|bernoulli|normal|multinomial|poisson|dropout|uniform|exponential_).*|.*_dropout",
        "a repeated step must give the same numbers; pass random numbers as an input",
    ),
    (
        "(new_)?empty.*|resize.*|set_|as_strided.*",
        "it exposes uninitialized memory; use torch.zeros",
    ),
)


def _check_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise Refused(f"arguments are a {type(value).__name__}, not a {kind.__name__}")
    return value


class _ArgumentReader:
    """Reads arguments: plain values, lists, and objects with one key."""

    def __init__(self) -> None:
        #: Earlier nodes, and whether their value depends on the logprobs.
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
                    raise Refused("an integer does not fit 64 bits")
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

    def _text(self, value: str) -> str:
        if len(value) > MAX_TEXT:
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
                    raise Refused(f"reference to {shown(value)}, which is not an earlier node")
                self._depends = self._depends or self.known[name]
                return Ref(name)
            case "tuple":
                return tuple(self._list(value, depth))
            case "slice":
                parts = self._list(value, depth)
                if len(parts) != 3:
                    raise Refused(f"a slice of {len(parts)} parts; it needs start, stop and step")
                return Slice(*parts)
            case "ellipsis":
                if value is not True:
                    raise Refused("an ellipsis is written {'ellipsis': true}")
                return ...
            case "float":
                if value not in ("inf", "-inf", "nan"):
                    raise Refused(f"float {shown(value)}; allowed are 'inf', '-inf' and 'nan'")
                return float(value)
            case "dtype" | "layout" | "memory_format":
                name = value.removeprefix("torch.") if isinstance(value, str) else None
                if name not in TORCH_NAMES[tag]:
                    allowed = ", ".join(TORCH_NAMES[tag])
                    raise Refused(f"{tag} {shown(value)}; allowed are {allowed}")
                return getattr(torch, name)
            case "device":
                if not isinstance(value, str) or not DEVICE.fullmatch(value):
                    raise Refused(
                        f"device {shown(value)}; allowed are, for example, 'cpu' and 'cuda:0'"
                    )
                return Device(value)
            case _:
                raise Refused(
                    f"argument with the key {shown(tag)}; allowed are ref, tuple, slice, "
                    "ellipsis, float, dtype, device, layout and memory_format"
                )
