"""Backoff, retries, polls and periodic tasks."""

import asyncio
import itertools
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tinkex.server import engine_process, supervisor
from tinkex.server import retry as module
from tinkex.server.registration import Administration
from tinkex.server.retry import (
    Backoff,
    Crashed,
    PeriodicTask,
    poll,
    retry,
    retry_blocking,
)
from tinkex.server.settings import Settings
from tinkex.wire.engine_settings import EngineSettings

WEB, ENGINE = supervisor.RESTART_BACKOFF, engine_process.RESTART_BACKOFF
STABLE, UNSTABLE = True, False

log = logging.getLogger("test")


def restart_waits(backoff: Backoff, crashes: Sequence[bool]) -> list[float]:
    """The waits before the restarts of a process that crashes in these ways, then stops."""
    found: list[float] = []
    left = iter(crashes)

    def run() -> None:
        for stable in left:
            raise Crashed(stable=stable)

    retry_blocking(run, backoff, sleep=found.append)
    return found


@pytest.mark.parametrize(
    ("backoff", "crashes", "expected"),
    [
        # The first crash may be an accident, however short the run was.
        (WEB, [UNSTABLE], [0.0]),
        (WEB, [UNSTABLE] * 8, [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (ENGINE, [UNSTABLE] * 9, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (WEB, [STABLE] * 5, [0.0] * 5),
        # A stable run resets the backoff.
        (
            WEB,
            [UNSTABLE, UNSTABLE, UNSTABLE, STABLE, UNSTABLE, UNSTABLE],
            [0.0, 0.2, 0.4, 0.0, 0.2, 0.4],
        ),
        (
            ENGINE,
            [STABLE, UNSTABLE, UNSTABLE, STABLE, STABLE, UNSTABLE],
            [0.0, 0.5, 1.0, 0.0, 0.0, 0.5],
        ),
    ],
)
def test_waits_double_up_to_a_maximum_and_a_stable_run_resets_them(
    backoff: Backoff, crashes: list[bool], expected: list[float]
) -> None:
    assert restart_waits(backoff, crashes) == pytest.approx(expected)


@pytest.mark.parametrize("backoff", [WEB, ENGINE])
def test_waits_stay_within_the_maximum_and_only_the_first_is_zero(backoff: Backoff) -> None:
    first, *later = restart_waits(backoff, [UNSTABLE] * 3000)
    assert first == 0.0
    assert all(one <= two for one, two in itertools.pairwise(later))
    assert min(later) == backoff.first_s
    assert max(later) == backoff.max_s


@pytest.mark.parametrize(
    ("ready", "lived_s", "stable"),
    [
        (True, 1.0, STABLE),
        (True, -1.0, UNSTABLE),
        # A process that never got ready is not stable, however long it ran.
        (False, 10_000.0, UNSTABLE),
    ],
)
def test_a_web_process_was_stable_if_it_was_ready_for_a_while(
    ready: bool, lived_s: float, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_S", -lived_s)
    with socket.socket() as listening:
        web = supervisor.Supervisor(
            Settings(), [], listening, [], administration=Administration(local=False)
        )
        web._was_ready = True
        web._run_once = lambda **_: ready  # type: ignore[method-assign]
        with pytest.raises(Crashed) as crash:
            web._run_until_crash(lambda: None)
    assert crash.value.stable is stable


@pytest.mark.parametrize(
    ("finished_work", "lived_s", "stable"),
    [
        # A step may crash an engine soon after its start, but earlier steps were done.
        (True, 0.0, STABLE),
        (False, -1.0, UNSTABLE),
        (False, 1.0, STABLE),
    ],
)
def test_an_engine_was_stable_if_it_finished_work_or_ran_for_long(
    finished_work: bool, lived_s: float, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "STABLE_S", -lived_s)

    async def test() -> None:
        engine = engine_process._Engine(
            EngineSettings(name="a", folder=Path("a")),
            itertools.count(1),
            loaded_before=False,
            on_loaded=lambda name: None,
        )

        async def run_once() -> None:
            engine._finished_work = finished_work

        engine._run_once = run_once  # type: ignore[method-assign]
        with pytest.raises(Crashed) as crash:
            await engine._run_until_crash()
        assert crash.value.stable is stable

    in_loop(test)


Retry = Callable[..., object]


def retry_in_loop(attempt: Callable[[], object], backoff: Backoff, **how: object) -> object:
    async def awaited() -> object:
        return attempt()

    return asyncio.run(retry(awaited, backoff, **how))  # type: ignore[arg-type]


both = pytest.mark.parametrize("run", [retry_in_loop, retry_blocking])


@both
def test_an_attempt_is_repeated_until_it_succeeds(run: Retry) -> None:
    errors, heard = [ValueError("one"), ValueError("two")], []

    def attempt() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    backoff = Backoff(first_s=0.001, max_s=1.0)
    found = run(attempt, backoff, on_retry=lambda error, wait_s: heard.append((str(error), wait_s)))
    assert found == "done"
    assert heard == [("one", 0.001), ("two", 0.002)]


@both
@pytest.mark.parametrize("retries", [0, 3])
def test_the_last_error_is_raised_after_the_retries(run: Retry, retries: int) -> None:
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise ValueError(str(len(attempts)))

    with pytest.raises(ValueError, match=str(retries + 1)):
        run(attempt, Backoff.every(0.0, retries=retries))
    assert len(attempts) == retries + 1


@both
def test_only_errors_that_should_be_retried_are(run: Retry) -> None:
    errors = [ValueError("again"), TypeError("no"), ValueError("never")]

    def attempt() -> None:
        raise errors.pop(0)

    with pytest.raises(TypeError, match="no"):
        run(attempt, Backoff.every(0.0), should_retry=lambda error: isinstance(error, ValueError))


@both
def test_no_retry_follows_after_the_time_is_over(run: Retry) -> None:
    attempts = []

    def attempt() -> None:
        attempts.append(1)
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        run(attempt, Backoff(first_s=0.02, max_s=0.02, within_s=0.01))
    assert len(attempts) == 2


def test_a_poll_ends_with_its_condition_or_its_timeout() -> None:
    answers = iter([False, False, True])
    assert poll(lambda: next(answers), every_s=0.0)
    assert not poll(lambda: False, every_s=0.001, timeout_s=0.01)
    stopped = threading.Event()
    waiting = threading.Thread(target=lambda: poll(stopped.is_set, every_s=0.001))
    waiting.start()
    stopped.set()
    waiting.join(10)
    assert not waiting.is_alive()


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(limited())


def test_a_periodic_task_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        runs, enough = [], asyncio.Event()

        async def run() -> None:
            runs.append(1)
            if len(runs) == 1:
                raise ValueError("once")
            enough.set()

        task = PeriodicTask()
        task.start(run, lambda: 0.001, what="the test", log=log, after_s=0.0)
        await enough.wait()
        await task.close()
        count = len(runs)
        await asyncio.sleep(0.01)
        assert len(runs) == count

    in_loop(test)
    assert "the test failed; it runs again after the usual pause" in caplog.text


def test_a_periodic_task_that_never_started_can_be_closed() -> None:
    in_loop(PeriodicTask().close)


def test_the_docstring_lists_all_users() -> None:
    package = Path(module.__file__).parent
    users = {
        ".".join(file.relative_to(package).with_suffix("").parts)
        for file in package.rglob("*.py")
        if "from tinkex.server.retry import" in file.read_text()
    }
    table = (module.__doc__ or "").partition("|---|---|\n")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines() for name in re.findall(r"`([\w.]+)`", line)]
    assert sorted(named) == sorted(users)
