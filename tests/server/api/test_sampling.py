"""Samplers and samples: immutable sources, repeats, and the three ways to name a model."""

from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.protobuf import decode_sample_response

pytestmark = pytest.mark.anyio

PROMPT = {"chunks": [{"tokens": [1, 2, 3]}]}


async def base_sampler(api: Api, number: int = 0) -> str:
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
    answer = await api.post("create_sampling_session", body)
    assert answer.status == 200, answer
    return str(answer.json["sampling_session_id"])


async def sample(api: Api, **fields: Any) -> list[int]:
    """The first token of each sequence."""
    answer = await api.post("asample", {"prompt": PROMPT, "sampling_params": {}, **fields})
    assert answer.status == 200, answer
    while (got := await api.poll(answer.json["request_id"], accept=PROTOBUF_TYPE)).status == 408:
        pass
    ids = answer.json["sample_sequence_ids"]
    response = decode_sample_response(got.body, ids)
    assert [sequence.sequence_id for sequence in response.sequences] == ids
    return [sequence.tokens[0] for sequence in response.sequences]


async def test_each_sequence_has_an_id_before_it_exists(api: Api) -> None:
    sampler = await base_sampler(api)
    assert await sample(api, sampling_session_id=sampler, seq_id=0, num_samples=3) == [7, 7, 7]


async def test_the_engine_gets_the_owner_of_a_sample(api: Api, echo: EchoExecutor) -> None:
    await sample(api, base_model=BASE)
    assert [work.sample.owner for work in echo.ran if work.HasField("sample")] == ["local"]


async def test_a_repeated_sample_answers_the_same_ids_and_runs_once(
    api: Api, echo: EchoExecutor
) -> None:
    sampler = await base_sampler(api)
    body = {
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 1},
        "sampling_session_id": sampler,
        "seq_id": 5,
        "num_samples": 2,
    }
    first, again = await api.post("asample", body), await api.post("asample", body)
    assert first.json == again.json
    assert len(first.json["sample_sequence_ids"]) == 2
    await api.result(first.json["request_id"])
    assert echo.tasks("sample") == ["sample"]


async def test_samples_need_no_order(api: Api) -> None:
    sampler = await base_sampler(api)
    for seq_id in (3_000_000_017, 4, 999):
        assert await sample(api, sampling_session_id=sampler, seq_id=seq_id) == [7]


async def test_a_sample_without_a_seed_gets_one_that_stays(api: Api, echo: EchoExecutor) -> None:
    sampler = await base_sampler(api)
    await sample(api, sampling_session_id=sampler, seq_id=0)
    assert b'"seed":' in echo.ran[-1].sample.payload.inline


async def test_an_unknown_setting_is_a_failed_sample(api: Api) -> None:
    sampler = await base_sampler(api)
    body = {
        "prompt": PROMPT,
        "sampling_params": {"max_token": 5},
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
    }
    answer = await api.post("asample", body)
    assert len(answer.json["sample_sequence_ids"]) == 2
    failed = await api.result(answer.json["request_id"])
    assert failed["category"] == "user"
    assert "did you mean `max_tokens`" in failed["error"]


async def test_an_unknown_setting_is_a_failed_sample_however_the_model_is_named(
    api: Api,
) -> None:
    model = await api.model()
    saved = await api.result(
        await api.step("save_weights_for_sampler", model_id=model, seq_id=1, path="one")
    )
    for named in ({"base_model": BASE}, {"model_path": saved["path"]}):
        body = {"prompt": PROMPT, "sampling_params": {"max_token": 5}, **named}
        answer = await api.post("asample", body)
        assert answer.status == 200, answer
        failed = await api.result(answer.json["request_id"])
        assert failed["category"] == "user"
        assert "did you mean `max_tokens`" in failed["error"]
    nobody = await api.post("asample", {**body, "model_path": "tinker://a/weights/b"})
    assert nobody.status == 404


async def test_a_repeated_sampler_creation_makes_one_sampler(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 3, "base_model": BASE}
    answers = [await api.post("create_sampling_session", body) for _ in range(2)]
    assert answers[0].json == answers[1].json
    assert answers[0].json["sampling_session_id"] == f"{session}:sample:3"
    about = await api.get(f"/api/v1/samplers/{session}:sample:3")
    assert about.json["sampler_id"] == f"{session}:sample:3"
    assert about.json["base_model"] == BASE
    assert "model_path" not in about.json


async def test_a_sampler_number_cannot_be_reused_for_another_model(api: Api) -> None:
    model = await api.model()
    session = model.partition(":")[0]
    saved = await api.result(
        await api.step(
            "save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0
        )
    )
    assert saved["sampling_session_id"] == f"{session}:sample:0"
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    answer = await api.post("create_sampling_session", body)
    assert answer.status == 422
    assert "Use the next free number" in answer.json["detail"][0]["msg"]
    negative = await api.result(
        await api.step(
            "save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=-1
        )
    )
    assert negative["category"] == "user"


async def test_a_sampler_keeps_its_version_while_training_continues(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.forward_backward(model, 1, tokens=5)
    await api.optim_step(model, 2)
    saved = await api.step("save_weights_for_sampler", model_id=model, seq_id=3, path="five")
    await api.forward_backward(model, 4, tokens=1)
    await api.optim_step(model, 5)
    unnamed = await api.step(
        "save_weights_for_sampler", model_id=model, seq_id=6, sampling_session_seq_id=9
    )
    path = (await api.result(saved))["path"]
    assert path == f"tinker://{model}/sampler_weights/five"
    newest = (await api.result(unnamed))["sampling_session_id"]
    assert newest == f"{session}:sample:9"
    assert await sample(api, model_path=path) == [5]
    assert await sample(api, sampling_session_id=newest, seq_id=0) == [11]
    assert await sample(api, base_model=BASE) == [7]
    assert await sample(api, base_model=f"{BASE}:anything") == [7]


@pytest.mark.parametrize(("sdk_version", "has_path"), [("0.19.0", False), ("0.36.0", True)])
async def test_old_clients_get_no_path_for_an_unnamed_save(
    api: Api, sdk_version: str, has_path: bool
) -> None:
    session = await api.session(sdk_version)
    model = await api.model(session)
    unnamed = await api.step(
        "save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0
    )
    result = await api.result(unnamed)
    assert ("path" in result) == has_path
    if has_path:
        assert await sample(api, model_path=result["path"]) == [0]


async def test_two_names_that_disagree_are_refused(api: Api) -> None:
    sampler = await base_sampler(api)
    body = {
        "prompt": PROMPT,
        "sampling_params": {},
        "sampling_session_id": sampler,
        "seq_id": 0,
        "model_path": "tinker://a/weights/b",
    }
    answer = await api.post("asample", body)
    assert answer.status == 400
    assert "two models" in answer.json["detail"]


async def test_a_sample_survives_an_engine_crash(api: Api, echo: EchoExecutor) -> None:
    sampler = await base_sampler(api)
    echo.open.clear()
    body = {
        "prompt": PROMPT,
        "sampling_params": {},
        "sampling_session_id": sampler,
        "seq_id": 0,
    }
    request = (await api.post("asample", body)).json["request_id"]
    await echo.entered.acquire()
    echo.die()
    echo.open.set()
    assert (await api.result(request))["sequences"][0]["tokens"] == [7]


async def test_an_unfinished_sample_runs_after_a_restart(tmp_path: Path) -> None:
    first = EchoExecutor()
    async with hosted(first, tmp_path) as api:
        sampler = await base_sampler(api)
        first.open.clear()
        body = {
            "prompt": PROMPT,
            "sampling_params": {},
            "sampling_session_id": sampler,
            "seq_id": 0,
        }
        request = (await api.post("asample", body)).json["request_id"]
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert (await api.result(request))["sequences"][0]["tokens"] == [7]


@pytest.mark.parametrize("params", [{}, {"typical_p": 0.5}])
async def test_a_finished_session_refuses_samples(api: Api, params: dict[str, Any]) -> None:
    """Also a sample with an unknown setting."""
    sampler = await base_sampler(api)
    session = sampler.partition(":")[0]
    assert (
        await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    ).status < 300
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": PROMPT,
        "sampling_params": params,
    }
    assert (await api.post("asample", body)).status == 410
