"""Limits per owner and fair shares of the training slots. No clock, no sockets, no tensors."""

import pytest

from tinkex.server.scheduler.fairness import FairShares, Limits, Load, SlotRequest, over_limit

LOAD = Load(requests=3, tokens=100, samples=4)


@pytest.mark.parametrize(
    ("new", "limits", "message"),
    [
        (Load(requests=1), Limits(), None),
        (Load(requests=1), Limits(max_requests=4), None),
        (Load(requests=1), Limits(max_requests=3), "you have 3 requests"),
        (Load(requests=1, tokens=20), Limits(max_queued_tokens=120), None),
        (Load(requests=1, tokens=21), Limits(max_queued_tokens=120), "100 tokens"),
        (Load(requests=1, samples=2), Limits(max_samples=6), None),
        (Load(requests=1, samples=3), Limits(max_samples=6), "4 sequences being sampled, and 6"),
        # A limit does not affect requests that use none of it.
        (Load(requests=1), Limits(max_samples=1), None),
    ],
)
def test_requests_over_a_limit_are_refused(new: Load, limits: Limits, message: str | None) -> None:
    refusal = over_limit(LOAD, new, limits)
    assert (refusal is None) if message is None else (refusal is not None and message in refusal)


def test_the_only_request_of_an_owner_is_accepted_at_any_size() -> None:
    huge = Load(requests=1, tokens=10**9, samples=1000)
    assert over_limit(Load(), huge, Limits(max_queued_tokens=1, max_samples=1)) is None


def test_limits_of_a_key_override_those_of_the_server() -> None:
    server = Limits(max_requests=10, max_samples=20)
    assert Limits.of(server, {"max_samples": 5}) == Limits(max_requests=10, max_samples=5)
    assert Limits.of(server, {"max_requests": 0}).max_requests == 0


def owners(shares: FairShares, count: int, *, again: tuple[str, ...] = ()) -> str:
    """The owners of the next slots; each slot is released before the next is granted."""
    granted = ""
    for _ in range(count):
        request = shares.grant_next()
        if request is None:
            break
        granted += request.owner
        shares.release(request, used_s=1.0)
        if request.owner in again:
            shares.add(SlotRequest(owner=request.owner))
    return granted


def test_two_owners_alternate_however_much_each_has_queued() -> None:
    shares = FairShares(slots=1)
    for _ in range(20):
        shares.add(SlotRequest(owner="a"))
    shares.add(SlotRequest(owner="b"))
    assert owners(shares, 8, again=("a", "b")) == "abababab"


def test_an_owner_alone_gets_all_slots() -> None:
    shares = FairShares(slots=3, contested_slots=1)
    for _ in range(5):
        shares.add(SlotRequest(owner="a"))
    assert [shares.grant_next() is not None for _ in range(4)] == [True, True, True, False]


def test_a_new_owner_gets_the_next_slot() -> None:
    shares = FairShares(slots=8, contested_slots=2)
    requests = [SlotRequest(owner="a") for _ in range(10)]
    for request in requests:
        shares.add(request)
    running = [shares.grant_next() for _ in range(8)]
    newcomer = SlotRequest(owner="b")
    shares.add(newcomer)
    assert shares.grant_next() is None
    state = shares.queue_state(newcomer)
    assert state.state == "paused_capacity"
    assert state.reason is not None
    assert "8 models are training" in state.reason
    shares.release(requests[0], used_s=1.0)
    assert shares.grant_next() is newcomer
    # The first owner has more than its share: it gets no slot until it is back to that.
    shares.release(requests[1], used_s=1.0)
    assert shares.grant_next() is None
    assert "other owners" in (shares.queue_state(requests[9]).reason or "")
    assert running[0] is requests[0]


def test_an_idle_owner_collects_no_credit() -> None:
    shares = FairShares(slots=1)
    shares.add(SlotRequest(owner="a"))
    assert owners(shares, 50, again=("a",)) == "a" * 50
    shares.add(SlotRequest(owner="b"))
    assert owners(shares, 6, again=("a", "b")) in ("ababab", "bababa")


def test_an_owner_at_its_limit_waits_with_a_reason() -> None:
    shares = FairShares()
    requests = [SlotRequest(owner="a", max_running=2) for _ in range(3)]
    for request in requests:
        shares.add(request)
    assert [shares.grant_next() for _ in range(3)] == [requests[0], requests[1], None]
    state = shares.queue_state(requests[2])
    assert state.state == "paused_rate_limit"
    assert state.reason == "2 of your models are training, and 2 may train at once"
    assert shares.queue_state(requests[0]).state == "active"
    shares.release(requests[0], used_s=1.0)
    assert shares.grant_next() is requests[2]


def test_a_released_request_leaves_nothing_behind() -> None:
    shares = FairShares(slots=1)
    first, second = SlotRequest(owner="a"), SlotRequest(owner="a")
    shares.add(first)
    shares.add(second)
    assert shares.grant_next() is first
    shares.release(second, used_s=0.0)
    shares.release(first, used_s=1.0)
    assert shares.grant_next() is None
    assert shares == FairShares(slots=1)
