"""Attempts survive restarts of the web process, and count its crashes; restarts do not count."""

import asyncio
import contextlib
import gc
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from processes import has_exited
from server.dying_server import POISON
from server.echo import BASE, EchoExecutor
from server.hosting import Api, connected, hosted
from server.scheduler.test_crash_isolation import POISON as CRASH_POISON
from server.scheduler.test_crash_isolation import CrashingExecutor
from tinkex.server.scheduler import crash_files
from tinkex.server.scheduler.crash_files import CrashFiles
from tinkex.server.scheduler.engine_client import after_web_crash
from tinkex.wire.proto.frames_pb2 import Done, Order

pytestmark = pytest.mark.anyio

T = TypeVar("T")

SCRIPT = Path(__file__).parents[1] / "dying_server.py"


def test_a_crash_counts_for_isolated_requests_or_else_for_all_that_wait() -> None:
    assert after_web_crash({"a": 1, "b": 0}, frozenset()) == ({"a": 2, "b": 1}, None)
    many = {"a": 2, "b": 2, "c": 2, "d": 0}
    assert after_web_crash(many, frozenset("ab")) == ({"a": 3, "b": 3, "c": 2}, None)


def test_a_request_that_was_isolated_alone_crashed_the_web_process() -> None:
    assert after_web_crash({"a": 2, "b": 2}, frozenset("a")) == ({}, "a")
    # It was on another engine: nothing counts on this one.
    assert after_web_crash({"b": 2, "c": 0}, frozenset("a")) == ({"b": 2}, None)


def test_the_files_tell_the_next_process_what_was_running(tmp_path: Path) -> None:
    first = CrashFiles(tmp_path)
    assert first.find_crash(-signal.SIGSEGV) is None  # nothing ran before
    first.start()
    first.add(["a", "b"])
    first.remove(["b"])
    second = CrashFiles(tmp_path)
    assert second.find_crash(-signal.SIGSEGV) == {"a"}
    assert second.find_crash(1) == {"a"}
    assert second.find_crash(-signal.SIGKILL) is None
    assert second.find_crash(-signal.SIGTERM) is None
    second.start()
    assert CrashFiles(tmp_path).find_crash(-signal.SIGSEGV) == frozenset()
    second.close()
    assert CrashFiles(tmp_path).find_crash(-signal.SIGSEGV) is None


def test_a_web_process_killed_for_lack_of_memory_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CrashFiles(tmp_path)
    files.start()
    kills = crash_files.oom_kills() + 1
    monkeypatch.setattr(crash_files, "oom_kills", lambda: kills)
    assert files.find_crash(-signal.SIGKILL) == frozenset()
    assert files.find_crash(-signal.SIGTERM) is None
    # It was an engine, and its end was counted.
    files.mark_running()
    assert files.find_crash(-signal.SIGKILL) is None


def test_the_loss_of_the_machine_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = CrashFiles(tmp_path)
    files.start()
    monkeypatch.setattr(crash_files, "boot_id", lambda: "another")
    assert files.find_crash(-signal.SIGSEGV) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"[]", json.dumps({"boot_id": 1}).encode()])
def test_a_file_with_other_content_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "running").write_bytes(content)
    assert CrashFiles(tmp_path).find_crash(-signal.SIGSEGV) is None


async def test_a_step_that_crashed_the_web_process_does_not_run_in_a_batch(tmp_path: Path) -> None:
    executor = EchoExecutor()
    async with hosted(executor, tmp_path) as api:
        model = await api.model()
        first, second, third = [await api.forward_backward(model, seq) for seq in (2, 3, 4)]
        assert api.app
        api.app.state.context.scheduler.replicas(BASE).engines[0].client.isolation.lost.restore(
            {}, second
        )
        await api.passed(await api.forward_backward(model, 1))
        await api.passed(first)
        failed = await api.result(second)
        await api.passed(third)
    assert "the web process crashed together with it" in failed["error"]
    assert len(executor.ran) == 4  # the creation and three passes


async def test_requests_that_wait_have_an_attempt_more_after_a_crash(tmp_path: Path) -> None:
    executor = EchoExecutor()
    async with hosted(executor, tmp_path) as api:
        model = await api.model()
        executor.open.clear()
        waiting = await api.forward_backward(model, 1)
    CrashFiles(tmp_path).start()  # as a process that has no time to delete the file
    async with hosted(executor, tmp_path, last_status=-signal.SIGSEGV) as api:
        assert api.app
        assert await api.app.state.context.store.attempts.counted() == {BASE: {waiting: 1}}
        executor.open.set()
        await api.passed(waiting)
    gc.collect()  # a coroutine that was not awaited is a warning then


@contextlib.contextmanager
def dying(data: Path) -> Iterator[tuple[str, Callable[[str], "subprocess.Popen[bytes]"]]]:
    """A URL, and a function that starts a server there that ends in a given way."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        started: list[subprocess.Popen[bytes]] = []

        def start(how: str) -> "subprocess.Popen[bytes]":
            descriptor = listening.fileno()
            # As the supervisor does.
            last_status = str(started[-1].wait()) if started else "-9"
            command = [sys.executable, str(SCRIPT), str(descriptor), str(data), how]
            command += ["{}", last_status]
            started.append(subprocess.Popen(command, pass_fds=(descriptor,)))
            return started[-1]

        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", start
        finally:
            for process in started:
                process.kill()
                process.wait()


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call while the server crashes and restarts."""
    while True:
        try:
            return await call()
        except aiohttp.ClientError:
            await asyncio.sleep(0.02)


async def result_of(api: Api, request_id: str) -> dict[str, Any]:
    return await until_answered(lambda: api.result(request_id))


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


async def test_crashes_of_engine_and_web_process_count_but_kills_do_not(
    tmp_path: Path,
) -> None:
    with dying(tmp_path) as (url, start):
        first = start("kill")
        async with connected(url) as api:
            passes, steps = await submitted(api)
        assert await asyncio.to_thread(has_exited, first.pid)
        for _ in range(3):
            process = await asyncio.to_thread(start, "kill")
            assert await asyncio.to_thread(has_exited, process.pid)
        async with connected(url) as api:
            asked = asyncio.create_task(result_of(api, passes[1]))
            crashes = await until(asked, start, "crash")
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

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
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
            attempts = api.app.state.context.store.attempts
            while (known := await attempts.counted()) != {BASE: {passed: times}}:
                assert known.get(BASE, {passed: 0})[passed] < times
        assert executor.crashes == 1
    last = CrashingExecutor()
    async with hosted(last, tmp_path) as api:
        poisonous = await api.result(passed)
        assert api.app is not None
        assert await api.app.state.context.store.attempts.counted() == {}
    assert "died 3 times" in poisonous["error"]
    assert last.crashes == 1
