"""Usage by API key: what each key used, whatever became of it."""

from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, revoke, with_key

pytestmark = pytest.mark.anyio

PATH = "/api/v1/billing/usage/keys"


async def used(api: Api) -> dict[tuple[str, str | None, str | None], int]:
    """Trained tokens by owner, name and state of the key."""
    answer = await api.get(PATH)
    assert answer.status == 200, answer
    return {
        (one["owner"], one.get("name"), one.get("state")): one["training"]
        for one in answer.json["data"]
    }


async def train(api: Api, tokens: int, *, model_id: str | None = None, seq_id: int = 1) -> str:
    """A pass over so many tokens; returns its model."""
    model = model_id or await api.model(await api.session())
    await api.passed(await api.forward_backward(model, seq_id, tokens=tokens))
    return model


async def test_each_owner_sees_its_keys_and_an_administrator_all(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        # Before there are keys, there is nothing to report.
        await train(api, 7)
        assert await used(api) == {}
    laptop = await new_key(tmp_path, "alice", name="laptop")
    box = await new_key(tmp_path, "alice", name="box")
    other = await new_key(tmp_path, "bob")
    admin = await new_key(tmp_path, "local", name="root", is_admin=True)
    async with (
        hosted(EchoExecutor(), tmp_path, prices=("*=2",)) as api,
        with_key(api, laptop) as one,
        with_key(api, box) as two,
        with_key(api, other) as bob,
        with_key(api, admin) as root,
    ):
        # Two keys of an owner share a run. Usage belongs to the key of each request.
        model = await train(one, 10)
        await train(two, 20, model_id=model, seq_id=2)
        # A repeat with another key is the request of the first.
        await two.forward_backward(model, 1, tokens=10)
        await train(bob, 5)
        token = (await one.post("auth/token", {})).json["jwt"]
        async with with_key(api, token) as by_token:
            await train(by_token, 1, model_id=model, seq_id=3)
        alice = {("alice", "laptop", "active"): 11, ("alice", "box", "active"): 20}
        assert await used(one) == await used(two) == alice
        assert await used(bob) == {("bob", "", "active"): 5}
        await revoke(tmp_path, 2)
        gone = {("alice", "laptop", "active"): 11, ("alice", "box", "revoked"): 20}
        assert await used(one) == gone
        # Usage from before has no key.
        assert await used(root) == {
            **gone,
            ("bob", "", "active"): 5,
            ("local", None, None): 7,
        }
        (item,) = (await bob.get(PATH)).json["data"]
        assert item["hint"] == other[:8]
        assert item["estimated_cost_usd"] == pytest.approx(5 * 2 / 1e6)
        for days, status in ((0, 422), (91, 422), (1, 200), (90, 200)):
            assert (await bob.get(f"{PATH}?days={days}")).status == status


async def test_a_request_that_a_restart_finishes_counts_for_its_key(tmp_path: Path) -> None:
    key = await new_key(tmp_path, "alice", name="laptop")
    executor = EchoExecutor()
    executor.open.clear()
    async with hosted(executor, tmp_path) as api, with_key(api, key) as one:
        model = await one.post("create_model", await creation(one))
        model_id = model.json["model_id"]
        await one.forward_backward(model_id, 1, tokens=12)
    async with hosted(EchoExecutor(), tmp_path) as api, with_key(api, key) as one:
        await one.passed(await one.forward_backward(model_id, 1, tokens=12))
        assert await used(one) == {("alice", "laptop", "active"): 12}


async def creation(api: Api) -> dict[str, Any]:
    return {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": api.base_model,
        "lora_config": {"rank": 8},
    }
