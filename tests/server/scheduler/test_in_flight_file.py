"""Crash counts survive restarts of the web process; restarts themselves do not count."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from processes import has_exited
from server.dying_server import POISON
from server.hosting import Api, connected, hosted
from server.scheduler.test_crash_isolation import POISON as CRASH_POISON
from server.scheduler.test_crash_isolation import CrashingExecutor
from tinkex.server.executor import Outcome, Work
from tinkex.server.scheduler.crash_isolation import (
    EngineState,
    InFlightFile,
    LeftoverState,
    counts_as_crash,
    current_boot_id,
    web_process_crashed,
)
from tinkex.wire.engine_settings import EngineSettings

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).parents[1] / "dying_server.py"


@pytest.mark.parametrize(
    ("engine", "boot", "web_crashed", "counted"),
    [
        # The engine died with its web process, so its end was not counted.
        (EngineState.UP, "now", False, True),
        (EngineState.UP, "now", True, True),
        # The web process was killed; its engine was fine.
        (EngineState.LEFT, "now", False, False),
        # The web process crashed, perhaps on a result.
        (EngineState.LEFT, "now", True, True),
        # The engine had no work, or its crash was counted.
        (EngineState.NONE, "now", False, False),
        (EngineState.NONE, "now", True, False),
        # The machine went down.
        (EngineState.UP, "before", False, False),
        (EngineState.LEFT, "before", True, False),
    ],
)
def test_when_leftover_requests_count_as_crashed(
    engine: EngineState, boot: str, web_crashed: bool, counted: bool
) -> None:
    leftover = LeftoverState(engine=engine, boot_id=boot, in_flight=("a",))
    assert counts_as_crash(leftover, boot_id="now", web_crashed=web_crashed) is counted


@pytest.mark.parametrize(
    ("status", "oom_kills", "crashed"),
    [
        (-signal.SIGSEGV, 0, True),
        (-signal.SIGABRT, 0, True),
        (1, 0, True),
        (-signal.SIGKILL, 0, False),
        (-signal.SIGTERM, 1, False),
        (-signal.SIGKILL, 1, True),
    ],
)
def test_a_web_process_that_was_killed_did_not_crash(
    status: int, oom_kills: int, crashed: bool
) -> None:
    assert web_process_crashed(status, oom_kills=oom_kills) is crashed


def test_the_file_tells_the_next_process_which_requests_were_running(tmp_path: Path) -> None:
    first = InFlightFile(tmp_path / "roll")
    assert first.leftover is None
    first.set_engine_state(EngineState.UP)
    lines = first.add(["a", "b"])
    first.add(["c"])
    first.remove(lines)
    first.add(["d"])
    os.close(first.descriptor)  # like a process that is killed
    second = InFlightFile(tmp_path / "roll")
    assert second.leftover == LeftoverState(
        engine=EngineState.UP, boot_id=current_boot_id(), in_flight=("d", "c")
    )
    second.close()
    third = InFlightFile(tmp_path / "roll")
    assert third.leftover is None
    third.close()


def test_a_file_with_other_content_is_ignored(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 200, b"something else\n" * 9):
        (tmp_path / "roll").write_bytes(content)
        in_flight = InFlightFile(tmp_path / "roll")
        assert in_flight.leftover is None
        in_flight.close()


@contextlib.contextmanager
def engine_alone(in_flight: InFlightFile, model: Path) -> Iterator[tuple[int, socket.socket]]:
    """A real engine process, and our end of its socket."""
    ours, theirs = socket.socketpair()
    passed = (theirs.fileno(), in_flight.descriptor)
    settings = EngineSettings(name="tiny", folder=model).to_json()
    command = [sys.executable, "-m", "tinkex.engine.process", "--settings", settings]
    command += ["--fd", str(passed[0]), "--roll-fd", str(passed[1])]
    with theirs:
        process = subprocess.Popen(command, pass_fds=passed, stderr=subprocess.DEVNULL)
    try:
        ours.recv(1)  # it is up
        yield process.pid, ours
    finally:
        ours.close()
        process.kill()
        process.wait()


def test_an_engine_that_outlives_its_web_process_writes_left(
    tmp_path: Path, tiny_model: Path
) -> None:
    in_flight = InFlightFile(tmp_path / "roll")
    in_flight.set_engine_state(EngineState.UP)
    in_flight.add(["a"])
    with engine_alone(in_flight, tiny_model) as (pid, wire):
        # A service manager signals all processes; only the web process acts on it.
        os.kill(pid, signal.SIGTERM)
        assert not has_exited(pid, within_s=0.1)
        os.close(in_flight.descriptor)
        wire.close()
        # The next web process waits for its exit.
        leftover = InFlightFile(tmp_path / "roll").leftover
    assert leftover is not None
    assert leftover.engine is EngineState.LEFT
    assert leftover.in_flight == ("a",)


@contextlib.contextmanager
def dying(data: Path) -> Iterator[tuple[str, Callable[[str], "subprocess.Popen[bytes]"]]]:
    """A URL, and a function that starts a server there that crashes in a given way."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        started: list[subprocess.Popen[bytes]] = []

        def start(how: str) -> "subprocess.Popen[bytes]":
            descriptor = listening.fileno()
            command = [sys.executable, str(SCRIPT), str(descriptor), str(data), how]
            started.append(subprocess.Popen(command, pass_fds=(descriptor,)))
            return started[-1]

        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", start
        finally:
            for process in started:
                process.kill()
                process.wait()


async def result_of(api: Api, request_id: str) -> dict[str, Any]:
    while True:
        try:
            answer: dict[str, Any] = await api.result(request_id)
        except aiohttp.ClientError:
            await asyncio.sleep(0.02)
        else:
            return answer


async def submitted(api: Api) -> tuple[list[str], list[str]]:
    """Passes of three models, the second one poisonous, and a step behind each."""
    session = await api.session()
    models = [await api.model(session, number=number) for number in range(3)]
    # The later steps arrive first, so nothing runs before all have arrived.
    steps = [await api.optim_step(model, 2) for model in models]
    first, last = await asyncio.gather(*(api.forward_backward(models[n], 1) for n in (0, 2)))
    # Last: the server crashes soon after it accepts this.
    poison = await api.forward_backward(models[1], 1, tokens=POISON)
    return [first, poison, last], steps


async def until(result: "asyncio.Task[Any]", start: Callable[[str], Any], how: str) -> int:
    """Restart the server until the result is there. Returns how often it crashed."""
    crashes = 0
    while not result.done():
        process = start(how)
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        await asyncio.wait({result, ended}, return_when=asyncio.FIRST_COMPLETED)
        crashes += ended.done()
    return crashes


async def test_crashes_of_engine_and_web_process_count_but_not_of_the_web_process_alone(
    tmp_path: Path,
) -> None:
    with dying(tmp_path) as (url, start):
        first = start("web")
        async with connected(url) as api:
            passes, steps = await submitted(api)
        for process in (first, start("web"), start("web")):
            assert await asyncio.to_thread(has_exited, process.pid)
        async with connected(url) as api:
            asked = asyncio.create_task(result_of(api, passes[1]))
            crashes = await until(asked, start, "both")
            poisonous = await asked
            results = [await result_of(api, step) for step in steps]
    assert poisonous["category"] == "server"
    assert "died 3 times" in poisonous["error"]
    assert crashes == 3
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3
    assert "step 1 before this optim_step failed" in results[1]["error"]


class Once(CrashingExecutor):
    """Crashes on poison once, and does not restart."""

    def die(self) -> None:
        super().die()
        self.open.clear()

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        await self.open.wait()
        return await super().run(base_model, work, incarnation=incarnation)


async def test_crashes_that_a_web_process_observed_count_in_the_next_one(tmp_path: Path) -> None:
    passed = ""
    for times in (1, 2):
        executor = Once()
        async with hosted(executor, tmp_path) as api:
            if not passed:
                passed = await api.forward_backward(await api.model(), 1, tokens=CRASH_POISON)
            assert api.app is not None
            deaths = api.app.state.context.store.crash_counts
            while (known := await deaths.all()) != {passed: times}:
                assert known.get(passed, 0) < times
        assert executor.crashes == 1
    last = CrashingExecutor()
    async with hosted(last, tmp_path) as api:
        poisonous = await api.result(passed)
        assert api.app is not None
        assert await api.app.state.context.store.crash_counts.all() == {}
    assert "died 3 times" in poisonous["error"]
    assert last.crashes == 1
