"""Deaths count across restarts of the web process, and restarts themselves count for nothing."""

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

from processes import gone
from server.dying_server import POISON
from server.hosting import Api, connected, hosted
from server.test_company import POISON as COMPANY_POISON
from server.test_company import Mortal
from tinkex.server.executor import Outcome, Work
from tinkex.server.scheduler.crash_isolation import Engine, Remains, Roll, boot_id, counts, crashed

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).with_name("dying_server.py")


@pytest.mark.parametrize(
    ("engine", "boot", "web_crashed", "counted"),
    [
        # Nobody saw the engine die: it went with its web process.
        (Engine.UP, "now", False, True),
        (Engine.UP, "now", True, True),
        # Somebody killed the web process; its engine was well.
        (Engine.LEFT, "now", False, False),
        # The web process broke on what came back.
        (Engine.LEFT, "now", True, True),
        # Nothing was with an engine, or it was counted when the engine died.
        (Engine.NONE, "now", False, False),
        (Engine.NONE, "now", True, False),
        # The machine went down.
        (Engine.UP, "before", False, False),
        (Engine.LEFT, "before", True, False),
    ],
)
def test_what_counts_of_what_a_web_process_left_behind(
    engine: Engine, boot: str, web_crashed: bool, counted: bool
) -> None:
    remains = Remains(engine=engine, boot_id=boot, inside=("a",))
    assert counts(remains, boot_id="now", web_crashed=web_crashed) is counted


@pytest.mark.parametrize(
    ("status", "oom_kills", "itself"),
    [
        (-signal.SIGSEGV, 0, True),
        (-signal.SIGABRT, 0, True),
        (1, 0, True),
        (-signal.SIGKILL, 0, False),
        (-signal.SIGTERM, 1, False),
        (-signal.SIGKILL, 1, True),
    ],
)
def test_a_web_process_that_somebody_killed_did_not_crash(
    status: int, oom_kills: int, itself: bool
) -> None:
    assert crashed(status, oom_kills=oom_kills) is itself


def test_a_roll_tells_the_next_process_who_was_there(tmp_path: Path) -> None:
    first = Roll(tmp_path / "roll")
    assert first.remains is None
    first.engine(Engine.UP)
    lines = first.enter(["a", "b"])
    first.enter(["c"])
    first.leave(lines)
    first.enter(["d"])
    os.close(first.descriptor)  # as a process that is killed
    second = Roll(tmp_path / "roll")
    assert second.remains == Remains(engine=Engine.UP, boot_id=boot_id(), inside=("d", "c"))
    second.close()
    third = Roll(tmp_path / "roll")
    assert third.remains is None
    third.close()


def test_a_file_that_is_no_roll_blames_nobody(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 200, b"something else\n" * 9):
        (tmp_path / "roll").write_bytes(content)
        roll = Roll(tmp_path / "roll")
        assert roll.remains is None
        roll.close()


@contextlib.contextmanager
def engine_alone(roll: Roll, model: Path) -> Iterator[tuple[int, socket.socket]]:
    """A real engine process, and our end of its wire."""
    ours, theirs = socket.socketpair()
    passed = (theirs.fileno(), roll.descriptor)
    command = [sys.executable, "-m", "tinkex.engine.process", "--name", "tiny"]
    command += ["--folder", str(model), "--fd", str(passed[0]), "--roll-fd", str(passed[1])]
    with theirs:
        process = subprocess.Popen(command, pass_fds=passed, stderr=subprocess.DEVNULL)
    try:
        ours.recv(1)  # it is up, and says so
        yield process.pid, ours
    finally:
        ours.close()
        process.kill()
        process.wait()


def test_an_engine_that_outlives_its_web_process_says_so(tmp_path: Path, tiny_model: Path) -> None:
    roll = Roll(tmp_path / "roll")
    roll.engine(Engine.UP)
    roll.enter(["a"])
    with engine_alone(roll, tiny_model) as (pid, wire):
        # What a service manager sends to everybody is for the web process to act on.
        os.kill(pid, signal.SIGTERM)
        assert not gone(pid, within_s=0.1)
        os.close(roll.descriptor)
        wire.close()
        # The next web process waits for it.
        remains = Roll(tmp_path / "roll").remains
    assert remains is not None
    assert remains.engine is Engine.LEFT
    assert remains.inside == ("a",)


@contextlib.contextmanager
def dying(data: Path) -> Iterator[tuple[str, Callable[[str], "subprocess.Popen[bytes]"]]]:
    """An address, and a way to put a server on it that dies in some way."""
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


async def insist(api: Api, request_id: str) -> dict[str, Any]:
    while True:
        try:
            answer: dict[str, Any] = await api.result(request_id)
        except aiohttp.ClientError:
            await asyncio.sleep(0.02)
        else:
            return answer


async def submitted(api: Api) -> tuple[list[str], list[str]]:
    """Passes of three models, of which the second is poison; and a step behind each."""
    session = await api.session()
    models = [await api.model(session, number=number) for number in range(3)]
    # The steps behind them come first: nothing runs before the numbers are whole.
    steps = [await api.optim_step(model, 2) for model in models]
    first, last = await asyncio.gather(*(api.forward_backward(models[n], 1) for n in (0, 2)))
    # The last word: the server dies soon after its answer.
    poison = await api.forward_backward(models[1], 1, tokens=POISON)
    return [first, poison, last], steps


async def until(result: "asyncio.Task[Any]", start: Callable[[str], Any], how: str) -> int:
    """Start the server again and again until somebody has a result; how often it died."""
    deaths = 0
    while not result.done():
        process = start(how)
        ended = asyncio.create_task(asyncio.to_thread(process.wait))
        await asyncio.wait({result, ended}, return_when=asyncio.FIRST_COMPLETED)
        deaths += ended.done()
    return deaths


async def test_deaths_of_engine_and_web_process_count_and_those_of_the_web_process_do_not(
    tmp_path: Path,
) -> None:
    with dying(tmp_path) as (url, start):
        first = start("web")
        async with connected(url) as api:
            passes, steps = await submitted(api)
        for process in (first, start("web"), start("web")):
            assert await asyncio.to_thread(gone, process.pid)
        async with connected(url) as api:
            asked = asyncio.create_task(insist(api, passes[1]))
            deaths = await until(asked, start, "both")
            deadly = await asked
            results = [await insist(api, step) for step in steps]
    assert deadly["category"] == "server"
    assert "died 3 times" in deadly["error"]
    assert deaths == 3
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3
    assert "step 1 before this optim_step failed" in results[1]["error"]


class Once(Mortal):
    """Dies of poison once, and does not come up again."""

    def die(self) -> None:
        super().die()
        self.open.clear()

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        await self.open.wait()
        return await super().run(base_model, work, incarnation=incarnation)


async def test_deaths_that_a_web_process_saw_count_in_the_next_one(tmp_path: Path) -> None:
    passed = ""
    for times in (1, 2):
        executor = Once()
        async with hosted(executor, tmp_path) as api:
            if not passed:
                passed = await api.forward_backward(await api.model(), 1, tokens=COMPANY_POISON)
            assert api.app is not None
            deaths = api.app.state.context.store.crash_counts
            while (known := await deaths.all()) != {passed: times}:
                assert known.get(passed, 0) < times
        assert executor.deaths == 1
    last = Mortal()
    async with hosted(last, tmp_path) as api:
        deadly = await api.result(passed)
        assert api.app is not None
        assert await api.app.state.context.store.crash_counts.all() == {}
    assert "died 3 times" in deadly["error"]
    assert last.deaths == 1
