"""
The local executor: one child process per engine.

`LocalExecutor` implements `Executor`. Each `_Engine` starts its child, sends it orders over a Unix
socket, dispatches its reports, and restarts it with backoff after a crash.
"""

import asyncio
import functools
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from tinkex.server.executor import (
    COUNTERS,
    BatchFailed,
    EngineKilled,
    EngineLost,
    EngineRefused,
    ModelNotLoaded,
    OnTokens,
    ServedModel,
    WorkFailed,
)
from tinkex.server.process_end import ProcessEnd, oom_kills
from tinkex.server.retry import Backoff, Crashed, PeriodicTask, retry
from tinkex.wire import engine_protocol
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.proto import frames_pb2
from tinkex.wire.proto.frames_pb2 import Done, Order, Tokens

log = logging.getLogger("tinkex.server.engine_process")

# Read buffer of an engine's socket. With asyncio's default of 64 KiB, a result of a megabyte takes
# sixteen reads, and the engine blocks on each.
READ_BUFFER_BYTES = 16 * 2**20
# How long a closed engine may take to exit before it is killed.
EXIT_TIMEOUT_S = 5.0
# An engine with pending work that sends nothing for this long is reported as unresponsive. It is
# not killed, because it may be running a long forward or backward pass.
UNRESPONSIVE_S = 60.0
# Loading a large model takes minutes, and the reason for a crash at start-up rarely goes away.
RESTART_BACKOFF = Backoff(first_s=0.5, max_s=30.0, immediate=True)
# An engine that lived longer, or finished any work, has shown that it can start and work.
STABLE_S = 60.0


class LocalExecutor:
    """
    One process for each engine, started on first use.

    If there are several base models, an engine is unloaded when it was idle for `idle_s`.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        engines: Iterable[EngineSettings],
        *,
        idle_s: float = 0.0,
        on_demand: bool = False,
        loaded_before: Collection[str] = (),
    ) -> None:
        """
        `on_demand`: load even a single model on first use only.

        `loaded_before` are names of models that an earlier server loaded: if one cannot be loaded
        now, its requests wait.
        """
        self.served = tuple(served)
        self._on_demand = on_demand
        self._idle_s = idle_s
        #: Called with the name of a model whenever its engine is up.
        self.on_loaded: Callable[[str], None] = lambda name: None
        self._incarnations = itertools.count(1)
        self._engines = {
            settings.engine_name: self._new_engine(
                settings, loaded_before=settings.name in loaded_before
            )
            for settings in engines
        }
        #: The other engines of the same base model, for those that have any.
        self._replicas = {
            engine: tuple(other for other in model.engines if other != engine)
            for model in served
            if model.replicas > 1
            for engine in model.engines
        }
        self._unloading = PeriodicTask()

    async def start(self) -> None:
        # A single model is loaded now, so that a server that is ready can start work immediately.
        # Several models are loaded on first use: they would compete for memory.
        if len(self.served) == 1 and not self._on_demand:
            await asyncio.gather(*(engine.ready() for engine in self._engines.values()))
        if self._idle_s > 0:
            self._unloading.start(
                self._unload_idle, self._idle_s / 4, what="unloading idle engines", log=log
            )

    @property
    def unloads_after_s(self) -> float:
        """
        Idle time after which an engine is unloaded; 0 is never.

        The engines of a single model stay loaded: no other needs their memory.
        """
        return self._idle_s if len(self.served) > 1 else 0.0

    async def _unload_idle(self) -> None:
        if self.unloads_after_s > 0:
            for engine in self._engines.values():
                engine.unload_if_idle(self.unloads_after_s)

    def add(self, model: ServedModel, settings: EngineSettings) -> None:
        """Serve one more model. Its engine starts on first use."""
        self._engines[settings.engine_name] = self._new_engine(settings)
        self.served = (*self.served, model)

    def _new_engine(self, settings: EngineSettings, *, loaded_before: bool = False) -> "_Engine":
        return _Engine(
            settings,
            self._incarnations,
            loaded_before=loaded_before,
            on_loaded=lambda name: self.on_loaded(name),
        )

    async def load(self, base_model: str) -> None:
        """Load a model now. EngineRefused if that fails, even if it may succeed later."""
        await self._engine(base_model).load()

    async def remove(self, base_model: str) -> None:
        """Stop serving a model that was added. Later calls have no effect."""
        self.served = tuple(model for model in self.served if model.name != base_model)
        if (engine := self._engines.pop(base_model, None)) is not None:
            await engine.close()

    async def close(self) -> None:
        await self._unloading.close()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def ready(self, engine: str, /) -> int:
        return await self._wanted(engine).ready()

    async def send(
        self,
        engine: str,
        order: Order,
        /,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        found = self._wanted(engine)
        current = await found.ready()
        if incarnation is not None and incarnation != current:
            raise EngineKilled(f"the engine of {engine} was restarted")
        return await found.send(order, on_tokens)

    def waiting_for(self, engine: str, /) -> str | None:
        found = self._engines.get(engine)
        return None if found is None else found.waiting_for

    def stats(self, engine: str, /) -> frames_pb2.Stats | None:
        found = self._engines.get(engine)
        return None if found is None else found.stats

    def facts(self, engine: str) -> frames_pb2.Ready | None:
        """What the engine reported when it was ready; None if it was not started yet."""
        return self._engine(engine).facts

    def _wanted(self, engine: str) -> "_Engine":
        """An engine that is used now. Its replicas are started with it, and stay as long."""
        found = self._engine(engine)
        for replica in self._replicas.get(engine, ()):
            self._engines[replica].want()
        return found

    def _engine(self, engine: str) -> "_Engine":
        found = self._engines.get(engine)
        if found is None:
            raise EngineRefused(
                f"this server no longer serves {engine}. Restart it with this model to continue."
            )
        return found

    def process_id(self, engine: str) -> int | None:
        """The process id of the child while it is up."""
        return self._engines[engine].process_id


class _Engine:
    """One child process and its restarts."""

    def __init__(
        self,
        settings: EngineSettings,
        incarnations: Iterator[int],
        *,
        loaded_before: bool,
        on_loaded: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._name = settings.engine_name
        self._incarnations = incarnations
        self._loaded_before = loaded_before
        self._on_loaded = on_loaded
        #: Why the last child could not load the model, if that may be temporary.
        self._load_problem: str | None = None
        #: They get the reason when a child ends before it was up.
        self._load_waiters: set[asyncio.Future[str]] = set()
        self._incarnation = 0
        #: How the last child ended; None if it could not be started.
        self._end: ProcessEnd | None = None
        self._tickets = itertools.count(1)
        #: The futures of unfinished orders. The key is the order's ticket: the id that connects an
        #: order and its reports in the engine protocol.
        self._pending: dict[int, asyncio.Future[Done]] = {}
        self._token_callbacks: dict[int, OnTokens] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._up = asyncio.Event()
        #: Runs `_keep_running` while the engine is wanted.
        self._runner: asyncio.Task[None] | None = None
        #: The runner of a child that is being unloaded, until that child has exited.
        self._old_runner: asyncio.Task[None] | None = None
        self._last_used_s = 0.0
        #: When the child last sent a report, or received work after it was idle.
        self._last_report_s = 0.0
        self._logged_unresponsive = False
        self._refused: EngineRefused | None = None
        self._closing = False
        #: Whether the current or last child has finished any work.
        self._finished_work = False
        #: The last statistics of the child; None while it is down.
        self.stats: frames_pb2.Stats | None = None
        #: What the current child has counted, and what all earlier ones had.
        self._counted: dict[str, int] = {}
        self._counted_before = dict.fromkeys(COUNTERS, 0)
        #: What the last child reported when it was ready; None before the first one.
        self.facts: frames_pb2.Ready | None = None

    @property
    def waiting_for(self) -> str | None:
        if self._closing:
            return None
        if self._refused is not None:
            return f"the engine of {self._name} cannot run: {self._refused.text}"
        if self._runner is None:
            return None  # nobody waits for it: the next request starts it
        if not self._up.is_set():
            if self._load_problem is not None:
                return f"{self._load_problem} It is tried again"
            return f"the engine of {self._name} is starting"
        silent_s = asyncio.get_running_loop().time() - self._last_report_s
        if not self._pending or silent_s < UNRESPONSIVE_S:
            return None
        if not self._logged_unresponsive:
            self._logged_unresponsive = True
            log.warning(
                "the engine of %s (process %s) has pending work and has not responded for %.0f s",
                self._name,
                self.process_id,
                silent_s,
            )
        return (
            f"the engine of {self._name} has not responded for {silent_s:.0f} s: it runs a "
            "long computation, or is stuck"
        )

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def ready(self) -> int:
        """Start the child if needed, wait until it is up, and return its incarnation."""
        self._raise_refusal()
        self.want()
        if not self._up.is_set():
            await self._up.wait()
        self._raise_refusal()
        if self._closing:
            raise EngineKilled("the server is stopping")
        return self._incarnation

    def want(self) -> None:
        """Start the child if needed; it is not idle."""
        self._last_used_s = asyncio.get_running_loop().time()
        if self._runner is None and not self._closing:
            self._runner = asyncio.create_task(self._keep_running(after=self._old_runner))

    def _raise_refusal(self) -> None:
        """A new exception for each caller: the traceback of a shared one would grow with each."""
        if self._refused is not None:
            raise EngineRefused(str(self._refused), hint=self._refused.hint)

    async def load(self) -> None:
        """Wait until the child is up. EngineRefused if a child ends before that."""
        failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._load_waiters.add(failed)
        up = asyncio.create_task(self.ready())
        try:
            either: set[asyncio.Future[Any]] = {up, failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                raise EngineRefused(failed.result())
            await up
        finally:
            up.cancel()
            self._load_waiters.discard(failed)

    async def send(self, order: Order, on_tokens: OnTokens | None) -> asyncio.Future[Done]:
        if self._writer is None:
            raise EngineKilled(f"the engine of {self._name} was lost")
        ticket = order.ticket = next(self._tickets)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if not self._pending:
            self._last_report_s = asyncio.get_running_loop().time()
        self._pending[ticket] = future
        if on_tokens is not None:
            self._token_callbacks[ticket] = on_tokens
        is_sample = order.HasField("sample")
        future.add_done_callback(functools.partial(self._finish, ticket, is_sample))
        self._writer.write(engine_protocol.frame(order))
        try:
            await self._writer.drain()
        except ConnectionError:
            pass  # the future fails as soon as it is known how the engine ended
        except asyncio.CancelledError:
            future.cancel()
            raise
        return future

    def _finish(self, ticket: int, is_sample: bool, future: asyncio.Future[Done]) -> None:
        """Forget an order that has finished or was cancelled."""
        self._pending.pop(ticket, None)
        self._token_callbacks.pop(ticket, None)
        self._last_used_s = future.get_loop().time()
        if future.cancelled():
            # Only a sample is cancelled in the engine. Other work always runs to its end.
            if is_sample and self._writer is not None and not self._closing:
                cancel = frames_pb2.Cancel(sample_ticket=ticket)
                self._writer.write(engine_protocol.frame(Order(cancel=cancel)))
        else:
            # Mark the exception as retrieved, in case the caller no longer awaits it.
            future.exception()

    def unload_if_idle(self, idle_s: float) -> None:
        """Stop a child that was idle for this long; the next request starts a new one."""
        idle = self._up.is_set() and not self._pending and not self._closing
        if self._runner is None or not idle:
            return
        if asyncio.get_running_loop().time() - self._last_used_s < idle_s:
            return
        log.info("the engine of %s was idle for %.0f s and is unloaded", self._name, idle_s)
        self._old_runner, self._runner = self._runner, None
        # From now on, `ready` waits for the next child.
        self._up.clear()
        self._old_runner.cancel()

    async def close(self) -> None:
        """Close the socket; the child exits on its own, or is killed after `EXIT_TIMEOUT_S`."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        for runner in (self._runner, self._old_runner):
            if runner is not None:
                runner.cancel()
                await asyncio.gather(runner, return_exceptions=True)
        self._up.set()

    async def _keep_running(self, *, after: asyncio.Task[None] | None) -> None:
        """Restart the child with backoff whenever it crashes or cannot be started."""
        if after is not None:
            # Two children would not fit in memory, and would share one spill folder.
            await asyncio.wait({after})
        try:
            await retry(
                self._run_until_crash,
                RESTART_BACKOFF,
                should_retry=lambda error: isinstance(error, Crashed) and not self._closing,
                on_retry=lambda error, wait_s: log.error(
                    "%s; restarting it in %.1f s", error, wait_s
                ),
            )
        except EngineRefused as refused:
            self._refused = refused
            self._up.set()

    async def _run_until_crash(self) -> None:
        """Run one child until it exits, then raise Crashed."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._finished_work = False
        try:
            await self._run_once()
        except EngineRefused as refused:
            # A model that was loaded once has valid settings; a later failure may be temporary.
            if not self._incarnation and not self._loaded_before:
                raise
            self._load_problem = f"the engine of {self._name} cannot be loaded now: {refused.text}"
            log.error("%s", self._load_problem)
        except Exception:
            # No process or file descriptor is left, or the child sent nonsense.
            log.exception("the engine of %s could not be started or read", self._name)
        stable = self._finished_work or loop.time() - began_s > STABLE_S
        what = "was not started" if self._end is None else f"died{self._end_text}"
        for waiter in self._load_waiters:
            if not waiter.done():
                waiter.set_result(self._load_problem or f"its engine {what} while it was loaded.")
        raise Crashed(f"the engine of {self._name} {what}", stable=stable)

    async def _run_once(self) -> None:
        """Start one child and read its reports until it exits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = None
        kills = oom_kills()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *_command(theirs.fileno(), self._settings),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    # Standard output is reserved for the "ready" line.
                    stdout=sys.stderr.fileno(),
                    env=_environment(self._settings.threads),
                    # Ctrl-C stops the server, which then stops its engines.
                    process_group=0,
                )
            self._process = process
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=READ_BUFFER_BYTES)
            await self._read_reports(reader, writer)
        finally:
            self._up.clear()
            self.stats = None
            for name, count in self._counted.items():
                self._counted_before[name] += count
            self._counted = {}
            self._writer = None
            self._process = None
            ours.close()
            self._end = None
            try:
                if process is not None:
                    status = await _wait_for_exit(process)
                    self._end = ProcessEnd(status, oom_kills() - kills)
            finally:
                self._fail_pending()

    async def _read_reports(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while True:
                try:
                    head = await reader.readexactly(engine_protocol.LENGTH_PREFIX.size)
                    body = await reader.readexactly(engine_protocol.body_length(head))
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                self._handle(engine_protocol.Report.FromString(body), writer)
        finally:
            writer.close()

    def _handle(self, report: engine_protocol.Report, writer: asyncio.StreamWriter) -> None:
        self._last_report_s = asyncio.get_running_loop().time()
        if self._logged_unresponsive:
            self._logged_unresponsive = False
            log.warning("the engine of %s responds again", self._name)
        match report.WhichOneof("body"):
            case "ready":
                self._incarnation = next(self._incarnations)
                self._writer = writer
                self.facts = report.ready
                self._load_problem = None
                self._up.set()
                self._on_loaded(self._settings.name)
                log.info(
                    "the engine of %s is ready: %s, %s, context of %s tokens",
                    self._name,
                    self.facts.device,
                    self.facts.dtype,
                    f"{self.facts.max_context_length:,}",
                )
            case "stats":
                self._count(report.stats)
            case "refused":
                raise EngineRefused(report.refused.message, hint=report.refused.hint)
            case "done":
                self._finished_work = True
                if (future := self._unfinished(report.ticket)) is not None:
                    future.set_result(report.done)
            case "grown":
                self._pass_on_tokens(report.ticket, report.grown.sequences)
            case "failed":
                if (future := self._unfinished(report.ticket)) is not None:
                    future.set_exception(_failure(report.failed))

    def _count(self, stats: frames_pb2.Stats) -> None:
        """Store the statistics, with the counts of earlier children added."""
        self._counted = {name: getattr(stats, name) for name in COUNTERS}
        for name, earlier in self._counted_before.items():
            setattr(stats, name, getattr(stats, name) + earlier)
        self.stats = stats

    def _pass_on_tokens(self, ticket: int, sequences: Iterable[Tokens]) -> None:
        if (on_tokens := self._token_callbacks.get(ticket)) is None:
            return
        try:
            for tokens in sequences:
                on_tokens(tokens)
        except Exception:
            # The tokens are only a preview; the result has all of them.
            log.exception("the tokens of a running sample could not be passed on")
            del self._token_callbacks[ticket]

    def _unfinished(self, ticket: int) -> asyncio.Future[Done] | None:
        """The future of an order, if the order is neither finished nor cancelled."""
        future = self._pending.get(ticket)
        return None if future is None or future.done() else future

    @property
    def _end_text(self) -> str:
        return "" if self._end is None else f" ({self._end})"

    def _fail_pending(self) -> None:
        text = f"the engine of {self._name} was lost{self._end_text}"
        by_itself = self._end is not None and self._end.by_itself and not self._closing
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineLost(text) if by_itself else EngineKilled(text))


def _failure(failed: frames_pb2.Failed) -> Exception:
    if failed.category == engine_protocol.SHARED_FAILURE:
        return BatchFailed(failed.message)
    if failed.category == engine_protocol.MODEL_MISSING:
        return ModelNotLoaded(failed.message)
    return WorkFailed(failed.category, failed.message)


async def _wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Wait until the child has exited, and return its status; kill it if cancelled or too slow."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)
    except TimeoutError:
        if process.returncode is not None:
            return process.returncode
        log.warning("engine process %d closed its connection and did not exit", process.pid)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    # Not the status of SIGKILL: it ended its work by itself.
    return 1


def _command(descriptor: int, settings: EngineSettings) -> list[str]:
    """The command line of the child."""
    arguments = ["--fd", str(descriptor), "--settings", settings.to_json()]
    return [sys.executable, "-m", "tinkex.engine", *arguments]


def _environment(threads: int | None) -> dict[str, str]:
    # Threads that spin while they wait would take CPU time from the web process and the client.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    return {**os.environ, **variables}
