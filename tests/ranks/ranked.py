"""Engines of several ranks: rank 0 is the test process, the others are forked from a clean process."""

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.ranks.engine import RankedEngine

#: It imports torch and transformers once, for all ranks of all tests.
_forks: Any = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tinkex.engine.ranks.follower"])


class Forked:
    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        status: int | None = self._process.exitcode
        return status

    def kill(self) -> None:
        self._process.kill()


def follow(settings: str, rank: int, control: socket.socket) -> None:
    import logging

    from tinkex.engine.ranks import follower

    logging.disable(logging.WARNING)
    follower.follow(EngineSettings.from_json(settings), rank, control)


def forked(run: Callable[[str, int, socket.socket], None]) -> Callable[..., Forked]:
    """Starts ranks that run this function."""

    def start(settings: EngineSettings, rank: int, control: socket.socket, _: int | None) -> Forked:
        arguments = settings.to_json(), rank, control
        process = _forks.Process(target=run, args=arguments, daemon=True)
        process.start()
        return Forked(process)

    return start


fork = forked(follow)


def fail(reason: str, status: int) -> NoReturn:
    raise AssertionError(f"{reason} ({status})")


@contextmanager
def ranked(
    folder: Path, ranks: int = 2, *, start: Callable[..., Any] | None = None, **settings: Any
) -> Iterator[Engine]:
    """An engine of several ranks; of one, the engine itself."""
    made = {"name": "tiny", "folder": folder, "device": "cpu", "kv_tokens": 2048, **settings}
    if ranks == 1:
        yield Engine(EngineSettings(**made))
        return
    engine = RankedEngine(
        EngineSettings(**made, ranks=ranks), start=start or fork, on_end=lambda *a: fail(*a)
    )
    try:
        yield cast(Engine, engine)
    finally:
        engine.close()


def expect_tests(module: dict[str, object], least: int) -> None:
    """A module takes tests of others by their fixtures. If one is renamed, nobody would miss them."""
    found = [name for name, value in module.items() if name.startswith("test_") and callable(value)]
    assert len(found) >= least, f"only {len(found)} tests, {least} before"
