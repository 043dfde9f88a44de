"""API keys, their error messages, and tokens."""

import asyncio
import base64
import contextlib
import hmac
import json
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import everything_kept, is_private, new_key, revoke, secrets_in, with_key
from tinkex.server.api import auth
from tinkex.server.api.auth import BadToken, Tokens
from tinkex.server.folder_lock import lock_folder
from tinkex.server.store.keys import hashed
from tinkex.server.store.server_secrets import LINKS, TOKENS

pytestmark = pytest.mark.anyio

ME = "/api/v1/auth/apikey/me"


@pytest.fixture
def quick() -> Iterator[None]:
    """The authenticator reads the database every time."""
    believed, auth.KEY_CACHE_TTL_S = auth.KEY_CACHE_TTL_S, 0.0
    yield
    auth.KEY_CACHE_TTL_S = believed


async def test_without_keys_all_requests_belong_to_local(api: Api) -> None:
    async with with_key(api, "tml-anything") as other:
        about = (await other.get(ME)).json
    assert about["details"]["user_details"] == {"email": "local"}
    assert about["key_id"] == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a foreign name that resolves to this machine
        {"Host": "evil.example:8000"},
        {"Host": "[::2]:8000"},
        {"Origin": "https://evil.example"},  # a page of another site in a local browser
        {"Origin": "null"},  # a file or a sandboxed frame
        {"Origin": "http://127.0.0.1.evil.example"},
        {"Origin": "http://127.0.0.1@evil.example"},
        {"Origin": "file://"},
    ],
)
async def test_without_keys_a_web_page_of_another_site_is_refused(
    api: Api, headers: dict[str, str]
) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    refused = await api.post("create_session", body, headers=headers)
    assert refused.status == 403
    assert "tinkex key create" in refused.json["detail"]


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}])
async def test_metrics_without_a_key_are_not_for_web_pages_of_other_sites(
    api: Api, headers: dict[str, str]
) -> None:
    async with api.http.get("/metrics", headers=headers) as got:
        assert got.status == 403
    assert (await api.get("/metrics")).status == 200


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:9", "127.3.2.1:80"])
async def test_all_loopback_names_are_accepted(api: Api, host: str) -> None:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert (await api.post("create_session", body, headers=headers)).status == 200


async def test_the_first_key_closes_a_running_server(api: Api, tmp_path: Path, quick: None) -> None:
    session = await api.session()
    key = await new_key(tmp_path, "local", name="mine")
    refused = await api.post("session_heartbeat", {"session_id": session})
    assert refused.status == 401
    assert "TINKER_API_KEY" in refused.json["detail"]
    assert "tinkex key create" in refused.json["detail"]
    async with with_key(api, key) as mine:
        # Data from before the first key belongs to `local`.
        assert (await mine.post("session_heartbeat", {"session_id": session})).status == 200
        assert (await mine.get(ME)).json["name"] == "mine"


async def test_no_request_is_allowed_before_the_first_key_check(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path):
        await new_key(tmp_path, "local")
    async with hosted(echo, tmp_path) as api:
        answers = await asyncio.gather(*(api.get(ME) for _ in range(20)))
    assert {answer.status for answer in answers} == {401}


async def test_refusals_distinguish_missing_unknown_revoked_and_expired_keys(
    api: Api, tmp_path: Path, quick: None
) -> None:
    revoked = await new_key(tmp_path, "alice", name="old laptop")
    expired = await new_key(tmp_path, "alice", expires_s=1.0)
    await revoke(tmp_path, 1)
    for key, text in [
        (None, "without one"),
        ("tml-nobody", "not known"),
        (revoked, "(old laptop) is revoked"),
        (expired, "is expired"),
        ("eyJ.a.b", "was not signed by this server"),
        ("eyJé", "is not a token"),
    ]:
        headers = None if key is None else {"X-API-Key": key}
        async with with_key(api, None, headers) as other:
            refused = await other.post("create_session", {"sdk_version": "0.36.0", "tags": []})
        assert refused.status == 401
        assert text in refused.json["detail"]
        assert key is None or key not in refused.json["detail"]


async def test_a_revoked_key_stops_within_seconds(api: Api, tmp_path: Path) -> None:
    await new_key(tmp_path, "operator")
    await asyncio.sleep(auth.KEY_CACHE_TTL_S)
    key = await new_key(tmp_path, "alice")
    async with with_key(api, key) as alice:
        assert (await alice.get(ME)).status == 200
        await revoke(tmp_path, 2)
        await asyncio.sleep(auth.KEY_CACHE_TTL_S)
        assert "is revoked" in (await alice.get(ME)).json["detail"]


async def test_a_client_can_revoke_its_own_key(api: Api, tmp_path: Path, quick: None) -> None:
    key = await new_key(tmp_path, "alice")
    async with with_key(api, key) as alice, alice.http.delete(ME) as deleted:
        assert deleted.status == 200
        assert (await alice.get(ME)).status == 401
    # The last key is revoked, and the server stays closed.
    assert (await api.get(ME)).status == 401


async def test_no_key_is_stored_and_the_database_is_private(api: Api, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice")
    assert len(key) >= len("tml-") + 22
    kept = everything_kept(tmp_path)
    assert key.encode() not in kept
    assert hashed(key).encode() in kept
    assert is_private(tmp_path / "tinkex.db")


@pytest.mark.parametrize("cut", [b"", b"x" * 31])
def test_a_truncated_secret_file_of_tinkex_0_1_is_not_used(tmp_path: Path, cut: bytes) -> None:
    """With an empty secret anyone could make tokens."""
    (tmp_path / "tokens.key").write_bytes(cut)
    secrets = secrets_in(tmp_path)
    assert len(secrets[TOKENS]) == 32
    forged = made_by_hand({"exp": 2e9, "key_id": 1}, cut)
    with pytest.raises(BadToken):
        Tokens(secrets[TOKENS]).read(forged, now_s=0)


def test_the_secret_files_of_tinkex_0_1_move_into_the_database(tmp_path: Path) -> None:
    """Links and tokens of before the update stay valid."""
    files = {LINKS: tmp_path / "signing.key", TOKENS: tmp_path / "tokens.key"}
    for number, file in enumerate(files.values()):
        file.write_bytes(bytes([number + 1]) * 32)
    token = Tokens(files[TOKENS].read_bytes()).make({"exp": 2e9, "key_id": 1})
    for _ in range(2):
        secrets = secrets_in(tmp_path)
        assert Tokens(secrets[TOKENS]).read(token, now_s=0)["key_id"] == 1
        assert secrets[LINKS] == b"\1" * 32
        assert not any(file.exists() for file in files.values())


def test_a_new_data_folder_is_private(tmp_path: Path) -> None:
    """Also the database, in a readable folder, created before the first start."""
    new, old = tmp_path / "new", tmp_path / "old"
    before = os.umask(0o022)
    try:
        old.mkdir()
        for folder in (new, old):
            asyncio.run(new_key(folder, "alice"))
        with lock_folder(tmp_path / "held"):
            pass
    finally:
        os.umask(before)
    assert is_private(new)
    assert is_private(tmp_path / "held")
    assert not is_private(old)
    assert is_private(old / "tinkex.db")


async def test_a_session_has_the_project_of_its_key_by_default(
    api: Api, tmp_path: Path, quick: None
) -> None:
    key = await new_key(tmp_path, "alice", project_id="vision")
    async with with_key(api, key) as alice:
        assert (await alice.get(ME)).json["details"]["org_details"] == {"name": "vision"}
        assert await alice.session()


async def test_a_token_is_valid_as_long_as_its_key(
    echo: EchoExecutor, tmp_path: Path, quick: None
) -> None:
    async with hosted(echo, tmp_path, jwt=True, jwt_s=600.0) as api:
        key = await new_key(tmp_path, "alice", project_id="vision")
        async with with_key(api, key) as alice:
            config = (await alice.post("client/config", {"sdk_version": "0.36.0"})).json
            assert config["pjwt_auth_enabled"] is True
            # The flag is not sent to versions that do not know it, or to unknown versions.
            for version in ("0.4.1", "9.0.0", "nightly"):
                config = (await alice.post("client/config", {"sdk_version": version})).json
                assert "pjwt_auth_enabled" not in config
            token = (await alice.post("auth/token", {})).json["jwt"]
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        assert claims["sub"] == "tml:user:alice"
        assert claims["org_id"] == "vision"
        assert claims["iss"].startswith("passport-")
        assert claims["exp"] - claims["iat"] == 600
        async with with_key(api, token) as alice:
            assert (await alice.get(ME)).json["details"]["user_details"]["email"] == "alice"
            again = await alice.post("auth/token", {})
            assert again.status == 400
            assert "the API key itself" in again.json["detail"]
            await revoke(tmp_path, 1)
            assert (await alice.get(ME)).status == 401


async def test_a_token_cannot_revoke_its_key(
    echo: EchoExecutor, tmp_path: Path, quick: None
) -> None:
    """A token is valid for an hour; revoking its key would be permanent."""
    async with hosted(echo, tmp_path, jwt=True) as api:
        key = await new_key(tmp_path, "alice")
        async with with_key(api, key) as alice:
            token = (await alice.post("auth/token", {})).json["jwt"]
            async with with_key(api, token) as other, other.http.delete(ME) as refused:
                assert refused.status == 403
                assert "Send the API key itself" in (await refused.json())["detail"]
                assert (await other.get(ME)).status == 200
            assert (await alice.get(ME)).status == 200
            async with alice.http.delete(ME) as done:
                assert done.status == 200


SECRET = bytes(range(32))


def in_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def made_by_hand(
    claims: dict[str, Any], secret: bytes = SECRET, digest: str = "sha256", **head: str
) -> str:
    """A signed token, made without the code under test."""
    parts = {"alg": "HS256", "typ": "JWT", **head}, {"iss": auth.ISSUER, **claims}
    signed = ".".join(in_base64(json.dumps(part).encode()) for part in parts)
    return f"{signed}.{in_base64(hmac.new(secret, signed.encode(), digest).digest())}"


def test_tokens_issued_by_earlier_versions_are_valid() -> None:
    token = (
        "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJwYXNzcG9ydC10aW5rZXgiLCJzdWIiOiJ0bWw6dXNl"
        "cjphbGljZSIsIm9yZ19pZCI6InZpc2lvbiIsImVtYWlsIjoiIiwia2V5X2lkIjo3LCJpYXQiOjE3MDAwMDAwMDAsIm"
        "V4cCI6MTcwMDAwMzYwMH0.U_JeAzA-H3yE2Tir4ZGdKBIlfQwD3QSPoeB2J0crPpQ"
    )
    claims = Tokens(SECRET).read(token, now_s=1_700_003_599.0)
    assert (claims["sub"], claims["key_id"]) == ("tml:user:alice", 7)
    # New ones are made byte for byte alike.
    assert Tokens(SECRET).make(claims) == token


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        (made_by_hand({"exp": 100}, alg="none"), "not signed"),
        (made_by_hand({"exp": 100}, alg="HS512"), "not signed"),
        (made_by_hand({"exp": 100}, digest="sha512", alg="HS512"), "not signed"),
        (made_by_hand({"exp": 100}, b"x" * 32), "not signed"),
        (made_by_hand({"exp": 100, "iss": "passport-other"}), "not signed"),
        (made_by_hand({}), "not signed"),
        (made_by_hand({"exp": 100}) + "=", "not signed"),
        ("eyJ!.eyJ!.x", "not signed"),
        ("eyJ.x", "not a token"),
        ("eyJ.é.x", "not a token"),
        (made_by_hand({"exp": 100, "a": "a" * auth.MAX_JWT_BYTES}), "not a token"),
        (made_by_hand({"exp": 99}), "expired"),
    ],
)
def test_a_bad_token_is_refused_with_the_reason(token: str, problem: str) -> None:
    tokens = Tokens(SECRET)
    assert tokens.read(made_by_hand({"exp": 100}), now_s=99.0)["exp"] == 100
    with pytest.raises(BadToken, match=problem):
        tokens.read(token, now_s=99.0)


def test_a_signature_has_one_spelling() -> None:
    token = made_by_hand({"exp": 100})
    accepted = []
    for character in string.ascii_letters + string.digits + "-_":
        with contextlib.suppress(BadToken):
            Tokens(SECRET).read(token[:-1] + character, now_s=99.0)
            accepted.append(token[:-1] + character)
    assert accepted == [token]


def test_a_changed_or_expired_token_is_refused() -> None:
    tokens = Tokens(SECRET)
    token = tokens.make({"sub": "a", "exp": 100})
    assert tokens.read(token, now_s=99.0) == {"iss": auth.ISSUER, "sub": "a", "exp": 100}
    head, body, signature = token.split(".")
    forged = base64.urlsafe_b64encode(b'{"sub":"b","exp":100}').decode().rstrip("=")
    nothing = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    for bad in (
        f"{head}.{forged}.{signature}",
        f"{nothing}.{body}.",
        f"{head}.{body}",
        Tokens(b"other" * 7).make({"exp": 100}),
    ):
        with pytest.raises(BadToken):
            tokens.read(bad, now_s=99.0)
    with pytest.raises(BadToken, match="expired"):
        tokens.read(token, now_s=100.0)


async def test_another_accounts_key_lets_one_request_read_its_checkpoint(
    api: Api, tmp_path: Path, quick: None
) -> None:
    alices = await new_key(tmp_path, "alice")
    bobs = await new_key(tmp_path, "bob")
    async with with_key(api, alices) as alice, with_key(api, bobs) as bob:
        model = await alice.model()
        await alice.forward_backward(model, 1, tokens=6)
        await alice.optim_step(model, 2)
        saved = await alice.result(
            await alice.step("save_weights", model_id=model, seq_id=3, path="six")
        )
        path = saved["path"]
        session = await bob.session()
        mine = await bob.model(session)
        assert (await bob.post("weights_info", {"tinker_path": path})).status == 404
        refused = await bob.result(
            await bob.step("load_weights", model_id=mine, seq_id=1, path=path)
        )
        assert refused["category"] == "user"
        wrong = {"model_id": mine, "seq_id": 2, "path": path, "weights_access_token": "tml-no"}
        assert (await bob.post("load_weights", wrong)).status == 403
        lent = {"weights_access_token": alices}
        loaded = await bob.result(
            await bob.step("load_weights", model_id=mine, seq_id=2, path=path, **lent)
        )
        assert loaded["path"] == path
        assert await bob.value(await bob.optim_step(mine, 3)) == 12
        # The same when creating from the checkpoint, and with the header.
        created = await bob.step(
            "load_weights", session_id=session, model_seq_id=1, path=path, optimizer=False, **lent
        )
        assert (await bob.result(created))["model_id"] == f"{session}:train:1"
        header = {"X-Tinker-Weights-Access-Token": alices}
        reported = await bob.post("weights_info", {"tinker_path": path}, headers=header)
        assert reported.json["lora_rank"] == 8
        # Nothing more is allowed, and the shared key is not stored.
        assert (await bob.get(f"/api/v1/training_runs/{model}")).status == 404
    assert alices.encode() not in everything_kept(tmp_path)
