"""Large answers of an engine cross its socket without a stop."""

import asyncio
import sys
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from pathlib import Path

import pytest

from tinkex.server import engine_process
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineOptions, ServedModel, Task, Work

#: An engine that answers everything with four megabytes.
ENGINE = """
import socket, sys
from tinkex.wire import frames
from tinkex.wire.proto import frames_pb2
wire = socket.socket(fileno=int(sys.argv[1]))
wire.sendall(frames.frame(frames.Report(ready=frames_pb2.Ready(device="cpu"))))
stream = wire.makefile("rb")
while head := stream.read(frames.LENGTH.size):
    order = frames.Order.FromString(stream.read(frames.body_length(head)))
    done = frames_pb2.Done(result=b"x" * 2**22)
    wire.sendall(frames.frame(frames.Report(ticket=order.ticket, done=done)))
"""


@pytest.mark.anyio
async def test_an_engine_is_not_made_to_wait_while_a_large_result_is_read(
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
    executor = LocalExecutor([ServedModel(name="x", folder=Path())], EngineOptions())
    await executor.start()
    try:
        await executor.ready("x")
        work = Work(task=Task.DROP, model_id="m")
        answers = [await executor.send("x", work) for _ in range(3)]
        outcomes = await asyncio.gather(*answers)
        assert [len(outcome.result) for outcome in outcomes] == [2**22] * 3
    finally:
        await executor.close()
    assert pauses == []
