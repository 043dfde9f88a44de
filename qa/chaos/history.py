"""
Checks a history of concurrent operations against a sequential reference model.

A history is the list of submissions and answers of all clients, in the order in which they happened.
The checks run after the operations and use only the history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

#: Operations of a model that must take effect in the order of their submission.
STEPS = frozenset({"create", "pass", "forward", "step", "save", "save_for_sampler", "load"})
SAVES = frozenset({"save", "save_for_sampler"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """The submission of an operation, or its answer if `answered` is true."""

    client: str
    #: Number of the operation within its client, in the order of submission.
    operation: int
    answered: bool
    #: Set in submissions: kind, model or checkpoint, and arguments of the operation.
    kind: str = ""
    target: str = ""
    argument: Any = None
    #: Set in answers.
    answer: Any = None
    error: str | None = None

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: str) -> Event:
        return cls(**json.loads(line))


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    rule: str
    operation: tuple[str, int]
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: operation {self.operation[1]} of {self.operation[0]}: {self.text}"


class ReferenceModel(Protocol):
    """A sequential implementation that says which answer each operation must have."""

    def begin(self, argument: Any) -> Any:
        """The state of a new model."""

    def apply(self, state: Any, kind: str, argument: Any) -> tuple[Any, Any]:
        """The state after a step, and its expected answer; None if the answer is not checked."""

    def load(self, state: Any, saved: Any) -> Any:
        """The state after a checkpoint was loaded into a model."""

    def sample(self, saved: Any, argument: Any) -> Any:
        """The expected sample from a checkpoint; None if it is not known."""

    def same(self, expected: Any, answer: Any) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    name: tuple[str, int]
    submit: Event
    #: Positions in the history.
    submitted_at: int
    answered_at: int
    answer: Any


def check(history: Sequence[Event], model: ReferenceModel | None = None) -> list[Violation]:
    """All violations in a history; empty if a sequential execution explains it."""
    operations, found = _paired(history)
    saved = _saved(operations)
    found += _check_immutability(operations)
    found += _check_paths(operations, saved)
    found += _check_lists(operations, saved)
    if model is not None:
        found += _check_steps(operations, saved, model)
    return found


def _paired(history: Sequence[Event]) -> tuple[list[_Operation], list[Violation]]:
    """Pairs each submission with its answer."""
    found: list[Violation] = []
    submits: dict[tuple[str, int], tuple[int, Event]] = {}
    answers: dict[tuple[str, int], tuple[int, Event]] = {}
    for position, event in enumerate(history):
        name = (event.client, event.operation)
        kept = answers if event.answered else submits
        if name in kept:
            word = "was answered twice" if event.answered else "was submitted twice"
            found.append(Violation(rule="once", operation=name, text=word))
        elif event.answered and name not in submits:
            text = "was answered before it was submitted"
            found.append(Violation(rule="once", operation=name, text=text))
        else:
            kept[name] = (position, event)
    operations = []
    for name, (position, submit) in submits.items():
        if name not in answers:
            text = f"{submit.kind} was never answered"
            found.append(Violation(rule="lost", operation=name, text=text))
            continue
        answered_at, event = answers[name]
        if event.error is not None:
            text = f"{submit.kind} failed: {event.error}"
            found.append(Violation(rule="error", operation=name, text=text))
            continue
        operations.append(
            _Operation(
                name=name,
                submit=submit,
                submitted_at=position,
                answered_at=answered_at,
                answer=event.answer,
            )
        )
    return operations, found


def _saved(operations: Iterable[_Operation]) -> dict[str, _Operation]:
    """The save operations by the path that they returned."""
    return {str(each.answer): each for each in operations if each.submit.kind in SAVES}


def _check_immutability(operations: Iterable[_Operation]) -> Iterator[Violation]:
    """A sampler returns the same tokens for the same request at all times."""
    first: dict[str, _Operation] = {}
    for each in sorted(operations, key=lambda each: each.answered_at):
        if each.submit.kind != "sample":
            continue
        question = json.dumps([each.submit.target, each.submit.argument])
        before = first.setdefault(question, each)
        if _tokens(before.answer) != _tokens(each.answer):
            text = f"{question} was answered {before.answer}, and later {each.answer}"
            yield Violation(rule="immutable", operation=each.name, text=text)


def _tokens(answer: Any) -> Any:
    return answer["tokens"] if isinstance(answer, Mapping) else answer


def _check_paths(
    operations: Iterable[_Operation], saved: Mapping[str, _Operation]
) -> Iterator[Violation]:
    """Each save returns a unique path, because no client overwrites a checkpoint."""
    for each in operations:
        if each.submit.kind in SAVES and saved[str(each.answer)] is not each:
            other = saved[str(each.answer)].name
            text = f"{each.answer} is what operation {other[1]} of {other[0]} saved too"
            yield Violation(rule="immutable", operation=each.name, text=text)


def _check_lists(
    operations: Iterable[_Operation], saved: Mapping[str, _Operation]
) -> Iterator[Violation]:
    """A list contains all checkpoints saved before it was submitted, and none saved after its answer."""
    for each in operations:
        if each.submit.kind != "list":
            continue
        listed = set(each.answer)
        for path in sorted(listed):
            if path not in saved or saved[path].submit.target != each.submit.target:
                text = f"the list has {path}, which was not saved from this model"
                yield Violation(rule="read your writes", operation=each.name, text=text)
        for path, save in saved.items():
            # Lists do not contain unnamed samplers.
            if save.submit.target != each.submit.target or not path.startswith("tinker://"):
                continue
            if save.answered_at < each.submitted_at and path not in listed:
                text = f"the list lacks {path}, whose save was answered before"
                yield Violation(rule="read your writes", operation=each.name, text=text)
            if save.submitted_at > each.answered_at and path in listed:
                text = f"the list has {path}, whose save came later"
                yield Violation(rule="read your writes", operation=each.name, text=text)


def _check_steps(
    operations: Sequence[_Operation], saved: Mapping[str, _Operation], model: ReferenceModel
) -> Iterator[Violation]:
    """Applies steps once each, in the order of submission, and compares answers; then samples."""
    states: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    # In the order of submission, so that a save precedes a load of its checkpoint by another client.
    for each in sorted(operations, key=lambda each: each.submitted_at):
        submit = each.submit
        if submit.kind not in STEPS:
            continue
        if submit.kind == "create":
            if submit.target in states:
                text = f"{submit.target} was created before"
                yield Violation(rule="order", operation=each.name, text=text)
            states[submit.target] = model.begin(submit.argument)
            continue
        state = states.get(submit.target)
        if state is None:
            text = f"{submit.kind} of a model that was not created"
            yield Violation(rule="order", operation=each.name, text=text)
            continue
        if submit.kind == "load":
            save = saved.get(submit.argument)
            if save is None or submit.argument not in kept:
                text = f"{submit.argument} was loaded and never saved"
                yield Violation(rule="read your writes", operation=each.name, text=text)
            else:
                states[submit.target] = model.load(state, kept[submit.argument])
            continue
        states[submit.target], expected = model.apply(state, submit.kind, submit.argument)
        if submit.kind in SAVES:
            kept[str(each.answer)] = states[submit.target]
        elif expected is not None and not model.same(expected, each.answer):
            text = (
                f"{submit.kind} {submit.argument} answered {each.answer}; executed in order, "
                f"each step once, it is {expected}"
            )
            yield Violation(rule="order", operation=each.name, text=text)
            # Later steps are compared with the expected state, so one fault is reported once per answer.
    for each in operations:
        if each.submit.kind == "sample" and each.submit.target in kept:
            expected = model.sample(kept[each.submit.target], each.submit.argument)
            if expected is not None and not model.same(expected, each.answer):
                text = (
                    f"{each.submit.argument} sampled {each.answer}; the checkpoint gives {expected}"
                )
                yield Violation(rule="immutable", operation=each.name, text=text)


@dataclass
class Recorder:
    """Numbers the operations of one client and passes their events to a sink."""

    client: str
    sink: Callable[[Event], None]
    #: Number of submitted operations.
    submitted: int = field(default=0)

    def submit(self, kind: str, target: str = "", argument: Any = None) -> int:
        number = self.submitted
        self.submitted += 1
        self.sink(
            Event(
                client=self.client,
                operation=number,
                answered=False,
                kind=kind,
                target=target,
                argument=argument,
            )
        )
        return number

    def answer(self, number: int, answer: Any = None, *, error: str | None = None) -> None:
        self.sink(
            Event(client=self.client, operation=number, answered=True, answer=answer, error=error)
        )
