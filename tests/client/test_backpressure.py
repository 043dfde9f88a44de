"""Budgets are fair and bounded; a back-off is shared."""

import asyncio
import gc

import pytest

from tinkex.client.http.backpressure import (
    MAX_SPREAD_S,
    Backoff,
    BillingPause,
    Budget,
    ServiceLimitsTable,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_no_more_than_the_budget_is_in_flight():
    async def main():
        budget, most = Budget(10), 0

        async def work(amount):
            nonlocal most
            async with budget.hold(amount):
                most = max(most, budget.used)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(3) for _ in range(50)))
        assert most == 9
        assert budget.used == 0

    asyncio.run(main())


def test_a_request_larger_than_the_budget_runs_alone():
    async def main():
        budget, together = Budget(10), []

        async def work(amount):
            async with budget.hold(amount):
                together.append(budget.used)
                await asyncio.sleep(0)

        await asyncio.gather(work(4), work(100), work(4))
        assert together == [4, 100, 4]

    asyncio.run(main())


def test_the_budget_is_first_in_first_out():
    async def main():
        budget, order = Budget(1), []

        async def work(name):
            async with budget.hold(1):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(name) for name in range(20)))
        assert order == list(range(20))

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_holds_nothing():
    async def main():
        budget = Budget(1)
        async with budget.hold(1):
            waiting = asyncio.create_task(budget.hold(1).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), budget.hold(1):
            assert budget.used == 1

    asyncio.run(main())


def test_a_back_off_is_not_shortened_by_a_later_one():
    clock = Clock()
    backoff = Backoff(clock)
    backoff.extend(5)
    backoff.extend(1)
    assert backoff.left_s == 5
    clock.now += 5
    assert backoff.left_s == 0


def test_a_wait_ends_at_the_deadline_of_the_waiter(monkeypatch):
    clock, slept = Clock(), []

    async def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds
        if len(slept) < 3:
            backoff.extend(3600)  # extended again and again

    monkeypatch.setattr("tinkex.client.http.backpressure.asyncio.sleep", sleep)
    backoff = Backoff(clock)
    backoff.extend(3600)
    asyncio.run(backoff.wait(300))
    assert sum(slept) == pytest.approx(300, abs=MAX_SPREAD_S)
    slept.clear()
    backoff = Backoff(clock)
    backoff.extend(10)
    asyncio.run(backoff.wait())  # until the back-off is over
    assert sum(slept) == pytest.approx(10 + 2 * 3600, abs=3 * MAX_SPREAD_S)
    slept.clear()
    backoff = Backoff(clock)
    backoff.extend(10)
    asyncio.run(backoff.wait_once(60))  # a poll does not wait for later extensions
    assert sum(slept) == pytest.approx(10, abs=2.5)


def test_402_is_a_pause_up_to_a_limit_that_resets_after_a_quiet_time():
    clock = Clock()
    billing = BillingPause(max_pause_s=12, clock=clock)
    waits = []
    for _ in range(4):
        waits.append(billing.pause_s())
        clock.now += 5
    assert waits == [5, 5, 5, None]  # at 0, 5, 10 and 15 s
    clock.now += 301
    assert billing.pause_s() == 5


def test_limits_are_shared_while_they_are_in_use():
    table = ServiceLimitsTable()
    a = table.get(("http://a", "k"))
    assert table.get(("http://a", "k")) is a
    assert table.get(("http://a", "other")) is not a
    a.backoff.extend(60)
    del a
    gc.collect()
    assert table.get(("http://a", "k")).backoff.left_s == 0
