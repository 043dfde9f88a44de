"""Per-owner and per-key state of a server is bounded."""

from types import SimpleNamespace
from typing import Any

import pytest

from tinkex.server.api import auth
from tinkex.server.api.auth import Authenticator
from tinkex.server.api.bodies import OwnerBudget
from tinkex.server.scheduler.fairness import TrainingLimits

pytestmark = pytest.mark.anyio


async def test_decode_slots_are_freed() -> None:
    budget = OwnerBudget(max_body_bytes=100)
    for number in range(100):
        async with budget.decode_slot(f"owner-{number}"):
            assert len(budget._decode_slots) == 1
    assert len(budget._decode_slots) == 0


async def test_only_owners_with_a_limit_of_their_own_are_remembered() -> None:
    limits = TrainingLimits(4)
    for number in range(100):
        limits.set(f"owner-{number}", 4)
    limits.set("alice", 2)
    assert limits._by_owner == {"alice": 2}
    limits.set("alice", 4)
    assert limits._by_owner == {}


async def test_the_last_use_of_keys_is_remembered_for_a_limited_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "MAX_CACHED_KEYS", 10)
    keys: Any = SimpleNamespace(mark_used=lambda key_id: None)
    authenticator = Authenticator(keys, tokens=SimpleNamespace())  # type: ignore[arg-type]
    for number in range(100):
        key: Any = SimpleNamespace(key_id=number)
        authenticator._write_last_used(key, 0.0)
    assert len(authenticator._last_used) <= 10
