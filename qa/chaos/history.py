"""
What several clients argument and were told, checked against one model that does one thing at a time.

A history is a list of events in the order in which they happened. Pure: it is checked after the
run, and knows neither servers nor clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

#: Kinds that change a model, or tell of it, in the order in which they were submitted.
STEPS = frozenset({"create", "pass", "forward", "step", "save", "save_for_sampler", "load"})
SAVES = frozenset({"save", "save_for_sampler"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something was argument (`answered` is False), or the answer came."""

    client: str
    #: Its number within its client, in the order of submission.
    operation: int
    answered: bool
    #: Of what was argument: its kind, the model or checkpoint it is for, and the rest.
    kind: str = ""
    target: str = ""
    argument: Any = None
    #: Of an answer.
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
    """The sequential model: what is true when one thing happens after the other."""

    def begin(self, argument: Any) -> Any:
        """The state of a new model."""

    def apply(self, state: Any, kind: str, argument: Any) -> tuple[Any, Any]:
        """The state after a step, and its answer; None is an answer that nobody checks."""

    def load(self, state: Any, saved: Any) -> Any:
        """The state after a checkpoint was loaded into a model."""

    def sample(self, saved: Any, argument: Any) -> Any:
        """What a sampler of a checkpoint answers; None where that is not known."""

    def same(self, expected: Any, answer: Any) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    name: tuple[str, int]
    submit: Event
    #: Places in the history.
    submitted_at: int
    answered_at: int
    answer: Any


def check(history: Sequence[Event], model: ReferenceModel | None = None) -> list[Violation]:
    """Everything that no sequential model could have answered; empty when all is well."""
    operations, found = _paired(history)
    saved = _saved(operations)
    found += _check_immutability(operations)
    found += _check_paths(operations, saved)
    found += _check_lists(operations, saved)
    if model is not None:
        found += _check_steps(operations, saved, model)
    return found


def _paired(history: Sequence[Event]) -> tuple[list[_Operation], list[Violation]]:
    """Each operation with its one answer."""
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
            text = "was answered before it was argument"
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
    """By path: the save that made it."""
    return {str(each.answer): each for each in operations if each.submit.kind in SAVES}


def _check_immutability(operations: Iterable[_Operation]) -> Iterator[Violation]:
    """A sampler answers the same question with the same tokens for ever."""
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
    """Each save has a path of its own: no client here overwrites."""
    for each in operations:
        if each.submit.kind in SAVES and saved[str(each.answer)] is not each:
            other = saved[str(each.answer)].name
            text = f"{each.answer} is what operation {other[1]} of {other[0]} saved too"
            yield Violation(rule="immutable", operation=each.name, text=text)


def _check_lists(
    operations: Iterable[_Operation], saved: Mapping[str, _Operation]
) -> Iterator[Violation]:
    """A list has every checkpoint that was there before it was argument for, and none of the future."""
    for each in operations:
        if each.submit.kind != "list":
            continue
        listed = set(each.answer)
        for path in sorted(listed):
            if path not in saved or saved[path].submit.target != each.submit.target:
                text = f"the list has {path}, which was not saved from this model"
                yield Violation(rule="read your writes", operation=each.name, text=text)
        for path, save in saved.items():
            # Samplers without a name are in no list.
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
    """Steps of a model in the order of their submission, each once; then what was drawn from them."""
    states: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    # By the position of submission, so that a save of one model comes before another's load of it.
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
                f"{submit.kind} {submit.argument} answered {each.answer}; one after the other, "
                f"each once, it is {expected}"
            )
            yield Violation(rule="order", operation=each.name, text=text)
            # What follows is judged from what was expected: one fault is told once for each answer.
    for each in operations:
        if each.submit.kind == "sample" and each.submit.target in kept:
            expected = model.sample(kept[each.submit.target], each.submit.argument)
            if expected is not None and not model.same(expected, each.answer):
                text = f"{each.submit.argument} drew {each.answer}; the checkpoint draws {expected}"
                yield Violation(rule="immutable", operation=each.name, text=text)


@dataclass
class Recorder:
    """Keeps events in the order in which they happen; one for each client, or one for all."""

    client: str
    sink: Callable[[Event], None]
    #: How many operations were begun.
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
