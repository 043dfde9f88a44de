"""
The web process: uvicorn on a socket the supervisor opened. Started by `run`, never by hand.

    python -m tinkex.server.web --fd N --report-fd N --lifeline-fd N --model NAME FOLDER < SETTINGS

`--after-crash` says that the web process before this one died of what it did.
It says one word on the report pipe: `ready`, or `failed` with the reason.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tinkex.models.resolve import ModelSource, describe
from tinkex.server import processes
from tinkex.server.api.deps import Context
from tinkex.server.api.http_limits import patient, protocol
from tinkex.server.app import create_app
from tinkex.server.executor import EngineOptions, EngineRefused, LocalExecutor, ServedModel
from tinkex.server.processes import collect_by_the_clock, collect_rarely, share_one_heap
from tinkex.server.scheduler.crash_isolation import Roll
from tinkex.server.settings import Settings
from tinkex.server.store import DatabaseRefused, open_store

log = logging.getLogger("tinkex.server.web")

# Longer than any client keeps an idle connection, so that none is closed just as it is used.
KEEP_ALIVE_S = 120

GIGABYTE = 10**9


class Reporter:
    """The pipe to the supervisor; one report, then closed."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w")

    def say(self, text: str) -> None:
        if not self._pipe.closed:
            with contextlib.suppress(OSError):
                self._pipe.write(text)
                self._pipe.close()


class Server(uvicorn.Server):
    """Uvicorn that lets waiting polls go as soon as it is told to stop."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._served = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._release()
        super().handle_exit(sig, frame)

    def leave(self, loop: asyncio.AbstractEventLoop, lifeline: int) -> None:
        loop.remove_reader(lifeline)
        self._release()
        self.should_exit = True

    def _release(self) -> None:
        context: Context | None = getattr(self._served.state, "context", None)
        if context is not None:
            context.futures.release()


async def serve(
    settings: Settings,
    served: Sequence[ServedModel],
    *,
    listening: socket.socket,
    lifeline: int,
    reporter: Reporter,
    after_crash: bool,
) -> bool:
    """Serve until told to stop; False when it could not begin."""
    try:
        store = open_store(
            db_url=settings.db_url,
            storage_url=settings.storage_url,
            folder=settings.folder,
            exclusive=True,
        )
    except DatabaseRefused as refused:
        log.error("%s", refused)
        reporter.say(f"failed\n{refused}")
        return False
    rolls = _open_rolls(settings.folder / "rolls", served)
    executor = LocalExecutor(served, _engine_options(settings, served), rolls=rolls)
    app = create_app(settings, executor, store, rolls=rolls, web_crashed=after_crash)
    server = Server(uvicorn_config(app, settings), app)
    _allow_descriptors()
    collect_rarely()
    collecting = asyncio.create_task(collect_by_the_clock())
    # When the supervisor is gone nobody would start this process again: leave in order.
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline, lambda: server.leave(loop, lifeline))
    # Uvicorn raises the signal again once it has stopped. By itself that would end this process
    # before the store is closed.
    signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        begun = await _begin(executor, reporter, serving, server)
        await serving
        return begun and server.started
    finally:
        collecting.cancel()
        for roll in rolls.values():
            roll.close()
        store.close()


async def _begin(
    executor: LocalExecutor, reporter: Reporter, serving: asyncio.Task[None], server: Server
) -> bool:
    """Wait for the engine while requests are already taken in, then report."""
    starting = asyncio.create_task(executor.start())
    await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        reporter.say("failed\nthe web process could not start; its log is above")
        return False
    try:
        await starting
    except EngineRefused as refused:
        reporter.say(f"failed\n{refused}")
        server.should_exit = True
        return False
    reporter.say("ready\n")
    return True


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How connections are treated."""
    return uvicorn.Config(
        app,
        http=patient(protocol(), head_s=settings.head_s, stall_s=settings.stall_s),
        # Nothing here speaks WebSocket: what nobody uses is not reachable either.
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=settings.max_connections or None,
        timeout_graceful_shutdown=int(settings.drain_s),
        server_header=False,
    )


def _allow_descriptors() -> None:
    """Each connection needs one, and many systems give a process 1,024 unless it asks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_rolls(folder: Path, served: Sequence[ServedModel]) -> dict[str, Roll]:
    """Who is with which engine; a disk that takes none stops nobody."""
    rolls = {}
    for model in served:
        try:
            rolls[model.name] = Roll.of(folder, model.name)
        except OSError as error:
            log.warning("deaths of this process will not be counted: %s", error)
    return rolls


def _engine_options(settings: Settings, served: Sequence[ServedModel]) -> EngineOptions:
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        deterministic=settings.deterministic,
        memory_bytes=int(settings.memory_gb * GIGABYTE),
        adapter_bytes=int(settings.adapter_gb * GIGABYTE),
        kv_tokens=settings.kv_tokens,
        max_batch_tokens=settings.batch_tokens,
        max_sequences=settings.max_sequences,
        host_bytes=int(settings.host_gb * GIGABYTE),
        prefix_cache=settings.prefix_cache,
        idle_adapters=settings.idle_adapters,
        spill_folder=settings.folder / "spill",
        idle_s=settings.engine_idle_s,
        # Engines on one processor would only slow each other down.
        turn_file=settings.folder / "turn.lock" if len(served) > 1 else None,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--model", nargs=2, action="append", default=[])
    parser.add_argument("--after-crash", action="store_true")
    return parser


def main() -> None:
    options = parser().parse_args()
    share_one_heap()
    # What this process and its engines write is training data, and nobody else's on this machine.
    os.umask(0o077)
    processes.begin()
    # Its starting and stopping is the supervisor's to tell.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    reporter = Reporter(options.report_fd)
    settings = Settings.from_json(sys.stdin.read())
    processes.tell(settings.log_level)
    served = []
    for name, folder in options.model:
        facts = describe(ModelSource(name=name, folder=Path(folder)))
        served.append(
            ServedModel(
                name=name,
                folder=Path(folder),
                arch=facts.arch,
                max_context_length=facts.max_context_length,
            )
        )
    listening = socket.socket(fileno=options.fd)
    serving = serve(
        settings,
        served,
        listening=listening,
        lifeline=options.lifeline_fd,
        reporter=reporter,
        after_crash=options.after_crash,
    )
    if not asyncio.run(serving):
        sys.exit(1)


if __name__ == "__main__":
    main()
