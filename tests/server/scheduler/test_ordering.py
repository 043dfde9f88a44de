"""Steps of a model run strictly by number, each once, whatever the network does."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted, pass_body

pytestmark = pytest.mark.anyio


async def test_steps_that_arrive_in_reverse_are_acknowledged_immediately_and_run_in_order(
    api: Api, echo: EchoExecutor
) -> None:
    model = await api.model()
    # ((0 * 2 + 3) * 2 + 5) = 11 in order; any other order gives another number.
    last = await api.optim_step(model, 4)
    second = await api.forward_backward(model, 3, tokens=5)
    first_step = await api.optim_step(model, 2)
    assert echo.tasks("run_pass", "optim_step") == []
    await api.forward_backward(model, 1, tokens=3)
    assert await api.value(last) == 11
    assert await api.value(first_step) == 3
    assert (await api.passed(second)).metrics["gradient:sum"] == 5
    assert echo.tasks("run_pass", "optim_step") == [
        *("run_pass", "optim_step"),
        *("run_pass", "optim_step"),
    ]


async def test_a_repeated_step_answers_with_the_first_id_and_runs_once(
    api: Api, echo: EchoExecutor
) -> None:
    model = await api.model()
    ids = {await api.forward_backward(model, 1) for _ in range(3)}
    many = await asyncio.gather(*(api.optim_step(model, 2) for _ in range(20)))
    assert len(ids) == 1
    assert len(set(many)) == 1
    assert await api.value(many[0]) == 3
    assert await api.optim_step(model, 2) == many[0]
    assert len(echo.tasks("run_pass", "optim_step")) == 2


async def test_a_number_that_was_used_for_another_kind_of_step_is_refused(api: Api) -> None:
    model = await api.model()
    await api.forward_backward(model, 1)
    answer = await api.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    assert answer.status == 422
    assert "already used for forward_backward" in answer.json["detail"][0]["msg"]


async def test_two_models_do_not_wait_for_each_other(api: Api) -> None:
    session = await api.session()
    one, other = await api.model(session), await api.model(session, number=1)
    await api.optim_step(one, 5)
    assert await api.value(await api.optim_step(other, 1)) == 0


async def test_a_gap_that_stays_open_fails_the_steps_behind_it(api: Api) -> None:
    model = await api.model()
    held = await api.forward_backward(model, 2)
    stepped = await api.optim_step(model, 3)
    failed = await api.result(held)
    assert failed["category"] == "user"
    assert "step 1 of this model never arrived" in failed["error"]
    assert (await api.result(stepped))["category"] == "user"
    # The model continues after them, and the late step fails.
    late = await api.result(await api.forward_backward(model, 1))
    assert "step 1 arrived after" in late["error"]
    await api.forward_backward(model, 4, tokens=7)
    assert await api.value(await api.optim_step(model, 5)) == 7


async def test_a_failed_pass_fails_the_next_optim_step_with_the_reason(api: Api) -> None:
    model = await api.model()
    good = await api.forward_backward(model, 1, tokens=9)
    bad = await api.forward_backward(model, 2, loss="dro")
    refused = await api.optim_step(model, 3)
    await api.passed(good)
    assert "loss dro is not known" in (await api.result(bad))["error"]
    failed = await api.result(refused)
    assert failed["category"] == "user"
    assert "forward_backward step 2" in failed["error"]
    assert "loss dro is not known" in failed["error"]
    # The gradient of the good pass were cleared is discarded too.
    await api.forward_backward(model, 4, tokens=2)
    assert await api.value(await api.optim_step(model, 5)) == 2


async def test_a_step_with_an_unknown_setting_keeps_its_number_and_fails(api: Api) -> None:
    model = await api.model()
    unknown = await api.optim_step(model, 1, momentum=0.5)
    failed = await api.result(unknown)
    assert failed["category"] == "user"
    assert "momentum" in failed["error"]
    assert await api.value(await api.optim_step(model, 2)) == 0


async def test_a_number_over_32_bits_is_malformed(api: Api) -> None:
    """If it were accepted, every later step of the model would be late."""
    model = await api.model()
    for seq_id in (2**31, 2**63 - 1):
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {}}
        answer = await api.post("optim_step", body)
        assert answer.status == 422
        assert answer.json["detail"][0]["loc"] == ["body", "seq_id"]


@pytest.mark.parametrize("seq_id", [None, 0])
async def test_a_step_without_a_number_is_malformed(api: Api, seq_id: int | None) -> None:
    model = await api.model()
    answers = [
        await api.post("forward_backward", pass_body(model, seq_id), headers=PROTOBUF),
        await api.post("optim_step", {"model_id": model, "seq_id": seq_id, "adam_params": {}}),
        await api.post("save_weights", {"model_id": model, "seq_id": seq_id, "path": "a"}),
    ]
    for answer in answers:
        assert answer.status == 422
        assert answer.json["detail"][0]["loc"] == ["body", "seq_id"]


async def test_creating_a_model_twice_creates_one(api: Api, echo: EchoExecutor) -> None:
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "test/echo",
        "lora_config": {"rank": 4},
    }
    answers = await asyncio.gather(*(api.post("create_model", body) for _ in range(5)))
    assert len({answer.body for answer in answers}) == 1
    await api.result(answers[0].json["request_id"])
    assert echo.tasks("create") == ["create"]


@pytest.mark.parametrize(
    "change", [{"lora_config": {"rank": 8}}, {"user_metadata": {"a": "b"}}, {"load": True}]
)
async def test_a_repeated_model_creation_with_other_settings_is_refused(
    api: Api, echo: EchoExecutor, change: dict[str, Any]
) -> None:
    """A repeated request with other the return the first model."""
    session = await api.session()
    body: dict[str, Any] = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "test/echo",
        "lora_config": {"rank": 4},
    }
    made = await api.post("create_model", body)
    await api.result(made.json["request_id"])
    saved = await api.step("save_weights", model_id=made.json["model_id"], seq_id=1, path="a")
    path = (await api.result(saved))["path"]
    if change.pop("load", False):
        other = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        answer = await api.post("load_weights", other)
    else:
        answer = await api.post("create_model", {**body, **change})
    assert answer.status == 422
    assert answer.json["detail"][0]["loc"] == ["body", "model_seq_id"]
    assert (await api.post("create_model", body)).body == made.body
    assert echo.tasks("create") == ["create"]


async def test_creating_a_model_twice_from_a_checkpoint_creates_one(
    api: Api, echo: EchoExecutor
) -> None:
    model = await api.model()
    saved = await api.step("save_weights", model_id=model, seq_id=1, path="a")
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "path": (await api.result(saved))["path"],
        "optimizer": False,
    }
    first = await api.post("load_weights", body)
    assert first.status == 200
    assert (await api.post("load_weights", body)).body == first.body
    other = await api.post("load_weights", {**body, "optimizer": True})
    assert other.status == 422


async def test_steps_of_a_model_that_was_not_created_fail_with_the_reason(api: Api) -> None:
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "test/echo",
        "lora_config": {"rank": 2000},
    }
    made = (await api.post("create_model", body)).json
    failed = await api.result(made["request_id"])
    assert failed == {"error": "rank is too large; 1 to 1000 are supported", "category": "user"}
    step = await api.result(await api.optim_step(made["model_id"], 1))
    assert "was not created: rank is too large" in step["error"]


async def test_a_model_is_rebuilt_from_its_log_after_a_crash(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=3)
    assert await api.value(await api.optim_step(model, 2)) == 3
    await api.passed(await api.forward_backward(model, 3, tokens=5))
    echo.die()
    # The value and the gradient are the same as before: 2 * 3 + 5.
    assert await api.value(await api.optim_step(model, 4)) == 11


async def test_a_model_is_rebuilt_with_its_closed_gaps(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=9)
    held = await api.step("save_weights", model_id=model, seq_id=3, path="a")
    assert "step 2 of this model never arrived" in (await api.result(held))["error"]
    late = await api.result(await api.optim_step(model, 2))
    assert "step 2 arrived after" in late["error"]
    await api.passed(await api.forward_backward(model, 4, tokens=2))
    echo.die()
    # The nine tokens were cleared discards the nine tokens, before the crash and in the rebuild.
    assert await api.value(await api.optim_step(model, 5)) == 2


async def test_requests_that_were_lost_with_an_engine_run_again(
    api: Api, echo: EchoExecutor
) -> None:
    model = await api.model()
    while not echo.entered.locked():
        await echo.entered.acquire()
    echo.open.clear()
    passed = await api.forward_backward(model, 1, tokens=3)
    stepped = await api.optim_step(model, 2)
    await echo.entered.acquire()
    echo.open.set()
    echo.die()
    assert (await api.passed(passed)).metrics["gradient:sum"] == 3
    assert await api.value(stepped) == 3


async def test_a_step_that_crashes_every_engine_fails(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    echo.open.clear()
    while not echo.entered.locked():
        await echo.entered.acquire()
    deadly = await api.forward_backward(model, 1)
    for _ in range(3):
        # The creation is replayed first; let it run, then crash during the pass.
        await echo.entered.acquire()
        if not echo.models:
            echo.open.set()
            await echo.entered.acquire()
            echo.open.clear()
        echo.die()
    failed = await api.result(deadly)
    assert failed["category"] == "server"
    assert "died 3 times" in failed["error"]


async def test_accepted_requests_are_picked_up_by_the_next_process(tmp_path: Path) -> None:
    first = EchoExecutor()
    async with hosted(first, tmp_path) as api:
        model = await api.model()
        assert await api.value(await api.optim_step(model, 1)) == 0
        first.open.clear()
        passed = await api.forward_backward(model, 2, tokens=4)
        stepped = await api.optim_step(model, 3)
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert await api.value(stepped) == 4
        assert (await api.passed(passed)).metrics["gradient:sum"] == 4
        assert await api.optim_step(model, 3) == stepped


async def test_incomplete_gradients_are_known_to_the_next_process(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        model = await api.model()
        bad = await api.forward_backward(model, 1, loss="dro")
        await api.result(bad)
    async with hosted(EchoExecutor(), tmp_path) as api:
        failed = await api.result(await api.optim_step(model, 2))
        assert "forward_backward step 1" in failed["error"]


async def test_passes_reach_the_engine_by_number_although_one_is_large(
    api: Api, echo: EchoExecutor
) -> None:
    """A large payload is read from a moment to open; a small one is in memory."""
    model = await api.model()
    second = await api.forward_backward(model, 2, tokens=2)
    first = await api.forward_backward(model, 1, tokens=5000)
    assert (await api.passed(first)).metrics["gradient:sum"] == 5000
    assert (await api.passed(second)).metrics["gradient:sum"] == 5002
    echo.die()
    await api.optim_step(model, 3)
    assert await api.value(await api.optim_step(model, 4)) == 2 * 5002
    # The same when the model is rebuilt from its log.
    sizes = [
        work.run_pass.payload.HasField("file") for work in echo.ran if work.HasField("run_pass")
    ]
    assert sizes == [True, False, True, False]


async def test_a_gap_stays_closed_when_the_engine_crashes_meanwhile(
    api: Api, echo: EchoExecutor
) -> None:
    model = await api.model()
    await api.passed(await api.forward_backward(model, 1, tokens=9))
    while not echo.entered.locked():
        await echo.entered.acquire()
    echo.open.clear()
    held = await api.optim_step(model, 3)
    await echo.entered.acquire()  # the gap has timed being closed: the gradients are being cleared
    echo.open.set()
    echo.die()
    assert "step 2 of this model never arrived" in (await api.result(held))["error"]
    await api.forward_backward(model, 4, tokens=2)
    assert await api.value(await api.optim_step(model, 5)) == 2
