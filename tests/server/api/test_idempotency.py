"""A repeat of an accepted request gets the first answer, however full the server is."""

from pathlib import Path
from typing import Any

import pytest

from server.api.test_custom_losses import loss
from server.api.test_owner_limits import sample, sampler
from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Answer, Api, hosted, pass_body
from server.storage.failing import FULL, FailingFileSystem

pytestmark = pytest.mark.anyio


async def passed(api: Api, model: str, seq_id: int) -> Answer:
    return await api.post("forward_backward", pass_body(model, seq_id), headers=PROTOBUF)


async def streamed(api: Api, body: dict[str, Any]) -> str:
    """The first event of a stream."""
    async with api.http.post("/api/v1/stream_sample", json=body) as got:
        assert got.status == 200, await got.text()
        await got.content.readline()
        return (await got.content.readline()).decode()


@pytest.mark.parametrize("limit", ["max_requests", "max_open"])
async def test_a_full_server_answers_repeats(
    limit: str, echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, long_poll_s=0.05, **{limit: 3}) as api:
        session = await api.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE}
        body["lora_config"] = {"rank": 8}
        made = await api.post("create_model", body)
        await api.result(made.json["request_id"])
        own = await api.post("create_custom_loss", loss(session))
        await api.result(own.json["request_id"])
        model, mine = made.json["model_id"], await sampler(api)
        echo.open.clear()
        step = await passed(api, model, 1)
        drawn = await api.post("asample", sample(mine, 0, samples=2))
        optimized = await api.optim_step(model, 2)
        # The server is full: new requests are refused.
        assert (await passed(api, model, 3)).status == 429
        assert (await api.post("asample", sample(mine, 1))).status == 429
        assert (await api.post("create_custom_loss", loss(session, 1))).status == 429
        assert (await api.post("create_model", {**body, "model_seq_id": 1})).status == 429
        assert (await api.post("create_model", body)) == made
        assert (await api.post("create_custom_loss", loss(session))) == own
        assert (await passed(api, model, 1)) == step
        assert (await api.post("asample", sample(mine, 0, samples=2))) == drawn
        assert await api.optim_step(model, 2) == optimized
        assert drawn.json["request_id"] in await streamed(api, sample(mine, 0, samples=2))
        # Another kind of step with the same number gets a final error.
        reused = await api.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
        assert reused.status == 422
        # A request without a number cannot be a repeat.
        unnumbered = sample(mine, 0)
        del unnumbered["seq_id"]
        assert (await api.post("asample", unnumbered)).status == 429
        echo.open.set()
        assert len((await api.result(drawn.json["request_id"]))["sequences"]) == 2
        await api.passed(step.json["request_id"])


async def test_a_full_disk_answers_repeats(echo: EchoExecutor, tmp_path: Path) -> None:
    async with hosted(echo, tmp_path, storage="failing://repeats") as api:
        model = await api.model()
        step = await passed(api, model, 1)
        FailingFileSystem.error = FULL
        try:
            large = pass_body(model, 2, tokens=20_000)
            assert (await api.post("forward_backward", large, headers=PROTOBUF)).status == 503
            assert (await passed(api, model, 1)) == step
            assert (await passed(api, model, 2)).status == 503
        finally:
            FailingFileSystem.error = None
