"""Owner limits: requests over a limit are refused or wait, polls say why, and they continue later."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.api.test_custom_losses import loss
from server.echo import BASE, EchoExecutor, content
from server.hosting import PROTOBUF, Api, hosted, pass_body
from server.tenants import new_key, with_key
from tinkex.server.api import auth
from tinkex.wire.proto.frames_pb2 import Stats

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """The authenticator reads the database every time."""
    believed, auth.KEY_CACHE_TTL_S = auth.KEY_CACHE_TTL_S, 0.0
    yield
    auth.KEY_CACHE_TTL_S = believed


async def sampler(api: Api) -> str:
    session = await api.session()
    made = await api.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE},
    )
    return str(made.json["sampling_session_id"])


def sample(sampler_id: str, seq_id: int, *, samples: int = 1, tokens: int = 3) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": samples,
        "prompt": {"chunks": [{"tokens": [1] * tokens}]},
        "sampling_params": {"max_tokens": 1},
    }


async def test_samples_over_the_limit_are_accepted_later(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_samples=4, long_poll_s=0.05) as api:
        mine = await sampler(api)
        echo.open.clear()
        first = await api.post("asample", sample(mine, 0, samples=3))
        assert first.status == 200
        body = sample(mine, 1, samples=2)
        async with api.http.post("/api/v1/asample", json=body) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == "1"
            assert "3 sequences being sampled, and 4 are allowed" in await refused.text()
        assert (await api.post("asample", sample(mine, 2, samples=1))).status == 200
        # Training is not affected.
        echo.open.set()
        await api.result(first.json["request_id"])
        assert (await api.post("asample", body)).status == 200


async def test_a_step_that_others_wait_for_is_always_admitted(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    """Newer clients send the first chunk of a batch last; a refusal would block all others."""
    async with hosted(echo, tmp_path, max_requests=2) as api:
        model = await api.model()
        second = await api.forward_backward(model, 2)
        await api.forward_backward(model, 3)
        late = await api.post("forward_backward", pass_body(model, 4), headers=PROTOBUF)
        assert late.status == 429
        assert "2 requests that are not finished, and 2 are allowed" in late.json["detail"]
        first = await api.forward_backward(model, 1)
        await api.passed(first)
        await api.passed(second)


async def test_all_engine_work_counts(echo: EchoExecutor, tmp_path: Path) -> None:
    async with hosted(echo, tmp_path, max_requests=2) as api:
        model, mine = await api.model(), await sampler(api)
        session = model.partition(":")[0]
        saved = await api.step("save_weights", model_id=model, seq_id=1, path="kept")
        path = (await api.result(saved))["path"]
        echo.open.clear()
        for number in range(2):
            assert (await api.post("asample", sample(mine, number))).status == 200
        made = {"session_id": session, "model_seq_id": 7}
        over = {
            "create_model": {**made, "base_model": BASE, "lora_config": {"rank": 8}},
            "load_weights": {**made, "path": path, "optimizer": False},
            "unload_model": {"model_id": model},
            "create_custom_loss": loss(session),
        }
        for route, body in over.items():
            answer = await api.post(route, body)
            assert (route, answer.status) == (route, 429), answer
            assert "2 requests that are not finished, and 2 are allowed" in answer.json["detail"]
        echo.open.set()


async def test_queued_tokens_are_limited_but_a_single_request_is_admitted(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_queued_tokens=10) as api:
        mine = await sampler(api)
        echo.open.clear()
        assert (await api.post("asample", sample(mine, 0, tokens=50))).status == 200
        assert (await api.post("asample", sample(mine, 1, tokens=1))).status == 429
        echo.open.set()


async def test_a_key_may_have_limits_and_owners_have_separate_limits(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    alices = await new_key(tmp_path, "alice", limits={"max_samples": 1})
    bobs = await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path, max_samples=3) as api,
        with_key(api, alices) as alice,
        with_key(api, bobs) as bob,
    ):
        hers, his = await sampler(alice), await sampler(bob)
        echo.open.clear()
        assert (await alice.post("asample", sample(hers, 0))).status == 200
        assert (await alice.post("asample", sample(hers, 1))).status == 429
        for number in range(3):
            assert (await bob.post("asample", sample(his, number))).status == 200
        assert (await bob.post("asample", sample(his, 3))).status == 429
        echo.open.set()


async def test_models_over_the_limit_wait_and_polls_say_why(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_training=1, long_poll_s=0.05) as api:
        first, second = await api.model(), await api.model()
        echo.open.clear()
        running = await api.forward_backward(first, 1, tokens=2)
        await echo.entered.acquire()
        held = await api.forward_backward(second, 1, tokens=3)
        reported = await api.poll(held)
        assert reported.status == 408
        assert reported.json["queue_state"] == "paused_rate_limit"
        assert reported.json["queue_state_reason"] == (
            "1 of your models are training, and 1 may train at once"
        )
        assert (await api.poll(running)).json["queue_state"] == "active"
        echo.open.set()
        await asyncio.gather(api.passed(running), api.passed(held))


@pytest.mark.parametrize("by_key", [False, True])
async def test_after_a_restart_the_limit_holds_from_the_start(
    echo: EchoExecutor, tmp_path: Path, by_key: bool
) -> None:
    settings: dict[str, Any] = {"long_poll_s": 0.05, "max_training": 0 if by_key else 1}
    key = await new_key(tmp_path, "alice", limits={"max_training": 1}) if by_key else None
    async with hosted(echo, tmp_path, **settings) as nobody, with_key(nobody, key) as api:
        models = [await api.model(), await api.model()]
        echo.open.clear()
        requested = [await api.forward_backward(model, 1) for model in models]
    again = EchoExecutor()
    again.open.clear()
    async with hosted(again, tmp_path, **settings) as nobody, with_key(nobody, key) as api:
        await again.entered.acquire()
        reported = [(await api.poll(request_id)).json["queue_state"] for request_id in requested]
        assert sorted(reported) == ["active", "paused_rate_limit"]
        again.open.set()
        await asyncio.gather(*(api.passed(request_id) for request_id in requested))


class FullExecutor(EchoExecutor):
    """An engine that reports that it is full."""

    def stats(self, base_model: str) -> Stats | None:
        return Stats(sequences_running=8, samples_waiting=5)


async def test_a_sample_that_waits_for_a_full_engine_says_so(tmp_path: Path) -> None:
    full = FullExecutor()
    async with hosted(full, tmp_path, long_poll_s=0.05) as api:
        mine = await sampler(api)
        full.open.clear()
        requested = await api.post("asample", sample(mine, 0))
        reported = (await api.poll(requested.json["request_id"])).json
        assert reported["queue_state"] == "paused_capacity"
        assert reported["queue_state_reason"] == (
            "the engine is full: 8 sequences are being sampled; 5 samples wait"
        )
        full.open.set()


async def test_many_models_of_one_owner_do_not_keep_another_waiting(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    alices, bobs = await new_key(tmp_path, "alice"), await new_key(tmp_path, "bob")
    async with (
        hosted(echo, tmp_path) as api,
        with_key(api, alices) as alice,
        with_key(api, bobs) as bob,
    ):
        session = await alice.session()
        hers = [await alice.model(session, number=number) for number in range(40)]
        his = await bob.model()
        done = len(echo.ran)
        echo.open.clear()
        waits = [await alice.forward_backward(model, 1) for model in hers]
        mine = await bob.forward_backward(his, 1)
        echo.open.set()
        await bob.passed(mine)
        for request in waits:
            await alice.passed(request)
        order = [content(work).model_id for work in echo.ran[done:]]
        # All slots were taken when his request arrived; he got the next free one.
        assert order.index(his) <= 32
