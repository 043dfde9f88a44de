"""A request that crashes a real engine together with its web process fails alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.hosting import connected
from server.scheduler.test_crash_files import result_of, until_answered
from serving import TINY, Server, serving
from waiting import until_async

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

#: Loaded by every Python process of the server. A pass with many tokens of number 5 is deadly. Two
#: attempts, not three, because each starts a web process and an engine.
SITECUSTOMIZE = """
import os, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if any("tinkex.engine" in word for word in sys.orig_argv):
    from tinkex.wire import engine_protocol

    class Order:
        plain = engine_protocol.Order

        @classmethod
        def FromString(cls, body):
            if body.count(bytes([5])) >= 20:
                os.kill(os.getppid(), signal.SIGSEGV)
                os.abort()
            return cls.plain.FromString(body)

    engine_protocol.Order = Order
elif any("tinkex.server" in word for word in sys.orig_argv):
    from tinkex.server.scheduler import results

    results.MAX_ATTEMPTS = 2
"""
DEADLY = 24


@pytest.fixture
def own_server(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with serving(f"{TINY}={tiny_model}", data=tmp_path / "data") as server:
        yield server


async def test_only_the_request_that_crashes_both_processes_fails(own_server: Server) -> None:
    async with connected(own_server.url, TINY) as api:
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(2)]
        # The later steps arrive first, so nothing runs before all have arrived.
        steps = [await api.optim_step(model, 2) for model in models]
        await api.forward_backward(models[1], 1, tokens=8)
        # The web process may crash before it answers.
        passed = await until_answered(lambda: api.forward_backward(models[0], 1, tokens=DEADLY))
        deadly = await result_of(api, passed)
        own, other = [await result_of(api, step) for step in steps]
    assert deadly["category"] == "server"
    assert "died 2 times" in deadly["error"]
    assert "step 1 before this optim_step failed" in own["error"]
    assert "metrics" in other
    crash = "the web process crashed; restarting"
    await until_async(lambda: sum(crash in line for line in own_server.log) == 2)
