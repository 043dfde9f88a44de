"""`history.check` finds every kind of violation, and none in a correct history."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qa.chaos.history import Event, Recorder, check
from qa.chaos.reference_models import IntegerModel, RecordedRun

PATH, OTHER = "tinker://s:train:0/weights/a", "tinker://s:train:0/sampler_weights/b"
THEIRS = "tinker://t:train:0/weights/c"


def good() -> list[Event]:
    """Two clients: one trains, saves and samples, the other loads what the first saved."""
    model = IntegerModel()
    history: list[Event] = []
    one, two = Recorder("one", history.append), Recorder("two", history.append)

    def do(
        client: Recorder, kind: str, target: str = "", argument: Any = None, answer: Any = None
    ) -> None:
        client.answer(client.submit(kind, target, argument), answer)

    do(one, "create", "m")
    # Submitted together and answered in another order.
    numbers = [one.submit("pass", "m", 4), one.submit("pass", "m", 2), one.submit("step", "m")]
    one.answer(numbers[2], 7)
    one.answer(numbers[0], [0, 4])
    one.answer(numbers[1], [0, 6])
    do(one, "save", "m", "a", PATH)
    do(one, "list", "m", None, [PATH])
    do(one, "pass", "m", 5, [7, 5])
    do(one, "step", "m", None, 27)
    do(one, "save_for_sampler", "m", "b", OTHER)
    do(two, "create", "n")
    do(two, "load", "n", PATH)
    do(two, "forward", "n", None, [7, 0])
    do(two, "save", "n", "c", THEIRS)
    drawn = model.sample((27, 0), [9, 3, 2])
    do(one, "sample", OTHER, [9, 3, 2], drawn)
    do(one, "step", "m", None, 82)
    do(one, "list", "m", None, [PATH, OTHER])
    do(two, "sample", OTHER, [9, 3, 2], drawn)
    return history


def at(history: list[Event], kind: str, *, nth: int = 0) -> tuple[int, int]:
    """Positions of the submission and of the answer of the n-th operation of a kind."""
    argument = [position for position, event in enumerate(history) if event.kind == kind][nth]
    name = (history[argument].client, history[argument].operation)
    answered = next(
        position
        for position, event in enumerate(history)
        if event.answered and (event.client, event.operation) == name
    )
    return argument, answered


def changed(kind: str, answer: Any, *, nth: int = 0) -> Callable[[list[Event]], None]:
    def plant(history: list[Event]) -> None:
        _, position = at(history, kind, nth=nth)
        history[position] = replace(history[position], answer=answer)

    return plant


def never_answered(history: list[Event]) -> None:
    del history[at(history, "step")[1]]


def answered_twice(history: list[Event]) -> None:
    history.append(history[at(history, "step")[1]])


def answered_too_early(history: list[Event]) -> None:
    argument, answered = at(history, "save")
    history.insert(argument, history.pop(answered))


def failed(history: list[Event]) -> None:
    _, position = at(history, "sample")
    history[position] = replace(history[position], answer=None, error="500")


def loads_an_unsaved_checkpoint(history: list[Event]) -> None:
    argument, _ = at(history, "load")
    history[argument] = replace(history[argument], argument="tinker://nowhere")


def created_again(history: list[Event]) -> None:
    late = Recorder("three", history.append)
    late.answer(late.submit("create", "m"))


def unknown_model(history: list[Event]) -> None:
    argument, _ = at(history, "forward")
    history[argument] = replace(history[argument], target="x")


def all_of(*plants: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
    def plant(history: list[Event]) -> None:
        for each in plants:
            each(history)

    return plant


def swapped_answers(history: list[Event]) -> None:
    """Swaps the answers of two requests."""
    one, two = at(history, "pass")[1], at(history, "pass", nth=1)[1]
    history[one], history[two] = (
        replace(history[one], answer=history[two].answer),
        replace(history[two], answer=history[one].answer),
    )


def sampled_from(value: int) -> Callable[[list[Event]], None]:
    """Both samples come from the weights of another step."""
    tokens = IntegerModel().sample((value, 0), [9, 3, 2])
    return all_of(changed("sample", tokens), changed("sample", tokens, nth=1))


VIOLATIONS = {
    "a step is lost": ("order", changed("step", 9, nth=1)),
    # The answer of the step is correct, but later answers continue from `[0, 6]`.
    "a step is lost after its answer": (
        "order",
        all_of(changed("pass", [0, 11], nth=2), changed("step", 12, nth=1)),
    ),
    # Only the answer of the last step can show this.
    "the last step is lost": ("order", changed("step", 27, nth=2)),
    "the last step runs twice": ("order", changed("step", 247, nth=2)),
    "a step is run again after its answer": (
        "order",
        all_of(changed("pass", [22, 5], nth=2), changed("step", 72, nth=1)),
    ),
    "two answers are swapped": ("order", swapped_answers),
    "a save changes its model": ("order", changed("pass", [8, 5], nth=2)),
    "a load leaves a gradient": ("order", changed("forward", [7, 6])),
    "a model is created over another": ("order", created_again),
    "a model that was not created answers": ("order", unknown_model),
    "a sampler has older weights": ("immutable", sampled_from(7)),
    "a sampler follows its model": ("immutable", sampled_from(82)),
    "a repeated request gets another answer": ("immutable", changed("sample", [0, 0], nth=1)),
    "two saves return the same path": ("immutable", changed("save_for_sampler", PATH)),
    "a save of another model takes the path": ("immutable", changed("save", PATH, nth=1)),
    "a list has a checkpoint that was not saved": (
        "read your writes",
        changed("list", [PATH, "tinker://x"]),
    ),
    "a list has a checkpoint of another model": (
        "read your writes",
        changed("list", [PATH, OTHER, THEIRS], nth=1),
    ),
    "a list lacks an older checkpoint": ("read your writes", changed("list", [OTHER], nth=1)),
    "a step runs twice": ("order", changed("step", 22, nth=0)),
    "a pass is applied twice": ("order", changed("pass", [0, 10], nth=1)),
    "two passes are swapped": ("order", changed("pass", [0, 2], nth=1)),
    "a step keeps the gradient": ("order", changed("pass", [7, 11], nth=2)),
    "a load restores older weights": ("order", changed("forward", [0, 0])),
    "a load restores newer weights": ("order", changed("forward", [27, 0])),
    "a load of an unsaved checkpoint succeeds": ("read your writes", loads_an_unsaved_checkpoint),
    "a list lacks a checkpoint": ("read your writes", changed("list", [])),
    "a list has a checkpoint that is saved later": (
        "read your writes",
        changed("list", [PATH, OTHER]),
    ),
    "a sampler changes": ("immutable", changed("sample", [1, 2], nth=1)),
    "a sampler has wrong weights from the beginning": ("immutable", changed("sample", [5, 6])),
    "an operation has no answer": ("lost", never_answered),
    "an operation has two answers": ("once", answered_twice),
    "an answer precedes its submission": ("once", answered_too_early),
    "a client gets an error": ("error", failed),
}


def test_a_correct_history_has_no_violation() -> None:
    assert check(good(), IntegerModel()) == []


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_kind_of_violation_is_found(name: str) -> None:
    rule, plant = VIOLATIONS[name]
    history = good()
    plant(history)
    assert rule in {violation.rule for violation in check(history, IntegerModel())}


def test_changed_samples_are_found_without_a_reference_model() -> None:
    history = good()
    changed("sample", [1, 2], nth=1)(history)
    assert [violation.rule for violation in check(history)] == ["immutable"]


def test_events_survive_serialization() -> None:
    for event in good():
        assert Event.of(event.line()) == event


def test_a_recorded_run_is_compared_exactly_or_within_a_tolerance() -> None:
    exact = RecordedRun(answers={0: [1.0, 2.0]}, samples={}, tolerance=0.0)
    loose = replace(exact, tolerance=1e-3)
    near = [1.0, 2.0001]
    assert exact.same([1.0, 2.0], [1.0, 2.0])
    assert not exact.same([1.0, 2.0], near)
    assert loose.same({"logprobs": [1.0, 2.0]}, {"logprobs": near})
    assert not loose.same([1.0, 2.0], [1.0, 2.1])
    assert not loose.same([1.0, 2.0], [1.0])
