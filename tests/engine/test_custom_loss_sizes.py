"""
The size of every tensor that a custom loss creates is checked before it is computed.

A dimension of size 0 hides the others: a tensor of shape (0, N) has no elements, but its sum over
the first dimension has N. So each size counts as at least one. The tests walk the tables of
operations: a new operation whose rule is too small fails here.
"""

import random
import resource
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.test_custom_loss_graph import attempt, call, graph_of
from qa.fuzz import custom_loss_graphs as hostile
from tinkex.engine.training import custom_loss_parser
from tinkex.engine.training.custom_loss_ops import (
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    Operation,
    Refused,
    checked_result,
    elements,
    tensors_in,
)
from tinkex.wire.errors import UserFailure

# Torch warns about unusual arguments, such as the deviation of one element.
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = (
    *((), (0,), (1,), (3,), (7,), (0, 0), (0, 5), (5, 0), (1, 5), (5, 1), (3, 3), (2, 5)),
    *((0, 5, 1), (1, 1, 7), (5, 0, 2), (0, 1, 1), (2, 3, 0), (2, 3, 4), (0, 3, 3), (3, 0, 1, 5)),
)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)
#: Calls of one operation: until enough of them ran on an empty tensor.
TRIES, ENOUGH = 2_000, 30


def tensor(dice: random.Random, shape: tuple[int, ...] | None = None) -> Tensor:
    shape = dice.choice(SHAPES) if shape is None else shape
    dtype = dice.choice(DTYPES)
    if dtype is torch.int64:
        return torch.zeros(shape, dtype=dtype)
    return torch.full(shape, 0.5).to(dtype)


def sizes(dice: random.Random) -> Any:
    return tuple(dice.choice((0, 1, 2, 5, -1)) for _ in range(dice.randint(1, 3)))


def index(dice: random.Random) -> Any:
    """For `input[index]`."""
    one: tuple[Callable[[], Any], ...] = (
        lambda: dice.randint(0, 2),
        lambda: slice(None, dice.choice((None, 0, 2))),
        lambda: ...,
        lambda: None,
        lambda: torch.zeros(dice.choice(((0,), (4,), (0, 3), (2, 1))), dtype=torch.int64),
        lambda: [0, 0, 0],
    )
    return tuple(dice.choice(one)() for _ in range(dice.randint(1, 3)))


#: One argument of each kind of parameter.
ARGUMENTS: Mapping[str, Callable[[random.Random], Any]] = {
    "tensor": tensor,
    "number": lambda dice: dice.choice((0, 1, 3, 7, 0.5)),
    "value": lambda dice: tensor(dice) if dice.random() < 0.7 else 2,
    "addend": tensor,
    "int": lambda dice: dice.choice((0, 0, 1, 2, -1, 3)),
    "bool": lambda dice: dice.random() < 0.5,
    "flag": lambda dice: dice.random() < 0.5,
    "false": lambda dice: False,
    "text": lambda dice: dice.choice(
        ("none", "sum", "tanh", "floor", "i,j->ij", "ij->j", "ij,jk->ik")
    ),
    "dims": lambda dice: dice.choice((0, 1, -1, (0, 1), (0, -1))),
    "shape": sizes,
    "dim_or_tensor": lambda dice: dice.choice((0, 1, -1)),
    "dims_or_flag": lambda dice: dice.choice((0, 1, -1, (0, 1))),
    "sizes": lambda dice: dice.choice((1, 2, (1, 2), (0, 5))),
    "tensors": lambda dice: [tensor(dice, shape) for shape in [dice.choice(SHAPES)] * 3],
    "order": lambda dice: dice.choice((1, 2.0, 0, "fro")),
    "dtype": lambda dice: dice.choice((torch.float32, torch.float64)),
    "device": lambda dice: "cpu",
    "target": lambda dice: torch.float64,
    "layout": lambda dice: torch.strided,
    "memory_format": lambda dice: torch.preserve_format,
    "nothing": lambda dice: None,
}


def arguments(operation: Operation, dice: random.Random) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    shape = dice.choice(SHAPES)
    fitting = [one for one in SHAPES if one[-1:] == shape[-1:] or one[-1:] == shape[:1]]
    for parameter in operation.parameters:
        if parameter.optional and dice.random() < 0.5:
            continue
        if parameter.kind == "any":
            value = index(dice) if parameter.name == "index" else tensor(dice)
        elif parameter.kind == "tensor" and dice.random() < 0.6:
            # Most operations need the same shape twice; matrix products need matching inner sizes.
            value = tensor(dice, shape if dice.random() < 0.7 else dice.choice(fitting))
        elif operation is FUNCTIONS["getattr"] and parameter.name == "name":
            value = dice.choice(sorted(ATTRIBUTES))
        else:
            value = ARGUMENTS[parameter.kind](dice)
        if "index" in parameter.name and isinstance(value, Tensor):
            value = value.long() * 0
        if parameter.optional:
            kwargs[parameter.name] = value
        elif parameter.rest and parameter.kind == "tensor":
            args += [value, *(tensor(dice) for _ in range(dice.randint(0, 1)))]
        else:
            args.append(value)
    return args, kwargs


def too_small(operation: Operation, dice: random.Random) -> tuple[list[str], bool]:
    """Calls whose result exceeds the size rule; and whether the operation ran on empty tensors."""
    wrong, ran_empty = [], 0
    for _ in range(TRIES):
        args, kwargs = arguments(operation, dice)
        try:
            slots = operation.bind(len(args), kwargs)
            bound = operation.check(slots, args, kwargs)
            given = list(tensors_in(bound.values()))
            shapes = [list(one.shape) for one in given]
            size = operation.size(bound)
            made = checked_result(operation.call(*args, **kwargs))
        except (Refused, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            continue
        ran_empty += any(0 in shape for shape in shapes) or not given
        for result in tensors_in((made,)):
            known = any(result is one for one in given)
            if not known and elements(result.shape) > size:
                wrong.append(f"{shapes}, {args[1:]}, {kwargs}: {list(result.shape)}, said {size}")
        if ran_empty == ENOUGH:
            break
    return wrong, ran_empty > 0


def operations() -> Iterator[tuple[str, Operation]]:
    seen = set[int]()
    for name, operation in (*FUNCTIONS.items(), *METHODS.items()):
        takes = {parameter.kind for parameter in operation.parameters}
        if id(operation) not in seen and takes - {"number"}:
            seen.add(id(operation))
            yield name, operation


def test_no_operation_exceeds_its_size_rule() -> None:
    torch.set_num_threads(1)
    dice = random.Random(12)
    wrong, untried, number = {}, [], 0
    with torch.no_grad():
        for name, operation in operations():
            number += 1
            found, ran_empty = too_small(operation, dice)
            if found:
                wrong[name] = found[:3]
            if not ran_empty:
                untried.append(name)
    assert not wrong
    # An operation that accepts none of the arguments above would not be tested.
    assert not untried
    assert number > 300


@pytest.mark.parametrize("made", [torch.sum, torch.logsumexp, torch.std_mean])
def test_a_size_rule_that_ignores_empty_dimensions_is_detected(made: Callable[..., Any]) -> None:
    careless = Operation(
        call=made,
        parameters=FUNCTIONS["torch.logsumexp"].parameters,
        size=lambda bound: int(bound["input"].numel()),
    )
    assert too_small(careless, random.Random(1))[0]


def test_every_corpus_graph_is_refused_without_allocating() -> None:
    """Each graph would allocate gigabytes through an empty dimension."""
    kept = hostile.corpus()
    hostile.outcome_of(kept[0])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {wire["name"]: hostile.outcome_of(wire) for wire in kept}
    assert {name: what for name, what in outcomes.items() if what != "refused"} == {}
    assert len(outcomes) >= 40
    # The largest single value that is allowed has 64 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 * 1024


def test_an_empty_result_with_a_large_dimension_is_refused_even_without_a_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last check: an empty tensor is refused before a reduction makes it large."""
    careless = Operation(
        call=torch.zeros,
        parameters=FUNCTIONS["torch.zeros"].parameters,
        size=lambda _: 0,
        makes=True,
    )
    monkeypatch.setattr(custom_loss_parser, "FUNCTIONS", {**FUNCTIONS, "torch.zeros": careless})
    with pytest.raises(UserFailure, match=r"shape \[0, 100000000\]"):
        attempt(graph_of(call("torch.zeros", 0, 10**8)))
