"""A refused step does not block later steps; they fail with the reason of the refusal."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted, pass_body
from tinkex.server.executor import EngineRefused
from tinkex.wire.malformed_steps import StepId, step_id_in_json, step_id_in_protobuf

pytestmark = pytest.mark.anyio

LIMIT = 100_000


@pytest.fixture
async def api(echo: EchoExecutor, tmp_path: Path) -> AsyncIterator[Api]:
    """Gaps never time out here, so that a step that waits for one is noticed."""
    async with hosted(echo, tmp_path, gap_s=3600.0, long_poll_s=5.0, max_body_bytes=LIMIT) as api:
        yield api


def as_json(model: str, number: int, *, data: Any) -> bytes:
    # The number comes last, as the oldest clients send it.
    work = {"data": data, "loss_fn": "cross_entropy"}
    return json.dumps(
        {"forward_backward_input": work, "model_id": model, "seq_id": number}
    ).encode()


def malformed(model: str) -> tuple[str, bytes, dict[str, str], int]:
    return "forward_backward", as_json(model, 1, data=[{"model_input": 5}]), {}, 422


def cut_off(model: str) -> tuple[str, bytes, dict[str, str], int]:
    return "forward_backward", pass_body(model, 1)[:-3], PROTOBUF, 422


def too_large(model: str) -> tuple[str, bytes, dict[str, str], int]:
    return "forward_backward", pass_body(model, 1, tokens=LIMIT // 4), PROTOBUF, 413


def too_large_json(model: str) -> tuple[str, bytes, dict[str, str], int]:
    tokens = {"chunks": [{"tokens": [1] * LIMIT}]}
    body = as_json(model, 1, data=[{"model_input": tokens, "loss_fn_inputs": {}}])
    return "forward_backward", body, {}, 413


@pytest.mark.parametrize("case", [malformed, cut_off, too_large, too_large_json])
async def test_the_next_optim_step_fails_with_the_reason_of_the_refused_pass(
    api: Api, echo: EchoExecutor, case: Any
) -> None:
    model = await api.model()
    route, body, headers, status = case(model)
    refused = await api.post(route, body, headers=headers)
    assert refused.status == status
    stepped = await api.result(await api.optim_step(model, 2))
    assert stepped["category"] == "user"
    assert "forward_backward step 1" in stepped["error"]
    assert "refused when it arrived" in stepped["error"]
    assert echo.tasks("optim_step") == []
    # The model continues at once.
    await api.forward_backward(model, 3, tokens=4)
    assert await api.value(await api.optim_step(model, 4)) == 4


async def test_steps_that_arrived_earlier_do_not_wait_for_a_refused_one(api: Api) -> None:
    model = await api.model()
    behind = await api.optim_step(model, 2)
    assert (await api.post("forward_backward", as_json(model, 1, data="x"))).status == 422
    assert "refused when it arrived" in (await api.result(behind))["error"]


async def test_a_refused_optim_step_discards_its_gradients(api: Api) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=9)
    refused = await api.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": 5})
    assert refused.status == 422
    await api.forward_backward(model, 3, tokens=2)
    assert await api.value(await api.optim_step(model, 4)) == 2


async def test_a_refused_save_is_skipped(api: Api) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=9)
    body = {"model_id": model, "seq_id": 2, "path": "a", "ttl_seconds": "long"}
    assert (await api.post("save_weights", body)).status == 422
    assert await api.value(await api.optim_step(model, 3)) == 9


async def test_a_refused_number_may_be_used_again(api: Api) -> None:
    """Until the client sends a later number: our client reuses the number."""
    model = await api.model()
    assert (await api.post("forward_backward", as_json(model, 1, data="x"))).status == 422
    await api.forward_backward(model, 1, tokens=5)
    assert await api.value(await api.optim_step(model, 2)) == 5


async def test_a_refused_number_is_used_up_after_a_later_step(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    assert (await api.post("forward_backward", as_json(model, 1, data="x"))).status == 422
    await api.result(await api.optim_step(model, 2))
    again = await api.result(await api.forward_backward(model, 1))
    assert again["category"] == "user"
    assert "refused when it arrived" in again["error"]
    assert echo.tasks("run_pass") == []


async def test_an_accepted_step_is_not_undone_by_a_malformed_repeat(api: Api) -> None:
    model = await api.model()
    behind = await api.optim_step(model, 3)
    await api.forward_backward(model, 2, tokens=5)
    assert (await api.post("forward_backward", as_json(model, 2, data="x"))).status == 422
    await api.forward_backward(model, 1, tokens=2)
    assert await api.value(behind) == 7


async def test_a_refusal_survives_an_engine_crash(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=9)
    assert (
        await api.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": 5})
    ).status == 422
    await api.passed(await api.forward_backward(model, 3, tokens=2))
    echo.die()
    assert await api.value(await api.optim_step(model, 4)) == 2


class Absent(EchoExecutor):
    """An engine whose start can be blocked."""

    starts = True

    async def ready(self, base_model: str) -> int:
        if not self.starts:
            raise EngineRefused("the engine does not start")
        return await super().ready(base_model)


async def test_a_refused_step_has_failed_whatever_the_engine_does(tmp_path: Path) -> None:
    absent = Absent()
    async with hosted(absent, tmp_path, gap_s=3600.0, long_poll_s=5.0) as api:
        model = await api.model()
        absent.starts = False
        bad = {"model_id": model, "seq_id": 1, "adam_params": 5}
        assert (await api.post("optim_step", bad)).status == 422
        behind = await api.result(await api.optim_step(model, 2))
        assert behind["category"] == "server"
        again = await api.result(await api.optim_step(model, 1))
        assert "refused when it arrived" in again["error"]


def test_an_address_is_read_only_if_it_is_unambiguous() -> None:
    assert step_id_in_json(b'{"model_id": "m", "seq_id": 3, "x"') == StepId("m", 3)
    assert step_id_in_json(b'{"model_id": "m", "seq_id": 3, "seq_id": 4, "x"') is None
    assert step_id_in_json(b'{"model_id": "m", "seq_id": true}') is None
    assert step_id_in_json(b"[1") is None
    whole = pass_body("m", 3, forward_only=True)
    assert step_id_in_protobuf(whole) == StepId("m", 3, True)
    assert step_id_in_protobuf(whole[:40]) == StepId("m", 3, False)
    assert step_id_in_protobuf(b"\xff" * 40) is None
    assert step_id_in_protobuf(b"") is None


async def test_the_step_is_found_though_its_first_part_was_too_large(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    """The whole body arrives in one part, which is over the limit."""
    async with hosted(echo, tmp_path, gap_s=3600.0, long_poll_s=5.0, max_body_bytes=2_000) as api:
        model = await api.model()
        refused = await api.post("forward_backward", pass_body(model, 1, 700), headers=PROTOBUF)
        assert refused.status == 413
        stepped = await api.result(await api.optim_step(model, 2))
        assert "refused when it arrived" in stepped["error"]
