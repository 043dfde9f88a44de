"""The local executor: one child process for each base model."""

import asyncio
import functools
import hashlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from tinkex.server.executor import (
    BatchFailed,
    EngineLost,
    EngineOptions,
    EngineRefused,
    ModelNotLoaded,
    Outcome,
    ServedModel,
    Task,
    Work,
    WorkFailed,
)
from tinkex.server.processes import ENGINE, engine_was_stable
from tinkex.server.scheduler.crash_isolation import Engine as Life
from tinkex.server.scheduler.crash_isolation import Roll
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2

log = logging.getLogger("tinkex.server.engine_process")

# What an engine has sent and was not read yet. With asyncio's 64 KiB, a result of a megabyte is
# read in sixteen pieces, and the engine waits for each.
UNREAD_BYTES = 16 * 2**20

# How long a closed engine may take to leave by itself.
LEAVE_S = 5.0
# An engine that has work and says nothing for so long is said to be silent. It is not ended: a long
# pass looks the same from here.
SILENT_S = 60.0


class LocalExecutor:
    """One engine process for each base model, started when first asked for."""

    def __init__(
        self,
        served: Sequence[ServedModel],
        options: EngineOptions,
        *,
        rolls: Mapping[str, Roll] | None = None,
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

    def __init__(self, model: ServedModel, options: EngineOptions, roll: Roll | None) -> None:
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
            well = engine_was_stable(answered=self._answered, lived_s=lived_s)
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
            self._roll.engine(life)

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
        return BatchFailed(failed.message)
    if failed.category == engine_protocol.MISSING:
        return ModelNotLoaded(failed.message)
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
