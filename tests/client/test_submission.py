"""Steps are sent in the order of the calls, and their seq_ids leave no gaps."""

import asyncio

import pytest

from tinkex.client.submission import SeqIds, SubmissionOutcome, TicketQueue


def test_tickets_are_served_in_order():
    async def main():
        queue, served = TicketQueue(), []
        tickets = [queue.take_ticket() for _ in range(5)]

        async def send(ticket):
            await asyncio.sleep(0.001 * (5 - ticket))
            served.append(ticket)

        await asyncio.gather(*(queue.start(t, lambda t=t: send(t)) for t in reversed(tickets)))
        assert served == tickets

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before its first step", "while it waits", "while it sends"])
def test_requests_after_a_cancelled_one_are_still_sent(when):
    async def main():
        queue, served = TicketQueue(), []
        first, second, third = (queue.take_ticket() for _ in range(3))
        gate = asyncio.Event()

        async def send(ticket):
            await gate.wait()
            served.append(ticket)

        a = queue.start(first, lambda: send(first))
        b = queue.start(second, lambda: send(second))
        c = queue.start(third, lambda: send(third))
        if when == "before its first step":
            b.cancel()
        await asyncio.sleep(0)
        if when == "while it waits":
            b.cancel()
        if when == "while it sends":
            a.cancel()
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(a, b, c, return_exceptions=True)
        assert served == ([second, third] if when == "while it sends" else [first, third])

    asyncio.run(main())


def test_requests_after_a_failed_one_are_still_sent():
    async def main():
        queue, served = TicketQueue(), []
        first, second = queue.take_ticket(), queue.take_ticket()

        async def fail():
            raise ValueError("no")

        async def send():
            served.append(second)

        a, b = queue.start(first, fail), queue.start(second, send)
        await asyncio.gather(a, b, return_exceptions=True)
        assert served == [second]

    asyncio.run(main())


A, R, U, N = (
    SubmissionOutcome.ACCEPTED,
    SubmissionOutcome.REFUSED,
    SubmissionOutcome.UNKNOWN,
    SubmissionOutcome.UNSENT,
)


@pytest.mark.parametrize(
    ("outcomes", "next_number", "unused"),
    [
        ([A], 2, {}),
        ([A, A, A], 4, {}),
        ([R], 1, {}),  # refused: the seq_id is reused by the next call
        ([N], 1, {}),
        ([U], 2, {1: False}),  # unknown: send a no-op step, harmless if the server has it
        ([N, R, N], 1, {}),
        ([N, A, R], 3, {1: True}),  # 3 is reused, 1 needs a no-op step
        ([N, R, A], 4, {1: True, 2: True}),
        ([A, R, N], 2, {}),  # serial: the parts before the refusal are kept
        ([A, U, N], 3, {2: True}),
        ([], 1, {}),
    ],
)
def test_seq_ids_that_never_arrived_are_reused_or_kept_as_unused(outcomes, next_number, unused):
    numbers = SeqIds()
    numbers.record(outcomes, adds_gradients=True)
    assert (numbers.next, numbers.unused) == (next_number, unused)
    harmless = SeqIds()
    harmless.record(outcomes)
    assert harmless.unused == dict.fromkeys(unused, False)
