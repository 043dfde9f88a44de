"""JWTs with tinkex as client and server: renewal, and errors of keys."""

import asyncio
import time
from pathlib import Path

import pytest

import tinkex
from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, revoke
from tinkex import types
from tinkex.client.connection import Connection

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def address(api: Api) -> str:
    return str(api.http._base_url).rstrip("/")


def connection(service: tinkex.ServiceClient) -> Connection:
    found = service.holder._connected.value
    assert found is not None
    return found


DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


async def test_jwts_are_renewed_during_a_long_loop(anyio_backend: str, tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice", project_id="vision")
    async with hosted(EchoExecutor(), tmp_path, jwt=True, jwt_s=2.0) as api:
        service = tinkex.ServiceClient(base_url=address(api), api_key=key)
        training = await service.create_lora_training_client_async(BASE)
        sampling = await service.create_sampling_client_async(base_model=BASE)
        tokens, deadline, rounds = set(), time.monotonic() + 30, 0
        while (len(tokens) < 3 or rounds < 10) and time.monotonic() < deadline:
            step = training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams())
            sample = sampling.sample(
                types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=1)
            )
            await asyncio.gather(step, sample)
            tokens.add(await service.holder.run(connection(service).credential.token()))
            rounds += 1
            await asyncio.sleep(0.02)
        assert 3 <= len(tokens) < rounds  # renewed when they expire, not for every request
        assert all(token is not None and token.startswith("eyJ") for token in tokens)
        await asyncio.sleep(2.2)  # longer than the lifetime of a JWT
        await service.get_server_capabilities_async()
        claims = await service.holder.run(connection(service).credential.claims())
        assert claims["sub"] == "tml:user:alice"
        assert claims["org_id"] == "vision"
        await service.close("success")


async def test_a_server_without_jwts_accepts_the_key_itself(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await new_key(tmp_path, "alice")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {key}")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    async with hosted(EchoExecutor(), tmp_path) as api:
        service = tinkex.ServiceClient(base_url=address(api))
        await service.get_server_capabilities_async()
        with pytest.raises(RuntimeError, match="accepts the key itself"):
            await service.holder.run(connection(service).credential.claims())
        await service.close("success")


async def test_missing_wrong_and_revoked_keys_have_different_errors(
    anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    key = await new_key(tmp_path, "alice", name="old laptop")
    async with hosted(EchoExecutor(), tmp_path, jwt=True, jwt_s=2.0) as api:

        async def error_of(api_key: str | None) -> str:
            service = tinkex.ServiceClient(base_url=address(api), api_key=api_key)
            with pytest.raises(tinkex.AuthenticationError) as caught:
                await service.get_server_capabilities_async()
            await service.close("errored")
            return str(caught.value)

        assert "came without one" in await error_of(None)
        assert "not known" in await error_of("tml-of-another-server")
        running = tinkex.ServiceClient(base_url=address(api), api_key=key)
        await running.get_server_capabilities_async()
        await revoke(tmp_path, 1)
        await asyncio.sleep(2.1)  # the server caches keys for two seconds
        with pytest.raises(tinkex.AuthenticationError, match="revoked"):
            await running.get_server_capabilities_async()
        await running.close("errored")
        assert "revoked" in await error_of(key)
