"""
A test fails if it leaves this process changed for the tests after it.

Otherwise those tests fail, in some orders only. What changed is put back, so that only one fails.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

#: The prefixes of the environment variables that tinkex and the official client read.
OURS = ("TINKEX_", "TINKER_")
#: A forked pool, for example, ends its processes with SIGTERM: with a forgotten handler they live on.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
#: The root logger and the one of tinkex.
LOGGERS = (logging.getLogger(), logging.getLogger("tinkex"))

State = dict[str, Any]


def state() -> State:
    found: State = {name: os.environ[name] for name in os.environ if name.startswith(OURS)}
    for number in SIGNALS:
        found[number.name] = signal.getsignal(number)
    for logger in LOGGERS:
        found[f"the logger {logger.name}"] = (logger.level, logger.disabled, logger.handlers[:])
    found["disabled logging"] = logging.root.manager.disable
    found["the working directory"] = None
    with contextlib.suppress(FileNotFoundError):  # it was deleted
        found["the working directory"] = os.getcwd()
    return found


def put_back(before: State, names: list[str]) -> None:
    for name in names:
        old = before.get(name)
        if name.startswith(OURS):
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old
    for number in SIGNALS:
        if number.name in names:
            signal.signal(number, before[number.name])
    for logger in LOGGERS:
        level, logger.disabled, logger.handlers[:] = before[f"the logger {logger.name}"]
        logger.setLevel(level)
    logging.disable(before["disabled logging"])
    if "the working directory" in names:
        os.chdir(before["the working directory"])


def changes_fail() -> Iterator[None]:
    before = state()
    yield
    after = state()
    if before == after:
        return
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    put_back(before, changed)
    text = "".join(f"\n  {name}: {before.get(name)!r} -> {after.get(name)!r}" for name in changed)
    pytest.fail(f"left behind for other tests:{text}", pytrace=False)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    """For what a test and its own fixtures change."""
    yield from changes_fail()


@pytest.fixture(autouse=True, scope="module")
def _file_leaves_nothing() -> Iterator[None]:
    """For what the fixtures that the tests of a file share change."""
    yield from changes_fail()
