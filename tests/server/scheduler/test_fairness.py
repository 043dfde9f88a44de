"""Limits and shares: decided without a clock, a socket or a tensor."""

import pytest

from tinkex.server.scheduler.fairness import FairShares, Limits, Load, SlotRequest, over_limit

LOAD = Load(requests=3, tokens=100, samples=4)


@pytest.mark.parametrize(
    ("new", "limits", "said"),
    [
        (Load(requests=1), Limits(), None),
        (Load(requests=1), Limits(max_requests=4), None),
        (Load(requests=1), Limits(max_requests=3), "you have 3 requests"),
        (Load(requests=1, tokens=20), Limits(max_queued_tokens=120), None),
        (Load(requests=1, tokens=21), Limits(max_queued_tokens=120), "100 tokens"),
        (Load(requests=1, samples=2), Limits(max_samples=6), None),
        (Load(requests=1, samples=3), Limits(max_samples=6), "4 sequences being sampled, and 6"),
        # What asks for none of it is not held back by it.
        (Load(requests=1), Limits(max_samples=1), None),
    ],
)
def test_what_is_too_much(new: Load, limits: Limits, said: str | None) -> None:
    refusal = over_limit(LOAD, new, limits)
    assert (refusal is None) if said is None else (refusal is not None and said in refusal)


def test_a_request_that_is_alone_may_be_as_large_as_it_is() -> None:
    huge = Load(requests=1, tokens=10**9, samples=1000)
    assert over_limit(Load(), huge, Limits(max_queued_tokens=1, max_samples=1)) is None


def test_a_keys_own_limits_stand_for_the_servers() -> None:
    server = Limits(max_requests=10, max_samples=20)
    assert Limits.of(server, {"max_samples": 5}) == Limits(max_requests=10, max_samples=5)
    assert Limits.of(server, {"max_requests": 0}).max_requests == 0


def owners(shares: FairShares, turns: int, *, again: tuple[str, ...] = ()) -> str:
    """Who gets the next places, each turn being over before the next is given."""
    got = ""
    for _ in range(turns):
        ask = shares.grant_next()
        if ask is None:
            break
        got += ask.owner
        shares.release(ask, used_s=1.0)
        if ask.owner in again:
            shares.add(SlotRequest(owner=ask.owner))
    return got


def test_two_owners_take_turns_whatever_each_has_queued() -> None:
    shares = FairShares(slots=1)
    for _ in range(20):
        shares.add(SlotRequest(owner="a"))
    shares.add(SlotRequest(owner="b"))
    assert owners(shares, 8, again=("a", "b")) == "abababab"


def test_an_owner_alone_has_all_the_places() -> None:
    shares = FairShares(slots=3, contested_slots=1)
    for _ in range(5):
        shares.add(SlotRequest(owner="a"))
    assert [shares.grant_next() is not None for _ in range(4)] == [True, True, True, False]


def test_a_newcomer_goes_before_everything_that_is_queued() -> None:
    shares = FairShares(slots=8, contested_slots=2)
    asks = [SlotRequest(owner="a") for _ in range(10)]
    for ask in asks:
        shares.add(ask)
    running = [shares.grant_next() for _ in range(8)]
    newcomer = SlotRequest(owner="b")
    shares.add(newcomer)
    assert shares.grant_next() is None
    waits = shares.queue_state(newcomer)
    assert waits.state == "paused_capacity"
    assert waits.reason is not None
    assert "8 models are training" in waits.reason
    shares.release(asks[0], used_s=1.0)
    assert shares.grant_next() is newcomer
    # The first owner has more than its part: it gets no place until it is back to that.
    shares.release(asks[1], used_s=1.0)
    assert shares.grant_next() is None
    assert "other owners" in (shares.queue_state(asks[9]).reason or "")
    assert running[0] is asks[0]


def test_idle_time_is_not_saved_up() -> None:
    shares = FairShares(slots=1)
    shares.add(SlotRequest(owner="a"))
    assert owners(shares, 50, again=("a",)) == "a" * 50
    shares.add(SlotRequest(owner="b"))
    assert owners(shares, 6, again=("a", "b")) in ("ababab", "bababa")


def test_an_owner_over_its_own_limit_waits_and_is_told_so() -> None:
    shares = FairShares()
    asks = [SlotRequest(owner="a", max_running=2) for _ in range(3)]
    for ask in asks:
        shares.add(ask)
    assert [shares.grant_next() for _ in range(3)] == [asks[0], asks[1], None]
    waits = shares.queue_state(asks[2])
    assert waits.state == "paused_rate_limit"
    assert waits.reason == "2 of your models are training, and 2 may train at once"
    assert shares.queue_state(asks[0]).state == "active"
    shares.release(asks[0], used_s=1.0)
    assert shares.grant_next() is asks[2]


def test_an_ask_that_is_given_up_leaves_nothing_behind() -> None:
    shares = FairShares(slots=1)
    first, second = SlotRequest(owner="a"), SlotRequest(owner="a")
    shares.add(first)
    shares.add(second)
    assert shares.grant_next() is first
    shares.release(second, used_s=0.0)
    shares.release(first, used_s=1.0)
    assert shares.grant_next() is None
    assert shares == FairShares(slots=1)
