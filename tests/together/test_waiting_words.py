"""On a real terminal and in a log file: a program that waits for a real server says so."""

import asyncio
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from server.storage.failing import FULL, FailingFileSystem
from tinkex.client.observe.waiting import HOW_TO_STOP
from waiting import until_async

PROGRAM = Path(__file__).with_name("waiting_program.py")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _repaired() -> Iterator[None]:
    yield
    FailingFileSystem.error = None


class Queued(EchoExecutor):
    """Work can be held back, with a reason for the clients."""

    reason: str | None = None

    def waiting_for(self, base_model: str) -> str | None:
        return self.reason

    def hold(self, reason: str) -> None:
        self.reason = reason
        self.open.clear()

    def release(self) -> None:
        self.reason = None
        self.open.set()


class Terminal:
    """A program on a terminal of 80 columns."""

    def __init__(self, *command: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.shown = ""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        threading.Thread(target=self._read, args=(ours,), daemon=True).start()

    def _read(self, ours: int) -> None:
        try:
            while piece := os.read(ours, 4096):
                self.shown += piece.decode()
        except OSError:
            pass  # the other end is closed

    @property
    def words(self) -> list[str]:
        """Its lines without the steps."""
        return [line for line in self.shown.splitlines() if not line.startswith("step ")]

    @property
    def steps(self) -> int:
        return self.shown.count("step ")

    async def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        await asyncio.to_thread(self.process.wait, 20)


async def test_what_a_person_sees_while_a_program_waits(anyio_backend: str, tmp_path: Path) -> None:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    command = [sys.executable, str(PROGRAM), url, BASE]
    program, logged = Terminal(*command), Terminal(*command, str(log))
    executor = Queued()
    storage = {"at_port": port, "storage": f"failing://{tmp_path.name}"}

    def lines(count: int) -> bool:
        return len(program.words) >= count and log.exists() and log.read_text().count("\n") >= count

    async def steps() -> None:
        before = program.steps, logged.steps
        await until_async(lambda: program.steps > before[0] + 1 and logged.steps > before[1] + 1)

    try:
        await until_async(lambda: lines(1))
        async with hosted(executor, tmp_path, **storage) as api:
            await until_async(lambda: lines(2))
            await steps()
            FailingFileSystem.error = FULL
            await until_async(lambda: lines(3))
            FailingFileSystem.error = None
            await until_async(lambda: lines(4))
            await steps()
            executor.hold(f"the engine of {BASE} is starting")
            await until_async(lambda: lines(5))
            executor.release()
            await until_async(lambda: lines(6))
            await steps()
            assert api.server is not None
            api.server.force_exit = True
        await until_async(lambda: lines(7))
        async with hosted(executor, tmp_path, **storage):
            await until_async(lambda: lines(8))
            await steps()
            await asyncio.gather(program.stop(), logged.stop())
    finally:
        for each in (program, logged):
            each.process.kill()
            each.process.wait()
    for words in (program.words, _without_prefix(log)):
        dead, came, full, freed, paused, unpaused, stopped, back = words
        limits = r"Trying for \d+ (s|min) more \({}\)"
        assert re.fullmatch(
            rf"{url}: connection refused\. {limits.format('TINKEX_FIRST_CONTACT_S')}\. "
            + re.escape(HOW_TO_STOP),
            dead,
        )
        assert re.fullmatch(rf"{url} answers after \d+ s\.", came)
        assert full.startswith(f"{url}: the disk of this server is full (No space left on device)")
        assert re.search(limits.format("TINKEX_GIVE_UP_S"), full)
        assert re.fullmatch(rf"{url} accepts requests again after \d+ s\.", freed)
        assert re.fullmatch(
            rf"Training of \S+ is paused: the engine of {BASE} is starting\. "
            r"Waiting without a time limit\. " + re.escape(HOW_TO_STOP),
            paused,
        )
        assert re.fullmatch(r"Training of \S+ goes on after \d+ s\.", unpaused)
        assert stopped.startswith(f"{url}: ")
        assert re.search(limits.format("(results: TINKEX_RECONNECT_S|TINKEX_GIVE_UP_S)"), stopped)
        assert re.fullmatch(rf"{url} answers again after \d+ s\.", back)
    assert logged.words == []  # only in the file


def _without_prefix(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    prefix = "WARNING tinkex.waiting "
    assert all(line.startswith(prefix) for line in lines), lines
    return [line.removeprefix(prefix) for line in lines]
