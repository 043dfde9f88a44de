"""Custom losses: accepted once, stored, sent to every engine that needs them."""

from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api

pytestmark = pytest.mark.anyio

#: The loss is the sum of the logprobs.
NODES = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]},
    {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": "s"}, {"dict": {"custom/s:sum": {"ref": "s"}}}]}],
    },
]


def loss(session_id: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": NODES},
        "type": "create_custom_loss",
        **fields,
    }


async def test_a_loss_gets_an_id_that_cannot_be_guessed(api: Api, echo: EchoExecutor) -> None:
    session = await api.session()
    one = await api.result(await api.step("create_custom_loss", **loss(session)))
    two = await api.result(await api.step("create_custom_loss", **loss(session, 1)))
    assert len(one["loss_id"]) >= 20
    assert one["loss_id"] != two["loss_id"]
    assert session not in one["loss_id"]
    assert echo.tasks("register_loss") == ["register_loss"] * 2


async def test_a_repeated_creation_finds_the_first(api: Api, echo: EchoExecutor) -> None:
    session = await api.session()
    first = await api.step("create_custom_loss", **loss(session))
    result = await api.result(first)
    assert await api.step("create_custom_loss", **loss(session)) == first
    assert await api.result(first) == result
    assert echo.tasks("register_loss") == ["register_loss"]


async def test_a_restarted_engine_gets_the_losses_before_the_steps(
    api: Api, echo: EchoExecutor
) -> None:
    session = await api.session()
    model = await api.model(session)
    made = await api.result(await api.step("create_custom_loss", **loss(session)))
    await api.result(await api.optim_step(model, 1))
    echo.die()
    echo.ran.clear()
    await api.result(await api.optim_step(model, 2))
    assert echo.tasks() == ["register_loss", "create", *["optim_step"] * 2]
    assert echo.ran[0].register_loss.loss_id == made["loss_id"]
    assert echo.ran[0].register_loss.session_id == session


async def test_malformed_losses_are_refused_with_the_field(api: Api) -> None:
    session = await api.session()
    bad = await api.post("create_custom_loss", loss(session, graph={"format": 2, "nodes": []}))
    assert bad.status == 422
    assert bad.json["detail"][0]["loc"][:3] == ["body", "graph", "format"]
    assert (await api.post("create_custom_loss", loss(session, -1))).status == 422
    assert (await api.post("create_custom_loss", loss("nobodys"))).status == 404
