"""Malformed requests get a clear error with the path of the field, and the server keeps serving."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zstandard

from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Answer, Api, hosted, pass_body

pytestmark = pytest.mark.anyio

ZSTD = {**PROTOBUF, "Content-Encoding": "zstd"}

Case = Callable[[Api, str, str], Awaitable[Answer]]


def create(**changes: Any) -> Case:
    async def send(api: Api, session: str, _model: str) -> Answer:
        body = {
            "session_id": session,
            "model_seq_id": 7,
            "base_model": BASE,
            "lora_config": {"rank": 8},
        }
        body.update(changes)
        return await api.post(
            "create_model", {key: value for key, value in body.items() if value is not ...}
        )

    return send


def post(path: str, body: Any, **headers: str) -> Case:
    async def send(api: Api, session: str, model: str) -> Answer:
        sent = body
        if isinstance(body, dict):
            sent = {
                key: value.format(session=session, model=model) if isinstance(value, str) else value
                for key, value in body.items()
            }
        return await api.post(
            path, sent, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return send


def protobuf(change: Callable[[bytes], bytes], headers: dict[str, str]) -> Case:
    async def send(api: Api, _session: str, model: str) -> Answer:
        return await api.post("forward_backward", change(pass_body(model, 1)), headers=headers)

    return send


@pytest.fixture(scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """One server with low limits for all cases: it must survive each."""
    folder = tmp_path_factory.mktemp("strict")
    limits = {"max_body_bytes": 200_000, "max_decoded_bytes": 400_000}
    async with hosted(EchoExecutor(), folder, **limits) as api:
        yield api


PASS = {"forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}, "model_id": "{model}"}

CASES: list[tuple[str, Case, int, str]] = [
    ("unknown base model", create(base_model="nobody/none"), 400, f"Served: {BASE}"),
    ("no base model", create(base_model=...), 422, "base_model"),
    ("a rank that is text", create(lora_config={"rank": "8"}), 422, "rank"),
    ("an unknown LoRA setting", create(lora_config={"rank": 8, "alpha": 1}), 400, "alpha"),
    ("all weights", create(lora_config=...), 400, "lora_config"),
    ("a session there is not", create(session_id="none"), 404, "create_session"),
    ("a negative number", create(model_seq_id=-1), 422, "model_seq_id"),
    ("not JSON", post("create_session", b"{"), 422, "invalid JSON"),
    ("a list for an object", post("create_session", b"[]"), 422, "detail"),
    ("no version", post("create_session", {"tags": [], "user_metadata": {}}), 422, "sdk_version"),
    ("a model there is not", post("get_info", {"model_id": "none"}), 404, "create_model"),
    (
        "a step of a model there is not",
        post("optim_step", {"model_id": "none", "seq_id": 1, "adam_params": {}}),
        404,
        "create_model",
    ),
    (
        "no optimizer parameters",
        post("optim_step", {"model_id": "{model}", "seq_id": 1}),
        422,
        '["body","adam_params"]',
    ),
    ("a pass without a number", post("forward_backward", PASS), 422, "seq_id"),
    (
        "a pass without data",
        post("forward_backward", {"model_id": "{model}", "seq_id": 1}),
        422,
        "forward_backward_input",
    ),
    (
        "tokens that are text",
        post(
            "forward_backward",
            {
                "model_id": "{model}",
                "seq_id": 1,
                "forward_backward_input": {
                    "data": [
                        {"model_input": {"chunks": [{"tokens": ["a"]}]}, "loss_fn_inputs": {}}
                    ],
                    "loss_fn": "cross_entropy",
                },
            },
        ),
        422,
        '"data",0,"model_input"',
    ),
    (
        "a stop that is neither text nor tokens",
        post(
            "asample",
            {
                "base_model": BASE,
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {"max_tokens": 1, "stop": [1.5]},
            },
        ),
        422,
        '[{"loc":["body","sampling_params","stop"],"msg":"expected a string, a list of strings or',
    ),
    *(
        (
            f"{name} {number}",
            post(
                "asample",
                b'{"base_model": "%s", "prompt": {"chunks": [{"tokens": [1]}]}, '
                b'"sampling_params": {"max_tokens": 1, "%s": %s}}'
                % (BASE.encode(), name.encode(), number.encode()),
            ),
            422,
            f'"sampling_params","{name}"',
        )
        for name in ("temperature", "top_p")
        for number in ("1e309", "-1e309", "null")
    ),
    *(
        (
            f"a page that starts at {moment}",
            post("sessions/search", {"cursor": {"last_created_at": moment, "last_session_id": ""}}),
            422,
            '"cursor","last_created_at"',
        )
        for moment in ("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59")
    ),
    ("protobuf cut off", protobuf(lambda body: body[:-3], PROTOBUF), 422, "detail"),
    ("protobuf that is noise", protobuf(lambda _: b"\xff" * 40, PROTOBUF), 422, "detail"),
    ("an empty protobuf", protobuf(lambda _: b"", PROTOBUF), 422, "detail"),
    ("zstd that is not", protobuf(lambda body: body, ZSTD), 422, "zstd"),
    (
        "zstd cut off",
        protobuf(lambda body: zstandard.compress(body * 50)[:-20], ZSTD),
        422,
        "detail",
    ),
    (
        "an unknown encoding",
        protobuf(lambda body: body, {**PROTOBUF, "Content-Encoding": "br"}),
        422,
        "Content-Encoding",
    ),
    ("a body that is too large", post("create_session", b" " * 300_000), 413, "200000 are allowed"),
    (
        "a body that unpacks to too much",
        protobuf(lambda _: zstandard.compress(b"\0" * 10_000_000), ZSTD),
        413,
        "400000",
    ),
    ("a request there is not", post("retrieve_future", {"request_id": "none"}), 404, "submit"),
    ("no request", post("retrieve_future", {}), 422, "request_id"),
    (
        "a sampler of nothing",
        post("create_sampling_session", {"session_id": "{session}", "sampling_session_seq_id": 0}),
        422,
        "base_model",
    ),
    (
        "a sampler of a base model there is not",
        post(
            "create_sampling_session",
            {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": "no/no"},
        ),
        400,
        f"Served: {BASE}",
    ),
    (
        "a sampler of a checkpoint there is not",
        post(
            "create_sampling_session",
            {
                "session_id": "{session}",
                "sampling_session_seq_id": 0,
                "model_path": "tinker://a/weights/b",
            },
        ),
        404,
        "tinker://a/weights/b",
    ),
    (
        "a path that is none",
        post("weights_info", {"tinker_path": "s3://bucket/x"}),
        400,
        "tinker://RUN/KIND/NAME",
    ),
    (
        "a checkpoint there is not",
        post("weights_info", {"tinker_path": "tinker://a/weights/b"}),
        404,
        "b",
    ),
    (
        "a sample of nothing",
        post("asample", {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}}),
        400,
        "sampling_session_id",
    ),
    (
        "a billion samples",
        post(
            "asample",
            {
                "prompt": {"chunks": [{"tokens": [1]}]},
                "sampling_params": {},
                "base_model": BASE,
                "num_samples": 10**9,
            },
        ),
        422,
        "num_samples",
    ),
    ("a path there is not", post("no_such_route", {}), 404, "/docs"),
]


@pytest.mark.parametrize(
    ("send", "status", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
async def test_bad_input_gets_a_clear_answer_and_the_server_keeps_serving(
    send: Case, status: int, says: str, strict: Api
) -> None:
    session = await strict.session()
    model = await strict.model(session)
    answer = await send(strict, session, model)
    assert answer.status == status, answer
    assert "detail" in answer.json
    assert says in answer.body.decode()
    # Nothing was accepted: the model's next number is still 1.
    await strict.forward_backward(model, 1, tokens=3)
    assert await strict.value(await strict.optim_step(model, 2)) == 3
