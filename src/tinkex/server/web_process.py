"""
The web process: runs uvicorn on the supervisor's socket. Only the supervisor starts it.

    python -m tinkex.server --fd N --report-fd N --lifeline-fd N --model NAME FOLDER < SETTINGS

`--last-status` is the exit status of the previous web process of this supervisor. This process
writes one report to the report pipe: `ready` and facts, or `failed` and the reason, both as JSON. It
stops when the lifeline pipe closes, because then the supervisor is gone.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinkex.models.resolve import ModelNotFound, ModelSource
from tinkex.server import process_setup
from tinkex.server.announcement import Facts, LoadedModel
from tinkex.server.api.connection_limits import LimitedProtocol, ReportingApp
from tinkex.server.api.deps import Context
from tinkex.server.app import create_app
from tinkex.server.cluster.known_workers import KnownWorkers
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineRefused, ServedModel
from tinkex.server.local_models import LocalModels, remembered, served_model, with_remembered
from tinkex.server.process_setup import tuned_gc, use_single_arena
from tinkex.server.registration import Administration
from tinkex.server.retry import poll_async
from tinkex.server.settings import GIGABYTE, MEBIBYTE, NUMERICS, Settings
from tinkex.server.store import DatabaseRefused, Store, open_store
from tinkex.wire.engine_settings import DtypeName, EngineSettings
from tinkex.wire.proto import frames_pb2

log = logging.getLogger("tinkex.server.web_process")

# Longer than any client keeps an idle connection; otherwise the server could close a connection
# just as the client uses it.
KEEP_ALIVE_S = 120

# How often a starting server checks whether it answers requests, and whether its disk has space.
START_POLL_S = 0.02
DISK_POLL_S = 0.5
# macOS has no hard limit of open files, and refuses to raise the soft one above this.
MACOS_OPEN_MAX = 10240


class Reporter:
    """Sends one report to the supervisor, then closes the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w")

    def ready(self, facts: Facts) -> None:
        self._report(f"ready\n{facts.to_json()}")

    def failed(self, message: str, *, hint: str | None = None) -> None:
        self._report("failed\n" + json.dumps({"message": message, "hint": hint or None}))

    def _report(self, text: str) -> None:
        if not self._pipe.closed:
            with contextlib.suppress(OSError):
                self._pipe.write(text)
                self._pipe.close()


class Server(uvicorn.Server):
    """A uvicorn server that ends long polls as soon as it is stopped."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._served = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._release()
        super().handle_exit(sig, frame)

    def stop_without_supervisor(self, loop: asyncio.AbstractEventLoop, lifeline: int) -> None:
        loop.remove_reader(lifeline)
        self._release()
        self.should_exit = True

    def _release(self) -> None:
        context: Context | None = getattr(self._served.state, "context", None)
        if context is not None:
            context.futures.release()


class CannotServe(Exception):
    """The server cannot start; the text says why, and the hint what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def one_machine_app(
    settings: Settings,
    served: Sequence[ServedModel],
    store: Store,
    *,
    last_status: int,
    administration: Administration,
) -> tuple[FastAPI, LocalExecutor]:
    """The application of a server with engines of its own, and its executor."""
    replicas = settings.replicas_of_each(len(served))
    served = [replace(model, replicas=replicas) for model in served]
    names = [engine for model in served for engine in model.engines]
    if len(set(names)) < len(names):
        twice = max(names, key=names.count)
        raise CannotServe(
            f"two engines would have the name {twice}.",
            hint="Give a model another name: NAME=FOLDER.",
        )
    # Engines that compute at the same time on one CPU only slow each other down. But replicas are
    # asked for, for example one for each socket.
    shares_device = replicas == 1 and (len(served) > 1 or administration.local)
    numbered = enumerate((model, replica) for model in served for replica in range(replicas))
    executor = LocalExecutor(
        served,
        [
            engine_settings(
                settings, model, shares_device=shares_device, replica=replica, number=number
            )
            for number, (model, replica) in numbered
        ],
        idle_s=settings.engine_idle_s,
        # Many commands with `--base-url local` only read a list.
        on_demand=administration.local,
        loaded_before=remembered(settings.folder) if administration.local else (),
    )
    app = create_app(settings, executor, store, last_status=last_status)
    if administration.local:
        app.state.local_models = LocalModels(
            executor,
            settings.folder,
            lambda model: engine_settings(settings, model, shares_device=True),
        )
    return app, executor


def cluster_app(
    settings: Settings, served: Sequence[ServedModel], store: Store
) -> tuple[FastAPI, KnownWorkers]:
    """The application of a web process whose workers are elsewhere, and what it knows of them."""
    name = f"web {socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
    folders = {model.name: model.folder for model in served}
    workers = KnownWorkers(store, takeover_s=settings.takeover_s, folders=folders)
    # In a function: it needs the driver of PostgreSQL, which a server on one machine may not have.
    from tinkex.server.cluster.web import web_parts

    parts = functools.partial(web_parts, settings, workers, store, name=name)
    return create_app(settings, workers, store, parts=parts), workers


async def serve(
    settings: Settings,
    served: Sequence[ServedModel],
    *,
    listening: socket.socket,
    lifeline: int,
    reporter: Reporter,
    last_status: int,
    administration: Administration,
    web: bool,
) -> bool:
    """Serve until stopped; return False when the server could not start."""
    try:
        store = open_store(
            db_url=settings.db_url,
            storage_url=settings.storage_url,
            folder=settings.folder,
            exclusive=not web,
            role="web" if web else "",
        )
    except DatabaseRefused as refused:
        reporter.failed(str(refused))
        return False
    app: FastAPI
    executor: LocalExecutor | KnownWorkers
    try:
        if web:
            app, executor = cluster_app(settings, served, store)
        else:
            app, executor = one_machine_app(
                settings, served, store, last_status=last_status, administration=administration
            )
    except CannotServe as refused:
        reporter.failed(str(refused), hint=refused.hint)
        store.close()
        return False
    app.state.administration = administration
    app.state.starting = "the server is starting"
    server = Server(uvicorn_config(app, settings), app)
    _raise_file_limit()
    # Without a supervisor, nothing would restart this process: shut down cleanly.
    loop = asyncio.get_running_loop()
    loop.add_reader(lifeline, lambda: server.stop_without_supervisor(loop, lifeline))
    # Uvicorn raises the signal again after it has stopped. The default handler would end this
    # process before the store is closed.
    signal.signal(signal.SIGTERM, server.handle_exit)
    try:
        async with tuned_gc():
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            starting = asyncio.create_task(_become_ready(server, app, executor))
            await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
            started = await _report(starting, reporter)
            if not started:
                server.should_exit = True
            await serving
            return started and server.started
    finally:
        store.close()


async def _become_ready(
    server: Server, app: FastAPI, executor: LocalExecutor | KnownWorkers
) -> Facts:
    """Wait for the engine and for space on the disk; meanwhile the server answers requests."""
    if isinstance(executor, LocalExecutor):
        await executor.start()
    # The disk is checked at the start of the application.
    await poll_async(lambda: server.started, every_s=START_POLL_S)
    context: Context = app.state.context
    health = context.store.health
    if (problem := health.problem) is not None:
        folder = context.settings.folder
        log.error("not ready: %s (data folder %s). %s", problem.reason, folder, problem.advice)
        await poll_async(lambda: health.problem is None, every_s=DISK_POLL_S)
    app.state.starting = None
    return Facts(
        models=[
            LoadedModel(
                name=model.name,
                context=model.max_context_length,
                **(
                    _engine_facts([executor.facts(engine) for engine in model.engines])
                    if isinstance(executor, LocalExecutor)
                    else {"replicas": len(executor.that_take(model.name))}
                ),
            )
            for model in executor.served
        ],
        needs_keys=await app.state.authenticator.needs_keys(),
    )


def _engine_facts(engines: Sequence[frames_pb2.Ready | None]) -> dict[str, Any]:
    """What is known of the engines of a model; nothing if they are not loaded."""
    facts = engines[0]
    if facts is None:
        return {"replicas": len(engines)}
    # Replicas differ in their devices at most.
    devices = dict.fromkeys(one.device for one in engines if one is not None)
    return {
        "replicas": len(engines),
        "device": ", ".join(devices),
        "dtype": facts.dtype,
        "memory_used_bytes": facts.memory_used_bytes,
        "memory_bytes": facts.memory_bytes,
        "device_bytes": facts.device_bytes,
    }


async def _report(starting: asyncio.Task[Facts], reporter: Reporter) -> bool:
    """Report to the supervisor; False if the server could not start."""
    if not starting.done():
        starting.cancel()
        reporter.failed("the web process could not start; the log lines above say why")
        return False
    try:
        reporter.ready(await starting)
    except EngineRefused as refused:
        reporter.failed(str(refused), hint=refused.hint)
        return False
    return True


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Uvicorn's configuration, with the limits of `connection_limits`."""
    http = functools.partial(
        LimitedProtocol, HttpToolsProtocol, head_s=settings.head_s, stall_s=settings.stall_s
    )
    return uvicorn.Config(
        ReportingApp(app),
        http=cast("type[asyncio.Protocol]", http),
        # No route uses WebSocket.
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        limit_concurrency=settings.max_connections or None,
        timeout_graceful_shutdown=int(settings.drain_s),
        server_header=False,
    )


def _raise_file_limit() -> None:
    """Raise the limit of open files: each connection needs one, and the default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit(soft, hard), hard))


def file_limit(soft: int, hard: int) -> int:
    """The highest soft limit that the system accepts: the hard one, if there is one."""
    if hard != resource.RLIM_INFINITY:
        return hard
    return soft if soft == resource.RLIM_INFINITY else max(soft, MACOS_OPEN_MAX)


def engine_settings(
    settings: Settings,
    model: ServedModel,
    *,
    shares_device: bool,
    replica: int = 0,
    number: int = 0,
) -> EngineSettings:
    """
    The settings of one engine. A limit of 0 lets the engine choose.

    `number` is that of the engine among all engines of the server, which take devices in turn.
    """
    folder = settings.folder
    engine = model.engines[replica]
    # One for all engines of a model: a run may move from one to another.
    file = f"{hashlib.sha256(model.name.encode()).hexdigest()[:16]}.json"
    numerics = folder / NUMERICS / file if settings.deterministic else None
    return EngineSettings(
        name=model.name,
        folder=model.folder,
        replica=None if model.replicas == 1 else replica,
        device=settings.device_of(number),
        gpu=number,
        ranks=settings.gpus_per_replica,
        rank_timeout_s=settings.rank_timeout_s,
        dtype=cast(DtypeName, settings.dtype),
        threads=settings.threads or None,
        deterministic=settings.deterministic,
        numerics_file=numerics,
        accept_changed_numerics=settings.accept_changed_numerics,
        compiles=not settings.no_compile,
        memory_bytes=int(settings.memory_gb * GIGABYTE) or None,
        adapter_bytes=int(settings.adapter_gb * GIGABYTE) or None,
        kv_tokens=settings.kv_tokens or None,
        max_batch_tokens=settings.batch_tokens or None,
        max_sequences=settings.max_sequences or EngineSettings.max_sequences,
        host_bytes=int(settings.host_gb * GIGABYTE) or None,
        prefix_cache=settings.prefix_cache,
        training_share=settings.training_share,
        idle_adapters=settings.idle_adapters,
        idle_adapter_bytes=int(settings.idle_adapter_gb * GIGABYTE) or None,
        disk_reserve_bytes=int(settings.reserve_mb * MEBIBYTE),
        spill_folder=folder / "spill" / hashlib.sha256(engine.encode()).hexdigest()[:16],
        compute_lock=folder / "turn.lock" if shares_device else None,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--model", nargs=2, action="append", default=[])
    parser.add_argument("--web", action="store_true")
    # Without a status, the supervisor is new: somebody or the system killed the last one.
    parser.add_argument("--last-status", type=int, default=-signal.SIGKILL)
    return parser


def main() -> None:
    options = parser().parse_args()
    use_single_arena()
    # This process and its engines write training data: no other user may read it.
    os.umask(0o077)
    process_setup.setup_logging()
    # The supervisor logs start and stop.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    reporter = Reporter(options.report_fd)
    settings = Settings.from_json(sys.stdin.readline())
    administration = Administration.from_json(sys.stdin.readline())
    process_setup.set_log_level(settings.log_level)
    try:
        sources = [ModelSource(name=name, folder=Path(folder)) for name, folder in options.model]
        served = [served_model(source) for source in sources]
        if administration.local:
            served = with_remembered(served, settings.folder)
    except ModelNotFound as error:
        reporter.failed(str(error))
        sys.exit(1)
    listening = socket.socket(fileno=options.fd)
    serving = serve(
        settings,
        served,
        listening=listening,
        lifeline=options.lifeline_fd,
        reporter=reporter,
        last_status=options.last_status,
        administration=administration,
        web=options.web,
    )
    if not asyncio.run(serving):
        sys.exit(1)
