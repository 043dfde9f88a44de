"""Keys and tokens in unexpected places never appear in logs, data folder, answers or metrics."""

import io
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted, pass_body
from server.tenants import everything_kept, new_key, revoke, with_key
from tinkex.server.api.auth import WEIGHTS_TOKEN
from tinkex.server.api.errors import Refusal
from tinkex.server.process_setup import LOG_FORMAT
from tinkex.server.settings import Settings
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.redaction import RedactingFormatter, redact, redact_value

pytestmark = pytest.mark.anyio

SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log of a server process, at all levels."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(RedactingFormatter(LOG_FORMAT))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.setLevel(before)
    root.removeHandler(handler)


class Told:
    """A client that keeps all answers."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.answers: list[str] = []
        self.statuses: set[int] = set()

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> str:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        url = URL(f"{str(self._api.http._base_url).rstrip('/')}{path}", encoded=True)
        async with self._api.http.request(
            method, url, data=data, headers=sent, allow_redirects=False
        ) as got:
            text = (await got.read()).decode(errors="replace")
            self.answers.append(f"{dict(got.headers)}\n{text}")
            self.statuses.add(got.status)
            return text


async def odd_requests(reported: Told, secret: str, model: str, session: str) -> None:
    """Requests with the secret in every place where a user might put it."""
    v1 = "/api/v1"
    for name in ("X-API-Key", "Authorization", "Cookie", WEIGHTS_TOKEN, "X-Idempotency-Key"):
        for value in (secret, f"Bearer {secret}", f"{secret}x"):
            await reported.ask("POST", f"{v1}/create_session", SESSION, {name: value})
            copy = {"source_path": f"tinker://{model}/weights/a", "destination_project_id": "p"}
            await reported.ask("POST", f"{v1}/copy_weights", copy, {name: value})
    await reported.ask("GET", "/metrics", headers={"Host": secret})
    for query in (f"limit={secret}", f"api_key={secret}", f"offset={secret}&access_scope={secret}"):
        await reported.ask("GET", f"{v1}/sessions?{query}")
    await reported.ask("GET", f"{v1}/audit?day={secret}&event_type={secret}")
    for path in (
        *(f"sessions/{secret}", f"training_runs/{secret}", f"samplers/{secret}", secret),
        f"training_runs/{model}/checkpoints/weights/{secret}/archive",
        f"downloads/{secret}/x?expires=1&signature={secret}",
        f"signed/traces/{secret}?expires=1&signature={secret}",
    ):
        await reported.ask("GET", f"{v1}/{path}")
        await reported.ask("DELETE", f"{v1}/{path}")
    for route in ("create_session", "get_info", "asample", "forward_backward", "optim_step"):
        for body in (
            secret.encode(),
            {secret: secret},
            {"model_id": secret, "session_id": secret, "seq_id": secret},
            {**SESSION, "tags": secret},
            {"model_id": model, "seq_id": 99, "adam_params": {secret: 1}},
            {"prompt": {"chunks": [{"type": secret}]}, "sampling_params": {"stop": {"x": secret}}},
        ):
            await reported.ask("POST", f"{v1}/{route}", body)
    await reported.ask("POST", f"{v1}/create_session", SESSION, {"Content-Encoding": secret})
    await reported.ask("POST", f"{v1}/forward_backward", pass_body(secret, 1), PROTOBUF)
    await reported.ask("POST", f"{v1}/retrieve_future", {"request_id": secret})
    lora = {"session_id": session, "model_seq_id": 8, "lora_config": {"rank": 8}}
    await reported.ask("POST", f"{v1}/create_model", {**lora, "base_model": secret})
    load = {"model_id": model, "path": f"tinker://{model}/weights/a", "optimizer": False}
    for number in (5, 6):
        body = {**load, "seq_id": number, "weights_access_token": secret}
        await reported.ask("POST", f"{v1}/load_weights", body)
    made = {"session_id": session, "model_seq_id": 3, "path": load["path"]}
    await reported.ask("POST", f"{v1}/load_weights", {**made, "weights_access_token": secret})
    event = {
        "event": "UNHANDLED_EXCEPTION",
        "event_id": "1",
        "error_type": f"X{secret}",
        "error_message": f"401 for {secret}",
        "traceback": secret,
        "event_data": {"headers": {"X-API-Key": secret}},
    }
    batch = {"events": [event], "platform": secret, "sdk_version": secret, "session_id": session}
    await reported.ask("POST", f"{v1}/telemetry", batch)
    ended = json.loads(await reported.ask("POST", f"{v1}/create_session", SESSION))["session_id"]
    words = {"reason": {"type": "errored"}, "detail": f"Traceback ... {secret}"}
    await reported.ask("POST", f"{v1}/sessions/{ended}/finish", words)


async def test_no_secret_is_logged_kept_or_answered(
    tmp_path: Path, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: await new_key(tmp_path, name) for name in ("alice", "bob", "carol")}
    await revoke(tmp_path, 3)
    async with (
        hosted(EchoExecutor(), tmp_path, jwt=True, long_poll_s=0.05, gap_s=0.1) as nobody,
        with_key(nobody, keys["alice"]) as alice,
    ):
        token = (await alice.post("auth/token", {})).json["jwt"]
        session = await alice.session()
        model = await alice.model(session)
        await alice.result(await alice.step("save_weights", model_id=model, seq_id=1, path="a"))
        reported = Told(alice)
        secrets = {**keys, "token": token}
        for secret in secrets.values():
            await odd_requests(reported, secret, model, session)

        # A bug with a secret in its message.
        async def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"cannot connect with {keys['alice']} and {token}")

        assert nobody.app
        store = nobody.app.state.context.store
        monkeypatch.setattr(type(store.sessions), "list_ids", broken)
        answer = await reported.ask("GET", "/api/v1/sessions")
        number = re.search(r"under the id (\w+)", answer)
        assert number
        assert number[1] in log.getvalue()
        metrics = (await nobody.get("/metrics")).body.decode()
    assert {200, 400, 401, 403, 404, 422, 500} <= reported.statuses
    kept = everything_kept(tmp_path)
    for name, secret in secrets.items():
        assert secret not in log.getvalue(), f"{name} is in the log"
        assert secret.encode() not in kept, f"{name} is in the data folder"
        assert secret not in metrics
        for one in reported.answers:
            assert secret not in one, f"{name} is in an answer: {one[:600]}"
    # What signs links and tokens is in the database and nowhere else.
    database = (tmp_path / "tinkex.db").read_bytes()
    for secret in store.secrets.values():
        assert kept.count(secret) == database.count(secret) == 1


def test_failures_do_not_carry_secrets_through_a_pickle() -> None:
    """A pickled failure has only the redacted text."""
    for failure in (UserFailure("no"), WireError("no"), Refusal(401, "no")):
        assert b"tml-" not in pickle.dumps(failure)


def test_a_printed_setting_has_no_password(tmp_path: Path) -> None:
    settings = Settings(data=str(tmp_path), db="postgresql+psycopg://me:hunter2@host/db")
    assert "hunter2" not in "".join(settings.lines())


def test_secrets_are_redacted_and_names_are_kept() -> None:
    key = "tml-" + "aB3" * 10
    assert redact(f"key {key}, token eyJhbGciOi.eyJzdWIi.sig-x_1 end") == "key ***, token *** end"
    assert redact("key tml-aB3d… is revoked") == "key tml-aB3d… is revoked"
    assert redact("/x?expires=1&signature=" + "0a" * 32) == "/x?expires=1&signature=***"
    assert redact_value({"detail": [{"loc": [key, 1]}]}) == {"detail": [{"loc": ["***", 1]}]}


def test_a_log_entry_is_one_line_without_control_characters(log: io.StringIO) -> None:
    """Quoted input must not look like another entry."""
    forged = "a\n2026-01-01 tinkex key tml-0123456789abcdef made\r\x1b[2J\x9b1m\u2028b"
    logging.getLogger("tinkex.test").error("there is no %s", forged)
    (line,) = log.getvalue().splitlines()
    assert line.endswith(r"no a\n2026-01-01 tinkex key *** made\r\x1b[2J\x9b1m\u2028b")
    try:
        raise ValueError("\x1b[2Jtml-0123456789abcdef")
    except ValueError:
        logging.getLogger("tinkex.test").exception("failed")
    assert log.getvalue().count("\n") > 4, "a traceback has lines"
    assert "\x1b" not in log.getvalue()
    assert "tml-0" not in log.getvalue()


def test_an_engine_uses_the_same_log_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinkex.engine import process

    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(root, "handlers", [])  # as in a new process
    process._begin_log(rank=0)
    logging.getLogger("x").error("%s", "tml-0123456789abcdef\n\x1b")
    root.setLevel(level)
    assert capsys.readouterr().err.endswith("engine ***\\n\\x1b\n")
