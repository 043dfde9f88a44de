"""Passes in all encodings: protobuf, compressed protobuf, JSON of old clients."""

import gzip
import json
from typing import Any

import pytest
import zstandard

from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Api, pass_body

pytestmark = pytest.mark.anyio


def old_pass(model: str, seq_id: int, *, key: str, tokens: int) -> dict[str, Any]:
    """As versions before 0.18 send it: no `type`, explicit nulls."""
    datum = {
        "model_input": {"chunks": [{"tokens": [5] * tokens}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [1] * tokens, "dtype": "int64", "shape": [tokens]},
            "weights": {"data": [1.0] * tokens, "dtype": "float32", "shape": [tokens]},
        },
    }
    work = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None}
    return {key: work, "model_id": model, "seq_id": seq_id}


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("zstd", zstandard.compress), ("gzip", gzip.compress), ("identity", bytes)],
)
async def test_a_compressed_pass_is_decompressed(api: Api, encoding: str, pack: Any) -> None:
    model = await api.model()
    headers = {**PROTOBUF, "Content-Encoding": encoding}
    answer = await api.post("forward_backward", pack(pass_body(model, 1, 4)), headers=headers)
    assert answer.status == 200, answer
    assert (await api.passed(answer.json["request_id"])).metrics["gradient:sum"] == 4


async def test_an_old_client_trains_with_json(api: Api, echo: EchoExecutor) -> None:
    model = await api.model(await api.session("0.4.1"))
    forward = await api.step("forward", **old_pass(model, 1, key="forward_input", tokens=9))
    backward = await api.step(
        "forward_backward", **old_pass(model, 2, key="forward_backward_input", tokens=4)
    )
    assert (await api.result(forward))["metrics"]["gradient:sum"] == 0
    assert (await api.result(backward))["metrics"]["gradient:sum"] == 4
    step = await api.step("optim_step", model_id=model, seq_id=3, adam_params={})
    assert await api.value(step) == 4
    # The engine always gets the normalized encoding.
    passes = [work for work in echo.ran if work.HasField("run_pass")]
    assert [work.run_pass.backward for work in passes] == [False, True]
    assert b"{" not in passes[0].run_pass.payload.inline


async def test_a_forward_only_pass_adds_no_gradient(api: Api) -> None:
    model = await api.model()
    body = pass_body(model, 1, 4, forward_only=True)
    answer = await api.post("forward_backward", body, headers=PROTOBUF)
    assert (await api.passed(answer.json["request_id"])).metrics["gradient:sum"] == 0


async def test_a_base_model_may_carry_a_suffix(api: Api) -> None:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": f"{BASE}:peft:262144",
        "lora_config": {"rank": 8},
    }
    made = (await api.post("create_model", body)).json
    await api.result(made["request_id"])
    info = (await api.post("get_info", {"model_id": made["model_id"]})).json
    assert info["model_name"] == BASE


async def test_a_model_without_a_seed_gets_one_that_stays(api: Api, echo: EchoExecutor) -> None:
    model = await api.model()
    echo.die()
    await api.value(await api.optim_step(model, 1))
    first, again = [json.loads(w.create.lora_config) for w in echo.ran if w.HasField("create")]
    assert first == again
    assert isinstance(first["seed"], int)
