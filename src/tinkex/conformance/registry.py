"""The registry of checks, and a function that runs them."""

from __future__ import annotations

import enum
import importlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from tinkex.conformance.raw_client import Remote, Unexpected

#: Modules with checks, in the order in which they run.
THEMES = ("protocol", "ordering", "loss_sums", "checkpoints", "sampling", "refusals")

CheckFunction = Callable[[Remote], str]


class Verdict(enum.StrEnum):
    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"


class Failed(AssertionError):
    """The server does not do what is expected; the message says what was observed."""


class Skipped(Exception):
    """The check does not apply to this server; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One expected behavior of a server."""

    name: str
    theme: str
    #: Ids of requirements, such as "S3".
    requirements: tuple[str, ...]
    #: What is expected.
    sentence: str
    function: CheckFunction


@dataclass(frozen=True, kw_only=True)
class Outcome:
    check: Check
    verdict: Verdict
    #: What was observed.
    seen: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    outcomes: tuple[Outcome, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(outcome.verdict is verdict for outcome in self.outcomes)

    def named(self, verdict: Verdict) -> set[str]:
        return {o.check.name for o in self.outcomes if o.verdict is verdict}

    @property
    def passed(self) -> bool:
        return self.count(Verdict.FAIL) == 0


_registered: dict[str, Check] = {}


def check(*requirements: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check; the first line of its docstring says what is expected."""

    def register(function: CheckFunction) -> CheckFunction:
        name = function.__name__
        assert name not in _registered, name
        _registered[name] = Check(
            name=name,
            theme=function.__module__.rpartition(".")[2],
            requirements=requirements,
            sentence=(function.__doc__ or "").strip().partition("\n")[0],
            function=function,
        )
        return function

    return register


def expect(condition: object, seen: str) -> None:
    """Fail the check with `seen` unless the condition holds."""
    if not condition:
        raise Failed(seen)


def all_checks() -> dict[str, Check]:
    for theme in THEMES:
        importlib.import_module(f"tinkex.conformance.{theme}")
    return dict(_registered)


class _Checks:
    """A view of all checks; imports their modules on first use."""

    def __iter__(self) -> Iterator[Check]:
        return iter(all_checks().values())

    def __len__(self) -> int:
        return len(all_checks())

    def __getitem__(self, name: str) -> Check:
        return all_checks()[name]


CHECKS = _Checks()


def run_check(check: Check, remote: Remote) -> Outcome:
    """Run one check against a server."""
    began = time.monotonic()
    try:
        verdict, seen = Verdict.PASS, check.function(remote)
    except (Failed, Unexpected) as failure:
        verdict, seen = Verdict.FAIL, str(failure)
    except Skipped as reason:
        verdict, seen = Verdict.SKIP, str(reason)
    return Outcome(check=check, verdict=verdict, seen=seen, seconds=time.monotonic() - began)


def run(
    remote: Remote,
    *,
    only: Collection[str] | None = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run all checks, or those in `only` (names of checks or requirements), one after another."""
    outcomes = []
    for one in CHECKS:
        if only is None or one.name in only or set(one.requirements) & set(only):
            outcome = run_check(one, remote)
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    return Report(outcomes=tuple(outcomes))
