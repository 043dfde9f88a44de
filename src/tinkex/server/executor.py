"""
The seam behind which computing happens, and its local form: one child process for each base model.

An engine is asked with `Work` and answers with bytes. It may die at any moment: then everything
that was with it raises `EngineLost`, a new engine with an empty memory comes up, and its number
(the incarnation) is another. Whoever asked knows what has to be asked again.
"""

import asyncio
import enum
import functools
import hashlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tinkex.server.processes import ENGINE, engine_was_well
from tinkex.server.scheduler.crash_isolation import EngineState as Life
from tinkex.server.scheduler.crash_isolation import InFlightFile
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2

log = logging.getLogger("tinkex.server.executor")

# What an engine has sent and was not read yet. With asyncio's 64 KiB, a result of a megabyte is
# read in sixteen pieces, and the engine waits for each.
UNREAD_BYTES = 16 * 2**20

# How long a closed engine may take to leave by itself.
LEAVE_S = 5.0
# An engine that has work and says nothing for so long is said to be silent. It is not ended: a long
# pass looks the same from here.
SILENT_S = 60.0


class Task(enum.Enum):
    """What an engine can be asked for."""

    CREATE = enum.auto()  # a new adapter
    PASS = enum.auto()  # forward, or forward and backward
    OPTIM_STEP = enum.auto()
    SAVE = enum.auto()
    LOAD = enum.auto()
    SNAPSHOT = enum.auto()  # everything a model is
    RESTORE = enum.auto()  # and back to it, after CREATE
    CLEAR_GRADIENTS = enum.auto()
    DROP = enum.auto()  # forget an adapter
    SAMPLE = enum.auto()
    REGISTER_LOSS = enum.auto()  # a loss that a user wrote
    FORGET_LOSSES = enum.auto()  # those of a session


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One thing for an engine to do."""

    task: Task
    model_id: str = ""
    #: The request in its normal form.
    payload: bytes = b""
    #: The same as a local file, when it is large.
    payload_file: Path | None = None
    #: CREATE only: JSON.
    lora_config: bytes = b""
    optimizer_config: bytes = b""
    #: PASS only.
    backward: bool = False
    #: PASS, REGISTER_LOSS, FORGET_LOSSES: a loss is for the models of its session.
    session_id: str = ""
    #: REGISTER_LOSS only.
    loss_id: str = ""
    #: SAVE, LOAD, SNAPSHOT, RESTORE: the files. SAMPLE: the adapter, None is the base model.
    folder: str | None = None
    #: SAVE, LOAD: with the optimizer's state.
    optimizer: bool = False
    #: SAMPLE: who asked; owners share an engine evenly.
    owner: str = ""
    #: SAMPLE: called with tokens as they are drawn; an engine that starts over begins at 0 again.
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it."""

    result: bytes
    #: Seconds the engine itself computed.
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A base model this server answers for."""

    name: str
    folder: Path
    arch: str = ""
    max_context_length: int | None = None


class WorkFailed(Exception):
    """The engine is well, and the work could not be done."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category
        self.message = message


class EngineLost(Exception):
    """The engine died, or is not the one that was meant."""


class WorkMuddled(EngineLost):
    """
    Work failed beside other work, and nobody knows whose fault it is.

    The engine lives; what it holds of the model is not to be used any more.
    """


class ModelMissing(EngineLost):
    """The engine lives and does not have this model; built again, it does."""


class EngineRefused(Exception):
    """The engine cannot run with these settings; starting it again would not help."""


class Executor(Protocol):
    """Runs work on base models. Its methods may be called any number of times at once."""

    @property
    def served(self) -> Sequence[ServedModel]: ...

    async def start(self) -> None:
        """Ready to take work when this returns."""

    async def close(self) -> None: ...

    async def ready(self, base_model: str) -> int:
        """Wait until an engine for this model is up; its incarnation."""

    async def send(
        self, base_model: str, work: Work, *, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        """
        Hand work to that incarnation (None: any); its outcome, or WorkFailed or EngineLost.

        The engine has the work when this returns, before anything that is sent later. A sample
        whose outcome is cancelled is given up by the engine too; all other work goes on.
        """

    def waiting_for(self, base_model: str) -> str | None:
        """Why work waits although its turn has come; None when nothing is in the way."""

    def stats(self, base_model: str) -> frames_pb2.Stats | None:
        """Sizes and counts of this model's engine as last told; None when it is not up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How local engines are started."""

    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    deterministic: bool = False
    #: Limits; 0 lets the engine measure or choose.
    memory_bytes: int = 0
    adapter_bytes: int = 0
    kv_tokens: int = 0
    max_batch_tokens: int = 0
    max_sequences: int = 0
    host_bytes: int = 0
    prefix_cache: bool = True
    idle_adapters: int = 16
    #: Where engines put what fits no memory, each in a folder of its own. None is a temporary one.
    spill_folder: Path | None = None
    #: Engines that share this file compute one at a time. None when there is only one.
    turn_file: Path | None = None
    #: Of several engines, one that nobody asked for so long leaves the memory; 0 is never.
    idle_s: float = 0.0


class LocalExecutor:
    """One engine process for each base model, started when first asked for."""

    def __init__(
        self,
        served: Sequence[ServedModel],
        options: EngineOptions,
        *,
        rolls: Mapping[str, InFlightFile] | None = None,
    ) -> None:
        self.served = tuple(served)
        self._engines = {
            model.name: _Engine(model, options, (rolls or {}).get(model.name)) for model in served
        }
        #: Idle engines leave the memory after this; 0 is never. A single one has nobody to make room for.
        self.unloads_after_s = options.idle_s if len(self._engines) > 1 else 0.0
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        # A single model is loaded at once: "ready" then means that work starts without a wait.
        # Several would compete for the memory before anybody asked.
        if len(self._engines) == 1:
            await next(iter(self._engines.values())).ready()
        if self.unloads_after_s > 0:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """The memory of a model that nobody uses is for the others."""
        while True:
            await asyncio.sleep(self.unloads_after_s / 4)
            for engine in self._engines.values():
                engine.rest_if_idle(self.unloads_after_s)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def ready(self, base_model: str) -> int:
        return await self._engine(base_model).ready()

    async def send(
        self, base_model: str, work: Work, *, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        engine = self._engine(base_model)
        current = await engine.ready()
        if incarnation is not None and incarnation != current:
            raise EngineLost(f"the engine of {base_model} was started again")
        return await engine.send(work)

    def waiting_for(self, base_model: str) -> str | None:
        engine = self._engines.get(base_model)
        return None if engine is None else engine.waiting_for

    def stats(self, base_model: str) -> frames_pb2.Stats | None:
        engine = self._engines.get(base_model)
        return None if engine is None else engine.stats

    def _engine(self, base_model: str) -> "_Engine":
        engine = self._engines.get(base_model)
        if engine is None:
            raise EngineRefused(
                f"{base_model} is not served any more. Start the server with it to go on."
            )
        return engine

    def process_id(self, base_model: str) -> int | None:
        """The child's id while it is up."""
        return self._engines[base_model].process_id


class _Engine:
    """One child process: started, asked, missed, started again."""

    def __init__(
        self, model: ServedModel, options: EngineOptions, roll: InFlightFile | None
    ) -> None:
        self._model = model
        self._options = options
        #: Tells the next web process how this engine ended, if we cannot.
        self._roll = roll
        self._incarnation = 0
        #: The last one, in words.
        self._ended_how = ""
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._listening: dict[int, Callable[[frames_pb2.Tokens], None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        #: The keeper of a child that was sent away, until that is gone.
        self._leaving: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        #: When the child last said something, or got work after it had none.
        self._heard_s = 0.0
        self._told_silent = False
        self._refused: EngineRefused | None = None
        self._closing = False
        #: Whether the child that is up, or was last, has finished any work.
        self._answered = False
        #: What the engine said last of its sizes; None while there is none.
        self.stats: frames_pb2.Stats | None = None

    @property
    def waiting_for(self) -> str | None:
        if self._closing:
            return None
        if not self._up.is_set():
            return f"the engine of {self._model.name} is starting"
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        if not self._waiting or silent_s < SILENT_S:
            return None
        if not self._told_silent:
            self._told_silent = True
            log.warning(
                "the engine of %s (process %s) has work and has not answered for %.0f s",
                self._model.name,
                self.process_id,
                silent_s,
            )
        return (
            f"the engine of {self._model.name} has not answered for {silent_s:.0f} s: it computes "
            "something long, or is stuck"
        )

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def ready(self) -> int:
        if self._refused is not None:
            raise self._refused
        self._asked_s = asyncio.get_running_loop().time()
        if self._keeper is None and not self._closing:
            self._keeper = asyncio.create_task(self._keep(after=self._leaving))
        if not self._up.is_set():
            await self._up.wait()
        if self._refused is not None:
            raise self._refused
        if self._closing:
            raise EngineLost("the server is stopping")
        return self._incarnation

    async def send(self, work: Work) -> asyncio.Future[Outcome]:
        if self._writer is None:
            raise EngineLost(f"the engine of {self._model.name} was lost")
        ticket = next(self._tickets)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._heard_s = asyncio.get_running_loop().time()
        self._waiting[ticket] = answer
        if work.on_tokens is not None:
            self._listening[ticket] = work.on_tokens
        answer.add_done_callback(functools.partial(self._over, work, ticket))
        self._writer.write(engine_protocol.frame(_order(ticket, work)))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            answer.cancel()
            raise EngineLost(f"the engine of {self._model.name} was lost") from error
        except asyncio.CancelledError:
            answer.cancel()
            raise
        return answer

    def _over(self, work: Work, ticket: int, answer: asyncio.Future[Outcome]) -> None:
        """An order was answered, or nobody waits for it any more."""
        self._waiting.pop(ticket, None)
        self._listening.pop(ticket, None)
        self._asked_s = answer.get_loop().time()
        if answer.cancelled():
            self._give_up(work, ticket)
        else:
            answer.exception()  # seen, even if nobody waits

    def rest_if_idle(self, idle_s: float) -> None:
        """Send a child away that has had nothing to do for so long; the next request starts one."""
        idle = self._up.is_set() and not self._waiting and not self._closing
        if self._keeper is None or not idle:
            return
        if asyncio.get_running_loop().time() - self._asked_s < idle_s:
            return
        log.info("the engine of %s was idle for %.0f s and is unloaded", self._model.name, idle_s)
        self._leaving, self._keeper = self._keeper, None
        # Who asks from now on waits for the next child.
        self._up.clear()
        self._leaving.cancel()

    def _give_up(self, work: Work, ticket: int) -> None:
        """Nobody waits for a sample any more; other work is never stopped half-way."""
        if work.task is Task.SAMPLE and self._writer is not None and not self._closing:
            cancel = frames_pb2.Cancel(sample_ticket=ticket)
            self._writer.write(engine_protocol.frame(engine_protocol.Order(cancel=cancel)))

    async def close(self) -> None:
        """Hang up; the child leaves by itself, or is made to."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        for keeper in (self._keeper, self._leaving):
            if keeper is not None:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
        self._up.set()

    async def _keep(self, *, after: asyncio.Task[None] | None) -> None:
        """Start the child again whenever it dies, a little later each time."""
        if after is not None:
            # Two children would not fit the memory, nor the folder they spill to.
            await asyncio.wait({after})
        loop = asyncio.get_running_loop()
        wait_s: float | None = None
        while True:
            began_s = loop.time()
            self._answered = False
            try:
                await self._live_once()
            except EngineRefused as refused:
                # Once up, settings are known to be good: what fails later may pass.
                if not self._incarnation:
                    self._refused = refused
                    self._up.set()
                    return
            lived_s = loop.time() - began_s
            well = engine_was_well(answered=self._answered, lived_s=lived_s)
            wait_s = ENGINE.wait_s(wait_s, well=well)
            log.error(
                "the engine of %s died%s; starting it again in %.1f s",
                self._model.name,
                self._ended_how,
                wait_s,
            )
            await asyncio.sleep(wait_s)

    async def _live_once(self) -> None:
        """From start to death of one child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = None
        passed = [theirs.fileno()]
        command = _command(theirs.fileno(), self._model, self._options)
        if self._roll is not None:
            passed.append(self._roll.descriptor)
            command += ["--roll-fd", str(self._roll.descriptor)]
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=passed,
                    stdin=asyncio.subprocess.DEVNULL,
                    # Standard output belongs to the line that says "ready".
                    stdout=sys.stderr.fileno(),
                    env=_environment(self._options),
                )
            self._process = process
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=UNREAD_BYTES)
            await self._listen(reader, writer)
        finally:
            self._up.clear()
            self.stats = None
            self._writer = None
            self._process = None
            ours.close()
            how = "" if process is None else await _ended(process)
            self._ended_how = how
            self._note(Life.NONE)
            self._lose_everything(how)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                try:
                    head = await reader.readexactly(engine_protocol.LENGTH.size)
                    body = await reader.readexactly(engine_protocol.body_length(head))
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                self._hear(engine_protocol.Report.FromString(body), writer)
        finally:
            writer.close()

    def _hear(self, report: engine_protocol.Report, writer: asyncio.StreamWriter) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        if self._told_silent:
            self._told_silent = False
            log.warning("the engine of %s has answered", self._model.name)
        match report.WhichOneof("body"):
            case "ready":
                self._incarnation += 1
                self._note(Life.UP)
                self._writer = writer
                self._up.set()
                facts = report.ready
                log.info(
                    "the engine of %s is up: %s, %s, context %d",
                    self._model.name,
                    facts.device,
                    facts.dtype,
                    facts.max_context_length,
                )
            case "stats":
                self.stats = report.stats
            case "refused":
                raise EngineRefused(report.refused.message)
            case "done":
                self._answered = True
                outcome = Outcome(result=report.done.result, compute_s=report.done.compute_s)
                self._answer(report.ticket, lambda waiter: waiter.set_result(outcome))
            case "grown":
                if (listener := self._listening.get(report.ticket)) is not None:
                    for tokens in report.grown.sequences:
                        listener(tokens)
            case "failed":
                failure = _failure(report.failed)
                self._answer(report.ticket, lambda waiter: waiter.set_exception(failure))

    def _note(self, life: Life) -> None:
        if self._roll is not None:
            self._roll.set_engine_state(life)

    def _answer(self, ticket: int, act: Callable[[asyncio.Future[Outcome]], None]) -> None:
        waiter = self._waiting.get(ticket)
        if waiter is not None and not waiter.done():
            act(waiter)

    def _lose_everything(self, how: str) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                text = f"the engine of {self._model.name} was lost{how}"
                waiter.set_exception(EngineLost(text))


def _failure(failed: frames_pb2.Failed) -> Exception:
    if failed.category == engine_protocol.MUDDLED:
        return WorkMuddled(failed.message)
    if failed.category == engine_protocol.MISSING:
        return ModelMissing(failed.message)
    return WorkFailed(failed.category, failed.message)


async def _ended(process: asyncio.subprocess.Process) -> str:
    """The child has left, or is made to; never left behind. How it ended, in words."""
    try:
        await asyncio.wait_for(process.wait(), LEAVE_S)
    except (TimeoutError, asyncio.CancelledError):
        if process.returncode is None:
            process.kill()
        await process.wait()
    status = process.returncode or 0
    if status == -signal.SIGKILL:
        return " (SIGKILL: somebody ended it, or the system for want of memory; its log says which)"
    if status == engine_protocol.GAVE_OUT:
        return " (it gave its device up, which is broken or out of memory; its log says which)"
    if status < 0:
        return f" ({signal.Signals(-status).name})"
    return f" (exit status {status})"


def _command(descriptor: int, model: ServedModel, options: EngineOptions) -> list[str]:
    command = [
        *(sys.executable, "-m", "tinkex.engine.process"),
        *("--fd", str(descriptor)),
        *("--name", model.name),
        *("--folder", str(model.folder)),
        *("--device", options.device),
        *("--dtype", options.dtype),
        *("--idle-adapters", str(options.idle_adapters)),
        "--prefix-cache" if options.prefix_cache else "--no-prefix-cache",
    ]
    for name, limit in (
        ("--threads", options.threads),
        ("--memory-bytes", options.memory_bytes),
        ("--adapter-bytes", options.adapter_bytes),
        ("--kv-tokens", options.kv_tokens),
        ("--max-batch-tokens", options.max_batch_tokens),
        ("--max-sequences", options.max_sequences),
        ("--host-bytes", options.host_bytes),
    ):
        if limit:
            command += [name, str(limit)]
    if options.spill_folder is not None:
        own = hashlib.sha256(model.name.encode()).hexdigest()[:16]
        command += ["--spill-folder", str(options.spill_folder / own)]
    if options.deterministic:
        command.append("--deterministic")
    if options.turn_file is not None:
        command += ["--turn-file", str(options.turn_file)]
    return command


def _environment(options: EngineOptions) -> dict[str, str]:
    # Threads that spin while they wait would take the core from the web process and the client.
    waits = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if options.threads:
        waits["OMP_NUM_THREADS"] = str(options.threads)
    return {**os.environ, **waits}


def _order(ticket: int, work: Work) -> engine_protocol.Order:
    payload = frames_pb2.Payload(inline=work.payload)
    if work.payload_file is not None:
        payload = frames_pb2.Payload(file=str(work.payload_file))
    folder = work.folder or ""
    model_id = work.model_id
    order = engine_protocol.Order(ticket=ticket)
    match work.task:
        case Task.CREATE:
            order.create.model_id = model_id
            order.create.lora_config = work.lora_config
            order.create.optimizer_config = work.optimizer_config
        case Task.PASS:
            order.run_pass.CopyFrom(
                frames_pb2.Pass(
                    model_id=model_id,
                    payload=payload,
                    backward=work.backward,
                    session_id=work.session_id,
                )
            )
        case Task.OPTIM_STEP:
            order.optim_step.CopyFrom(frames_pb2.OptimStep(model_id=model_id, payload=payload))
        case Task.SAVE:
            order.save.CopyFrom(
                frames_pb2.Save(model_id=model_id, folder=folder, optimizer=work.optimizer)
            )
        case Task.LOAD:
            order.load.CopyFrom(
                frames_pb2.Load(model_id=model_id, folder=folder, optimizer=work.optimizer)
            )
        case Task.SNAPSHOT:
            order.snapshot.CopyFrom(frames_pb2.Snapshot(model_id=model_id, folder=folder))
        case Task.RESTORE:
            order.restore.CopyFrom(frames_pb2.Restore(model_id=model_id, folder=folder))
        case Task.CLEAR_GRADIENTS:
            order.clear_gradients.model_id = model_id
        case Task.DROP:
            order.drop.model_id = model_id
        case Task.REGISTER_LOSS:
            order.register_loss.CopyFrom(
                frames_pb2.RegisterLoss(
                    loss_id=work.loss_id, session_id=work.session_id, payload=payload
                )
            )
        case Task.FORGET_LOSSES:
            order.forget_losses.session_id = work.session_id
        case Task.SAMPLE:
            order.sample.CopyFrom(
                frames_pb2.Sample(
                    payload=payload,
                    adapter_folder=folder,
                    owner=work.owner,
                    streams=work.on_tokens is not None,
                )
            )
    return order
