"""Large bodies and results, and disks that hang, do not stop the event loop."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.api import futures, sampling
from tinkex.server.maintenance import disk_monitor
from tinkex.wire.codec import PROTOBUF_TYPE

pytestmark = pytest.mark.anyio


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """Of each call, whether the event loop made it."""
    real = getattr(module, name)
    loop_thread = threading.get_ident()
    calls: list[bool] = []

    def call(*args: Any) -> Any:
        calls.append(threading.get_ident() == loop_thread)
        return real(*args)

    monkeypatch.setattr(module, name, call)
    return calls


async def test_a_large_sample_is_put_into_its_normal_form_elsewhere(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    encodings = watched(monkeypatch, sampling, "encode_json")
    for tokens, on_the_loop in ((10, True), (200_000, False)):
        body = {
            "prompt": {"chunks": [{"tokens": [100] * tokens}]},
            "sampling_params": {"max_tokens": 1},
            "base_model": BASE,
        }
        await api.result(await api.step("asample", **body))
        assert encodings == [on_the_loop]
        encodings.clear()


async def test_a_large_result_is_looked_at_elsewhere(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old clients cannot read every result as protobuf; which they can is seen in the result."""
    session_id = await api.session("0.24.0")
    model_id = await api.model(session_id)
    decodings = watched(monkeypatch, futures, "decode_forward_backward_output")
    for seq_id, tokens, on_the_loop in ((1, 3, True), (2, 60_000, False)):
        request_id = await api.forward_backward(model_id, seq_id, tokens=tokens)
        while (answer := await api.poll(request_id, accept=PROTOBUF_TYPE)).status == 408:
            pass
        assert answer.status == 200
        assert decodings == [on_the_loop]
        decodings.clear()


async def test_a_disk_that_hangs_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_monitor, "CHECK_EVERY_S", 0.01)
    hangs, hanging, release = (threading.Event() for _ in range(3))
    real = disk_monitor.shutil.disk_usage
    loop_thread = threading.get_ident()
    on_the_loop: list[bool] = []

    def usage(folder: Any) -> Any:
        on_the_loop.append(threading.get_ident() == loop_thread)
        if hangs.is_set():
            hanging.set()
            if not on_the_loop[-1]:  # or nothing would go on, this test neither
                release.wait(30)
        return real(folder)

    monkeypatch.setattr(disk_monitor.shutil, "disk_usage", usage)
    async with hosted(EchoExecutor(), tmp_path) as api:
        hangs.set()
        while not hanging.is_set():  # noqa: ASYNC110  it is set in another thread
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(api.get("/api/v1/healthz"), 10)).status == 200
        await asyncio.wait_for(api.session(), 10)
        release.set()
    assert on_the_loop
    assert not any(on_the_loop)
