"""What a server remembers of owners, keys and models has an end."""

from types import SimpleNamespace
from typing import Any

import pytest

from tinkex.server.api import auth
from tinkex.server.api.auth import Gate
from tinkex.server.api.bodies import Intake
from tinkex.server.scheduler import execution
from tinkex.server.scheduler.execution import Execution
from tinkex.server.scheduler.fairness import TrainingLimits

pytestmark = pytest.mark.anyio


async def test_seconds_are_kept_of_the_owners_who_computed_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution, "MAX_OWNERS", 3)
    nothing: Any = SimpleNamespace()
    shared = Execution(store=nothing, executor=nothing, futures=nothing)
    for owner in ("a", "b", "c", "a", "d"):
        shared.usage.by_owner[owner] += 1.0
    assert shared.usage.by_owner == {"a": 2.0, "c": 1.0, "d": 1.0}


async def test_turns_to_unpack_are_forgotten() -> None:
    intake = Intake(max_body_bytes=100)
    for number in range(100):
        async with intake.turn(f"owner-{number}"):
            assert len(intake._turns) == 1
    assert len(intake._turns) == 0


async def test_only_owners_with_a_number_of_their_own_are_remembered() -> None:
    limits = TrainingLimits(4)
    for number in range(100):
        limits.set(f"owner-{number}", 4)
    limits.set("alice", 2)
    assert limits._by_owner == {"alice": 2}
    limits.set("alice", 4)
    assert limits._by_owner == {}


async def test_when_keys_were_used_is_remembered_of_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "MOST_CACHED", 10)
    keys: Any = SimpleNamespace(used=lambda key_id: None)
    gate = Gate(keys, tokens=SimpleNamespace())  # type: ignore[arg-type]
    for number in range(100):
        key: Any = SimpleNamespace(key_id=number)
        gate._note(key, 0.0)
    assert len(gate._noted) <= 10
