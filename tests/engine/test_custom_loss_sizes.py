"""
The size of every tensor that a custom loss creates is checked before it is computed.

A dimension of size 0 hides the others: a tensor of shape (0, N) has no elements, but its sum over
the first dimension has N. So each size counts as at least one. The tests walk the tables of
operations: a new operation whose rule is too small fails here.
"""

import random
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engine.test_custom_loss_graph import X, attempt, call, graph_of
from qa.fuzz import custom_loss_graphs as hostile
from tinkex.engine.training import custom_loss_parser
from tinkex.engine.training.custom_loss_arguments import bind, checked, signature
from tinkex.engine.training.custom_loss_ops import (
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    Operation,
    checked_result,
)
from tinkex.engine.training.custom_loss_sizes import Refused, elements, tensors_in
from tinkex.wire.errors import UserFailure

# Torch warns about unusual arguments, such as the deviation of one element.
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = (
    *((), (0,), (1,), (3,), (7,), (0, 0), (0, 5), (5, 0), (1, 5), (5, 1), (3, 3), (2, 5)),
    *((0, 5, 1), (1, 1, 7), (5, 0, 2), (0, 1, 1), (2, 3, 0), (2, 3, 4), (0, 3, 3), (3, 0, 1, 5)),
)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*(torch.float32,) * 6, *FLOATS, *INTEGERS, torch.int64, torch.bool)
#: Calls of one operation: until enough of them ran on an empty tensor.
TRIES, ENOUGH = 2_000, 20


def tensor(dice: random.Random, shape: tuple[int, ...] | None = None) -> Tensor:
    shape = dice.choice(SHAPES) if shape is None else shape
    dtype = dice.choice(DTYPES)
    if dtype in INTEGERS:
        return torch.zeros(shape, dtype=dtype)
    return torch.full(shape, 0.5).to(dtype)


def zeros(dice: random.Random) -> Tensor:
    return torch.zeros(dice.choice(SHAPES), dtype=torch.int64)


def dims(dice: random.Random) -> Any:
    return dice.choice((0, 0, 1, -1, 2, (0, 1), (0, -1)))


def extents(dice: random.Random) -> Any:
    return tuple(dice.choice((0, 1, 2, 5, -1)) for _ in range(dice.randint(1, 3)))


def number(dice: random.Random) -> Any:
    return dice.choice((0, 1, 3, 7, 0.5))


def index(dice: random.Random) -> Any:
    """For `input[index]`."""
    one: tuple[Callable[[], Any], ...] = (
        lambda: dice.randint(0, 2),
        lambda: slice(None, dice.choice((None, 0, 2))),
        lambda: ...,
        lambda: None,
        lambda: torch.zeros(dice.choice(((0,), (4,), (0, 3), (2, 1))), dtype=torch.int64),
        lambda: torch.ones(dice.choice(SHAPES), dtype=torch.bool),
        lambda: [0, 0, 0],
    )
    parts = tuple(dice.choice(one)() for _ in range(dice.randint(1, 3)))
    return parts if len(parts) > 1 else parts[0]


def joined(dice: random.Random) -> list[Tensor]:
    return [tensor(dice, shape) for shape in [dice.choice(SHAPES)] * 3]


Draw = Callable[[random.Random], Any]
#: The first arguments of operations that do not begin with a tensor, or need a certain second one.
FIRST: Mapping[str, tuple[Draw, ...]] = {
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack", "stack", "vstack"), (joined,)),
    **dict.fromkeys(("arange", "scalar_tensor"), (number,)),
    **dict.fromkeys(("eye", "ones", "zeros"), (lambda dice: dice.choice((0, 1, 5)),)),
    **dict.fromkeys(("new_ones", "new_zeros", "reshape", "view"), (tensor, extents)),
    **dict.fromkeys(("expand", "tile", "repeat", "broadcast_to"), (tensor, extents)),
    "dot": (lambda dice: torch.zeros(dice.choice((0, 3))),) * 2,
    "einsum": (lambda dice: dice.choice(("i,j->ij", "ij->j", "ij,jk->ik")), tensor),
    "full": (extents, number),
    "full_like": (tensor, number),
    "getattr": (tensor, lambda dice: dice.choice(sorted(ATTRIBUTES))),
    "getitem": (tensor, index),
    "index_select": (tensor, lambda dice: 0, lambda dice: torch.zeros(2, dtype=torch.int64)),
    "index_add": (tensor, lambda dice: 0, lambda dice: torch.zeros(0, dtype=torch.int64), tensor),
    **dict.fromkeys(("scatter", "scatter_add"), (tensor, lambda dice: 0, zeros, tensor)),
    "select": (tensor, dims, lambda dice: 0),
    "linspace": (number, number, lambda dice: dice.choice((0, 1, 7))),
    "movedim": (tensor, lambda dice: 0, lambda dice: dice.choice((0, 1))),
    "bmm": (
        lambda dice: torch.zeros(dice.choice(((0, 5, 3), (2, 5, 3)))),
        lambda dice: torch.zeros(dice.choice(((0, 3, 7), (2, 3, 0), (2, 3, 7)))),
    ),
    "mm": (
        lambda dice: torch.zeros(dice.choice(((0, 3), (5, 3), (5, 0)))),
        lambda dice: torch.zeros(dice.choice(((3, 0), (3, 7), (0, 7)))),
    ),
    "mv": (tensor, lambda dice: torch.zeros(dice.choice((0, 1, 3, 5)))),
    "narrow": (tensor, lambda dice: 0, lambda dice: 0, lambda dice: dice.choice((0, 1))),
    "new_full": (tensor, extents, number),
    "one_hot": (zeros, lambda dice: dice.choice((1, 3, 7))),
    "pad": (tensor, lambda dice: dice.choice(((0, 1), (2, 3), (1, 1, 0, 2), (-1, 5)))),
    "type": (tensor, lambda dice: torch.float64),
    "type_as": (tensor, tensor),
    "unflatten": (tensor, lambda dice: 0, extents),
}
MORE: tuple[Draw, ...] = (dims, dims, zeros, tensor, extents, number, lambda dice: True)


def arguments(name: str, dice: random.Random) -> list[Any]:
    first = FIRST.get(name)
    args = [draw(dice) for draw in first] if first else [tensor(dice)]
    wanted = len(args) + dice.choice((0, 1, 1, 2, 2, 3)) * (first is None or dice.random() < 0.2)
    shape = tuple(args[0].shape) if isinstance(args[0], Tensor) else (3,)
    fitting = [one for one in SHAPES if one[-1:] == shape[-1:] or one[-1:] == shape[:1]]
    while len(args) < wanted:
        # Most operations need the same shape twice; matrix products need matching inner sizes.
        near = shape if dice.random() < 0.7 else dice.choice(fitting)
        args.append(tensor(dice, near) if dice.random() < 0.4 else dice.choice(MORE)(dice))
    return args


def by_keyword(
    operation: Operation, args: list[Any], dice: random.Random
) -> tuple[list[Any], dict[str, Any]]:
    """The last arguments by name, in any order."""
    free = [parameter for parameter in operation.parameters if not parameter.rest]
    if dice.random() < 0.5 or len(free) < max(len(args), len(operation.parameters)):
        return args, {}
    at = dice.randint(0, len(args))
    named = list(zip((parameter.name for parameter in free[at:]), args[at:], strict=False))
    dice.shuffle(named)
    return args[:at], dict(named)


def bound_to(operation: Operation, args: list[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    slots = bind(operation.parameters, len(args), tuple(kwargs))
    return checked(slots, (*args, *kwargs.values()))


def as_tensor(value: Any, dice: random.Random) -> Any:
    """Sometimes a tensor without dimensions in place of an integer."""
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.1:
        dtype = dice.choice(INTEGERS)
        return torch.tensor(max(value, 0) if dtype is torch.uint8 else value, dtype=dtype)
    return value


def calls(
    name: str, operation: Operation, dice: random.Random
) -> Iterator[tuple[list[Any], list[Tensor], int, list[Tensor]]]:
    """Arguments, tensors among them, the size by the rule, and the tensors of the result."""
    for _ in range(TRIES):
        drawn = [as_tensor(value, dice) for value in arguments(name, dice)]
        given = list(tensors_in(drawn))
        kept = [one.clone() for one in given]
        args, kwargs = by_keyword(operation, drawn, dice)
        try:
            size = operation.size(**bound_to(operation, args, kwargs))
            made = checked_result(operation.call(*args, **kwargs))
        except (Refused, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            made = size = None
        except AttributeError:
            continue
        if not is_in_place(name):
            for one, was in zip(given, kept, strict=True):
                assert one.shape == was.shape, name
                assert torch.equal(one, was), (name, args, kwargs)
        if size is not None:
            assert type(size) is int, (name, args, kwargs)
            yield drawn, given, size, list(tensors_in((made,)))


def is_in_place(name: str) -> bool:
    return (name.endswith("_") and name not in ("and_", "or_")) or name in (
        *("iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "ior", "ipow", "irshift"),
        *("isub", "itruediv", "ixor"),
    )


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {one.untyped_storage()._cdata for one in tensors}


def too_small(name: str, operation: Operation, dice: random.Random) -> tuple[list[str], bool]:
    """Calls that allocate more than the size rule says; and whether any ran on empty tensors."""
    wrong, ran_empty = [], 0
    for args, given, size, made in calls(name, operation, dice):
        shapes = [list(one.shape) for one in given]
        ran_empty += any(0 in shape for shape in shapes) or not given
        known = storages(given)
        # A view allocates nothing; the run checks its shape.
        wrong += [
            f"{shapes}, {args[1:]}: {list(result.shape)}, said {size}"
            for result in made
            if elements(result.shape) > size and not storages([result]) & known
        ]
        if ran_empty == ENOUGH:
            break
    return wrong, ran_empty > 0


def operations() -> Iterator[tuple[str, Operation]]:
    seen = set[int]()
    for name, operation in (*FUNCTIONS.items(), *METHODS.items()):
        if id(operation) not in seen and not name.startswith("math."):
            seen.add(id(operation))
            yield name.rpartition(".")[2].removeprefix("special_"), operation


def test_no_operation_exceeds_its_size_rule() -> None:
    dice = random.Random(12)
    wrong, untried, number = {}, [], 0
    with torch.no_grad():
        for name, operation in operations():
            number += 1
            found, ran_empty = too_small(name, operation, dice)
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
        parameters=FUNCTIONS[f"torch.{made.__name__}"].parameters,
        size=lambda input, **_: int(input.numel()),
    )
    assert too_small("sum", careless, random.Random(1))[0]


def kept_elements(operation: Operation, args: list[Any], kwargs: Any) -> tuple[int, int]:
    """What the backward pass keeps besides the arguments and results; and what the run counts."""
    saved: list[Tensor] = []
    bound = bound_to(operation, args, kwargs)
    kept = operation.kept(**bound) if operation.kept else 0
    with saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        made = list(tensors_in((operation.call(*args, **kwargs),)))
    if not any(one.requires_grad for one in made):
        return 0, 0
    known = storages((*tensors_in(args), *made))
    extra = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in saved}
    bytes_ = sum(size for storage, size in extra.items() if storage not in known)
    return bytes_ // 8, kept + sum(one.numel() for one in made)


def test_the_limits_count_what_the_backward_pass_keeps() -> None:
    inputs = [torch.rand(64, 48, dtype=torch.float64) + 0.2 for _ in range(2)]
    other = inputs[1].requires_grad_()
    tries: list[tuple[list[Any], Any]] = [([], {}), ([1], {}), ([other], {})]
    tries += [([other], {"reduction": "sum"}), ([other], {"weight": other, "reduction": "sum"})]
    tries += [([other], {"log_target": True, "reduction": "sum"})]
    wrong, kept_something = [], set[str]()
    for name, operation in operations():
        for more, kwargs in tries:
            # A clone, because an operation may write into it.
            args = [inputs[0].clone().requires_grad_().clone(), *more]
            try:
                extra, counted = kept_elements(operation, args, kwargs)
            except (Refused, RuntimeError, TypeError, ValueError, LookupError, AttributeError):
                continue
            if extra > 1.05 * counted:  # norms of rows are not counted
                wrong.append((name, len(more), kwargs.keys(), extra, counted))
            if extra:
                kept_something.add(name)
    assert not wrong
    assert {"kl_div", "mse_loss", "cosine_similarity"} <= kept_something


def test_the_positions_of_a_boolean_index_count() -> None:
    """Torch turns a boolean index into the positions of its elements, one for each dimension."""
    mask = [call("torch.ones", 2048, 2048, dtype={"dtype": "bool"})]
    chosen = call("operator.getitem", {"ref": "call_0"}, {"ref": "call_0"})
    attempt(graph_of(*mask, call("torch.ones_like", X)))
    with pytest.raises(UserFailure, match="read or write"):
        attempt(graph_of(*mask, *([chosen] * 6), call("torch.ones_like", X)))


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
        call=torch.zeros, parameters=signature("*shape:dims"), size=lambda **_: 0, makes=True
    )
    monkeypatch.setattr(custom_loss_parser, "FUNCTIONS", {**FUNCTIONS, "torch.zeros": careless})
    with pytest.raises(UserFailure, match=r"shape \[0, 100000000\]"):
        attempt(graph_of(call("torch.zeros", 0, 10**8)))
