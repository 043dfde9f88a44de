"""Session routes, and the client's configuration calls."""

import pytest

from server.echo import BASE, tokenizer_folder
from server.hosting import Api

pytestmark = pytest.mark.anyio


async def test_a_session_id_is_long_and_random(api: Api) -> None:
    ids = {await api.session() for _ in range(3)}
    assert len(ids) == 3
    assert all(len(session) == 22 and session.isalnum() for session in ids)


async def test_a_repeated_call_to_create_a_session_finds_the_first(api: Api) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.4.1"}
    headers = {"X-Idempotency-Key": "stainless-python-retry-1"}
    first = await api.post("create_session", body, headers=headers)
    assert first.json == (await api.post("create_session", body, headers=headers)).json
    other = await api.post("create_session", body, headers={"X-Idempotency-Key": "2"})
    assert other.json != first.json


async def test_an_old_client_may_omit_fields_with_defaults(api: Api) -> None:
    answer = await api.post("create_session", {"sdk_version": "0.4.1", "tags": []})
    assert answer.status == 200


async def test_a_finished_session_takes_no_more_work(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    assert (await api.post("session_heartbeat", {"session_id": session})).status == 200
    reason = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"sessions/{session}/finish", reason)).status == 200
    assert (await api.post("session_heartbeat", {"session_id": session})).status == 410
    step = await api.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    assert step.status == 410
    assert "new session" in step.json["detail"]
    assert (await api.post(f"sessions/{session}/finish", reason)).status == 200


@pytest.mark.parametrize("version", ["0.18.0", "0.36.0", "9.0.0", "nightly"])
async def test_every_sdk_version_gets_a_config_it_can_read(api: Api, version: str) -> None:
    for path in ("client/config", "client/dynamic_config"):
        answer = await api.post(path, {"sdk_version": version})
        assert answer.status == 200
        assert isinstance(answer.json, dict)


async def test_capabilities_list_the_served_models(api: Api) -> None:
    answer = await api.get("/api/v1/get_server_capabilities")
    assert answer.json["supported_models"][0]["model_name"] == BASE
    assert (await api.get("/api/v1/healthz")).json == {"status": "ok"}


async def test_telemetry_is_always_accepted_and_never_kept(api: Api) -> None:
    for body in ({"events": [{"headers": {"X-API-Key": "tml-secret"}}]}, b"not json"):
        assert (await api.post("telemetry", body)).json == {"status": "accepted"}


async def test_metrics_count_what_engines_did(api: Api) -> None:
    model = await api.model()
    await api.value(await api.optim_step(model, 1))
    text = (await api.get("/metrics")).body.decode()
    assert 'tinkex_engine_operations_total{task="optim_step"} 1.0' in text
    assert "tinkex_requests_open 0.0" in text


async def test_the_api_page_describes_every_json_body(api: Api) -> None:
    schema = (await api.get("/openapi.json")).json
    body = schema["paths"]["/api/v1/create_model"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CreateModelRequest")
    assert "base_model" in schema["components"]["schemas"]["CreateModelRequest"]["properties"]
    assert "LoraConfig" in schema["components"]["schemas"]
    assert (await api.get("/docs")).status == 200


async def test_info_about_a_model_names_a_tokenizer_that_works_offline(api: Api) -> None:
    model = await api.model()
    info = (await api.post("get_info", {"model_id": model})).json
    folder = str(tokenizer_folder())
    assert info["model_data"] == {"model_name": BASE, "tokenizer_id": folder}
    assert info["lora_rank"] == 8


async def test_an_unloaded_model_comes_back_with_its_next_step(api: Api) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=4)
    assert await api.value(await api.optim_step(model, 2)) == 4
    unloaded = await api.result(await api.step("unload_model", model_id=model))
    assert unloaded["model_id"] == model
    assert await api.value(await api.optim_step(model, 3)) == 8
