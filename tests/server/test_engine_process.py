"""Local engine processes: options, socket, idle unloading, and unresponsive engines."""

import asyncio
import dataclasses
import errno
import itertools
import logging
import os
import signal
import socket
import sys
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import pytest

from server.hosting import Api, hosted, local_executor
from serving import TINY
from tinkex.engine.process import parser
from tinkex.server import engine_process, web_process
from tinkex.server.engine_process import LocalExecutor, _command
from tinkex.server.executor import EngineKilled, EngineLost, EngineRefused, ServedModel
from tinkex.server.local_models import CannotAdd, LocalModels
from tinkex.server.retry import Backoff
from tinkex.server.settings import CHOICES, Settings
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.proto.frames_pb2 import Drop, Order, Tokens
from waiting import until_async

pytestmark = pytest.mark.anyio

IDLE_S = 1.5


async def until_unloaded(executor: LocalExecutor) -> None:
    while executor.process_id(TINY) is not None:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.02)


async def step(api: Api, model: str, first: int) -> float:
    """The loss before an optimizer step."""
    passed = await api.passed(await api.forward_backward(model, first, tokens=8))
    await api.result(await api.optim_step(model, first + 1, learning_rate=1e-2))
    return passed.metrics["loss:sum"]


@pytest.mark.usefixtures("odd")
async def test_a_used_engine_starts_its_replicas_and_keeps_them() -> None:
    """Otherwise only the replica that was used first would ever be up."""
    served = [
        ServedModel(name="x", folder=Path(), replicas=2),
        ServedModel(name="other", folder=Path()),
    ]
    engines = [EngineSettings(name="x", folder=Path(), replica=number) for number in range(2)]
    executor = LocalExecutor(served, [*engines, EngineSettings(name="other", folder=Path())])
    async with asyncio.timeout(60):
        await executor.start()
        first, second = served[0].engines
        assert executor.facts(first) is None
        starting = asyncio.create_task(executor.ready(first))
        await until_async(lambda: executor.waiting_for(first) == "the engine of x#0 is starting")
        # Nobody waits for an engine that the next request starts.
        assert executor.waiting_for("other") is None
        await starting
        incarnations = {await executor.ready(first)}
        await until_async(lambda: executor.facts(second) is not None)
        incarnations.add(await executor.ready(second))
        assert len(incarnations) == 2
        assert executor.facts("other") is None
        await executor.close()


async def test_an_idle_engine_is_unloaded_and_comes_back_with_its_models(
    tiny_model: Path, tmp_path: Path
) -> None:
    executor = local_executor(tiny_model, TINY, "test/other", idle_s=IDLE_S, deterministic=True)
    async with hosted(executor, tmp_path, janitor_s=0) as api:
        await executor.start()
        api.base_model = TINY
        model = await api.model()
        losses = [await step(api, model, 1)]
        await until_unloaded(executor)
        # Two concurrent requests start one engine.
        again = await asyncio.gather(step(api, model, 3), api.model())
        losses.append(again[0])
        assert losses[1] < losses[0]
        assert executor.process_id("test/other") is None


def test_the_only_engine_stays(tiny_model: Path) -> None:
    assert local_executor(tiny_model, TINY, idle_s=IDLE_S).unloads_after_s == 0
    assert local_executor(tiny_model, TINY, "other", idle_s=IDLE_S).unloads_after_s == IDLE_S


@pytest.mark.usefixtures("refusing")
async def test_a_model_that_was_loaded_before_is_tried_again() -> None:
    """Its requests wait, because the reason may be temporary; who loads it is told at once."""
    settings = EngineSettings(name="x", folder=Path())
    served = [ServedModel(name="x", folder=Path())]
    executor = LocalExecutor(served, [settings], on_demand=True, loaded_before=["x"])
    waiting = asyncio.create_task(executor.ready("x"))
    try:
        with pytest.raises(EngineRefused, match="cannot be loaded now"):
            await executor.load("x")
        assert not waiting.done()
        assert "cannot be loaded now" in (executor.waiting_for("x") or "")
        assert "It is tried again" in (executor.waiting_for("x") or "")
    finally:
        waiting.cancel()
        await executor.close()


async def test_loading_a_model_whose_engine_dies_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    monkeypatch.setattr(engine_process, "_command", lambda *_: dies)
    executor = local_executor(tiny_model, TINY)
    try:
        with pytest.raises(EngineRefused, match="its engine died"):
            await asyncio.wait_for(executor.load(TINY), 30)
    finally:
        await executor.close()


SERVED = ServedModel(name="m", folder=Path("/models/m"))


def received_settings(
    settings: Settings,
    *,
    shares_device: bool = False,
    replicas: int = 1,
    replica: int = 0,
    number: int = 0,
) -> EngineSettings:
    """What an engine process receives."""
    sent = web_process.engine_settings(
        settings,
        dataclasses.replace(SERVED, replicas=replicas),
        shares_device=shares_device,
        replica=replica,
        number=number,
    )
    command = _command(7, sent)
    assert command[1:3] == ["-m", "tinkex.engine"]
    received: EngineSettings = parser().parse_args(command[3:]).settings
    return received


def other(name: str, value: Any) -> Any:
    """A value other than the default."""
    if name in CHOICES:
        return CHOICES[name][-1]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    return "other" if isinstance(value, str) else value


def test_every_setting_of_an_engine_can_be_set() -> None:
    """A new setting that is not passed on would keep its default."""
    changed = {
        field.name: other(field.name, field.default) for field in dataclasses.fields(Settings)
    }
    received = received_settings(
        Settings(**changed), shares_device=True, replicas=3, replica=1, number=4
    )
    unreachable = [
        field.name
        for field in dataclasses.fields(EngineSettings)
        if getattr(received, field.name) == field.default
    ]
    assert not unreachable
    assert (received.max_sequences, received.idle_adapters, received.prefix_cache) == (3, 19, False)
    assert received.host_bytes == 3 * 10**9


def test_default_settings_leave_the_engine_defaults() -> None:
    received = received_settings(Settings(data="/data"))
    own = received.spill_folder
    assert own is not None
    assert own.parent == Path("/data/spill")
    assert received == EngineSettings(name="m", folder=SERVED.folder, spill_folder=own)


def test_engines_take_the_devices_of_a_list_in_turn() -> None:
    settings = Settings(device="cuda:0, cuda:2")
    found = [
        received_settings(settings, replicas=3, replica=number, number=number)
        for number in range(3)
    ]
    assert [one.device for one in found] == ["cuda:0", "cuda:2", "cuda:0"]
    assert [one.engine_name for one in found] == ["m#0", "m#1", "m#2"]
    assert len({one.spill_folder for one in found}) == 3
    assert settings.replicas_of_each(1) == 2
    assert settings.replicas_of_each(2) == 1
    assert Settings(replicas=4).replicas_of_each(2) == 4
    # With `auto`, the engine counts the GPUs.
    assert [received_settings(Settings(), number=number).gpu for number in range(2)] == [0, 1]


def test_zero_idle_adapters_can_be_configured() -> None:
    assert received_settings(Settings(idle_adapters=0)).idle_adapters == 0


#: An engine that answers everything with four megabytes.
ENGINE = """
import socket, sys
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2
wire = socket.socket(fileno=int(sys.argv[1]))
wire.sendall(engine_protocol.frame(engine_protocol.Report(ready=frames_pb2.Ready(device="cpu"))))
stream = wire.makefile("rb")
while head := stream.read(engine_protocol.LENGTH_PREFIX.size):
    order = engine_protocol.Order.FromString(stream.read(engine_protocol.body_length(head)))
    done = frames_pb2.Done(result=b"x" * 2**22)
    wire.sendall(engine_protocol.frame(engine_protocol.Report(ticket=order.ticket, done=done)))
"""


@pytest.mark.anyio
async def test_reading_a_large_result_does_not_block_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = []
    pause = _SelectorSocketTransport.pause_reading
    monkeypatch.setattr(
        _SelectorSocketTransport, "pause_reading", lambda one: (pauses.append(1), pause(one))
    )
    monkeypatch.setattr(
        engine_process,
        "_command",
        lambda descriptor, *_: [sys.executable, "-c", ENGINE, str(descriptor)],
    )
    executor = local_executor(Path(), "x")
    await executor.start()
    try:
        await executor.ready("x")
        work = Order(drop=Drop(model_id="m"))
        answers = [await executor.send("x", work) for _ in range(3)]
        outcomes = await asyncio.gather(*answers)
        assert [len(outcome.result) for outcome in outcomes] == [2**22] * 3
    finally:
        await executor.close()
    assert pauses == []


#: An engine that ends in the way that its order says.
ENDING_ENGINE = """
import os, signal, socket, sys
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2
wire = socket.socket(fileno=int(sys.argv[1]))
wire.sendall(engine_protocol.frame(engine_protocol.Report(ready=frames_pb2.Ready(device="cpu"))))
head = wire.recv(engine_protocol.LENGTH_PREFIX.size)
order = engine_protocol.Order.FromString(wire.recv(engine_protocol.body_length(head)))
status = int(order.drop.model_id)
if status >= 0:
    os._exit(status)
signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
os.kill(os.getpid(), -status)
"""


@pytest.mark.parametrize(
    ("status", "oom_kills", "killed"),
    [(-6, 0, False), (1, 0, False), (0, 0, False), (-9, 0, True), (-15, 0, True), (-9, 1, False)],
)
async def test_an_attempt_counts_only_if_the_engine_ended_by_itself(
    status: int, oom_kills: int, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_process,
        "_command",
        lambda descriptor, *_: [sys.executable, "-c", ENDING_ENGINE, str(descriptor)],
    )
    counters = itertools.chain([0], itertools.repeat(oom_kills))
    monkeypatch.setattr(engine_process, "oom_kills", lambda: next(counters))
    executor = local_executor(Path(), "x")
    await executor.start()
    try:
        future = await executor.send("x", Order(drop=Drop(model_id=str(status))))
        with pytest.raises(EngineLost) as lost:
            await future
        assert isinstance(lost.value, EngineKilled) is killed
        assert lost.value.attempts == (0 if killed else 1)
    finally:
        await executor.close()


#: An engine that answers each order in the way that its model id says.
ODD_ENGINE = """
import os, signal, socket, sys, time
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2
wire = socket.socket(fileno=int(sys.argv[1]))

def report(**body):
    wire.sendall(engine_protocol.frame(engine_protocol.Report(**body)))

report(ready=frames_pb2.Ready(device="cpu"))
stream = wire.makefile("rb")
while head := stream.read(engine_protocol.LENGTH_PREFIX.size):
    order = engine_protocol.Order.FromString(stream.read(engine_protocol.body_length(head)))
    match order.drop.model_id:
        case "bad frame":
            wire.sendall(engine_protocol.LENGTH_PREFIX.pack(4) + b"\\xff" * 4)
        case "tokens":
            grown = frames_pb2.Grown(sequences=[frames_pb2.Tokens()])
            report(ticket=order.ticket, grown=grown)
            report(ticket=order.ticket, grown=grown)
            report(ticket=order.ticket, done=frames_pb2.Done())
        case "exits slowly":
            wire.shutdown(socket.SHUT_RDWR)
            time.sleep(600)
        case _:
            report(ticket=order.ticket, done=frames_pb2.Done())
"""


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_process,
        "_command",
        lambda descriptor, *_: [sys.executable, "-c", ODD_ENGINE, str(descriptor)],
    )
    monkeypatch.setattr(engine_process, "RESTART_BACKOFF", Backoff.every(0.01))


@pytest.fixture
def odd_executor(odd: None) -> LocalExecutor:
    return local_executor(Path(), "x")


def drop(model_id: str) -> Order:
    return Order(drop=Drop(model_id=model_id))


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (socket, "socketpair"),
        (asyncio, "create_subprocess_exec"),
        (asyncio, "open_unix_connection"),
    ],
)
async def test_an_engine_that_cannot_be_started_is_started_again(
    module: Any,
    function: str,
    odd_executor: LocalExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original = getattr(module, function)
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    def fails_twice(*args: Any, **options: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(module, function, fails_twice)
    try:
        async with asyncio.timeout(60):
            await odd_executor.start()
            await (await odd_executor.send("x", drop("")))
    finally:
        await odd_executor.close()
    assert caplog.text.count("Too many open files") >= 2
    assert caplog.text.count("restarting it in") == 2


async def test_a_bad_frame_restarts_the_engine(
    odd_executor: LocalExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        async with asyncio.timeout(60):
            await odd_executor.start()
            future = await odd_executor.send("x", drop("bad frame"))
            with pytest.raises(EngineLost):
                await future
            await (await odd_executor.send("x", drop("")))
            assert await odd_executor.ready("x") == 2
    finally:
        await odd_executor.close()
    assert "DecodeError" in caplog.text


REFUSING_ENGINE = """
import socket, sys
from tinkex.wire import engine_protocol
from tinkex.wire.proto import frames_pb2
refused = frames_pb2.Refused(message="there is no GPU.", hint="Use --device cpu.")
wire = socket.socket(fileno=int(sys.argv[1]))
wire.sendall(engine_protocol.frame(engine_protocol.Report(refused=refused)))
"""


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_process,
        "_command",
        lambda descriptor, *_: [sys.executable, "-c", REFUSING_ENGINE, str(descriptor)],
    )


@pytest.mark.usefixtures("refusing")
async def test_every_request_gets_its_own_refusal() -> None:
    """The traceback of one exception that is raised again and again would grow for ever."""
    executor = local_executor(Path(), "x")
    depths = []
    try:
        for _ in range(4):
            with pytest.raises(EngineRefused, match="there is no GPU") as refused:
                await executor.ready("x")
            assert refused.value.hint == "Use --device cpu."
            depths.append(len(refused.traceback))
    finally:
        await executor.close()
    assert len(set(depths[1:])) == 1


@pytest.mark.usefixtures("refusing")
async def test_a_model_that_cannot_be_added_says_what_to_do(
    tiny_model: Path, tmp_path: Path
) -> None:
    executor = local_executor(Path())
    async with hosted(executor, tmp_path, janitor_s=0) as api:
        assert api.app
        settings = EngineSettings(name=TINY, folder=tiny_model)
        models = LocalModels(executor, tmp_path, lambda model: settings)
        with pytest.raises(CannotAdd, match=r"no GPU\. Use --device cpu\. `tinkex stop` ends"):
            await models.add(f"{TINY}={tiny_model}", api.app.state.context.scheduler)


async def test_a_failing_token_callback_does_not_disturb_the_engine(
    odd_executor: LocalExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(tokens: Tokens) -> None:
        raise ValueError("no more tokens, please")

    try:
        async with asyncio.timeout(60):
            await odd_executor.start()
            await (await odd_executor.send("x", drop("tokens"), on_tokens=fail))
            assert await odd_executor.ready("x") == 1
    finally:
        await odd_executor.close()
    assert caplog.text.count("ValueError: no more tokens, please") == 1


async def test_a_server_that_stops_while_a_child_exits_starts_no_other(
    odd_executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def recorded(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*args, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recorded)
    async with asyncio.timeout(60):
        await odd_executor.start()
        future = await odd_executor.send("x", drop("exits slowly"))
        while odd_executor.process_id("x") is not None:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
    async with asyncio.timeout(engine_process.EXIT_TIMEOUT_S):
        await odd_executor.close()
    assert [child.returncode is not None for child in started] == [True]
    with pytest.raises(EngineKilled):
        await future


async def test_an_unresponsive_engine_is_named_and_goes_on(
    odd_executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What polls say of it: tests/server/api/test_futures.py."""
    monkeypatch.setattr(engine_process, "UNRESPONSIVE_S", 0.5)
    caplog.set_level(logging.WARNING)
    try:
        async with asyncio.timeout(60):
            await odd_executor.start()
            await odd_executor.ready("x")
            process = odd_executor.process_id("x")
            assert process is not None
            os.kill(process, signal.SIGSTOP)
            try:
                answer = await odd_executor.send("x", drop(""))
                says = "the engine of x has not responded for"
                await until_async(lambda: says in (odd_executor.waiting_for("x") or ""))
                assert not answer.done()
            finally:
                os.kill(process, signal.SIGCONT)
            # The same process continues.
            await answer
            assert odd_executor.process_id("x") == process
            assert odd_executor.waiting_for("x") is None
    finally:
        await odd_executor.close()
    assert caplog.text.count("has not responded for") == 1
    assert "responds again" in caplog.text
