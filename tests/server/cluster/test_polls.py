"""A request is accepted at one web process and polled at another: what each of them reads."""

import asyncio
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

from server.api.test_retrieve_futures import a_sampler, sample
from server.cluster.conftest import Parts
from server.hosting import Api
from tinkex.server.api.deps import Context
from tinkex.server.cluster import remote_results
from tinkex.server.queued_request import Outcome
from tinkex.server.scheduler import result_waiters
from tinkex.server.store import Store
from tinkex.server.store.notifier import SIGNATURE_CHARS, WEB
from tinkex.server.store.request_rows import new_request_id
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse
from waiting import until_async

pytestmark = pytest.mark.anyio

#: Too many for a notification, and few enough for a row.
SOME_TOKENS = 3_000
ACCEPTED, POLLED = 0, 1


def context_of(web: Api) -> Context:
    assert web.app is not None
    context: Context = web.app.state.context
    return context


class Reads:
    """Counts what the web processes read of requests, and lets them not look by themselves."""

    def __init__(self, webs: list[Api], monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        self._webs = webs
        for number, web in enumerate(webs):
            requests = context_of(web).store.requests
            for name in ("finished", "get", "result"):
                counted = self._counted((number, name), getattr(requests, name))
                monkeypatch.setattr(requests, name, counted)

    def _counted(self, key: tuple[int, str], read: Any) -> Any:
        async def counted(*given: Any, **named: Any) -> Any:
            self.counts[key] += 1
            return await read(*given, **named)

        return counted

    async def by_notification_only(self) -> None:
        for web in self._webs:
            scheduler: Any = context_of(web).scheduler
            await until_async(lambda: scheduler.notifier.listening_since_s < math.inf)  # noqa: B023
            await scheduler._look_task.close()


@pytest.fixture
async def reads(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads(parts.webs, monkeypatch)
    await found.by_notification_only()
    return found


async def test_a_small_result_is_read_by_no_web_process(parts: Parts, reads: Reads) -> None:
    accepted, polled = parts.webs
    model = await accepted.model()
    executor = parts.executors[parts.having(model)]
    for first, is_finished in ((1, False), (3, True)):
        # The poll is there before the result, and after it.
        executor.open.clear()
        await accepted.forward_backward(model, first, tokens=1)
        step = await accepted.optim_step(model, first + 1)
        waiting = None if is_finished else asyncio.create_task(polled.value(step))
        executor.open.set()
        if is_finished:
            await until_async(lambda: context_of(polled).futures.is_cached(step))  # noqa: B023
        await (waiting or polled.value(step))
    sampler = await a_sampler(accepted)
    await polled.result(await sample(accepted, sampler, 0))
    assert not reads.counts


async def test_a_poll_reads_its_row_at_the_second_look(parts: Parts, reads: Reads) -> None:
    """Most polls hear of their results in less time."""
    accepted, polled = parts.webs
    model = await accepted.model()
    executor = parts.executors[parts.having(model)]
    executor.open.clear()
    step = await accepted.optim_step(model, 1)
    waiting = asyncio.create_task(polled.value(step))
    futures: Any = context_of(polled).futures
    await until_async(lambda: step in futures._expecting)
    await futures.look()
    assert step in futures._expecting
    await futures.look()
    await until_async(lambda: reads.counts == {(POLLED, "finished"): 1})
    executor.open.set()
    await waiting


async def test_an_error_is_read_by_no_web_process(parts: Parts, reads: Reads) -> None:
    accepted, polled = parts.webs
    sampler = await a_sampler(accepted)
    result = await polled.result(await sample(accepted, sampler, 0, no_such_setting=1))
    assert result["category"] == "user"
    assert not reads.counts


async def test_a_large_result_is_read_once_by_the_process_that_is_polled(
    parts: Parts, reads: Reads
) -> None:
    accepted, polled = parts.webs
    model = await accepted.model()
    found = await polled.passed(await accepted.forward_backward(model, 1, tokens=SOME_TOKENS))
    assert len(found.loss_fn_outputs) == 1
    assert reads.counts == {(POLLED, "finished"): 1}


async def test_polls_that_begin_together_are_read_together(parts: Parts, reads: Reads) -> None:
    accepted, polled = parts.webs
    sampler = await a_sampler(accepted)
    sent = [await sample(accepted, sampler, number) for number in range(20)]
    futures = context_of(polled).futures
    await until_async(lambda: all(futures.is_cached(one) for one in sent))
    # As after a restart.
    futures._cache.clear()
    context_of(polled).scheduler.notifier.listening_since_s = time.time() + 60  # type: ignore[attr-defined]
    await asyncio.gather(*(polled.result(one) for one in sent))
    assert set(reads.counts) == {(POLLED, "finished")}
    assert reads.counts[POLLED, "finished"] < len(sent)


async def test_a_result_that_caches_dropped_is_read(
    parts: Parts, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_waiters, "CACHE_BYTES", 3_000)
    accepted, polled = parts.webs
    sampler = await a_sampler(accepted)
    futures = context_of(polled).futures
    first = await sample(accepted, sampler, 0)
    await until_async(lambda: futures.is_cached(first))
    for number in range(1, 10):
        await sample(accepted, sampler, number)
    await until_async(lambda: not futures.is_cached(first))
    await polled.result(first)
    assert reads.counts == {(POLLED, "finished"): 1}


async def test_the_result_that_was_committed_first_counts(parts: Parts, reads: Reads) -> None:
    accepted, polled = parts.webs
    sampler = await a_sampler(accepted)
    for executor in parts.executors.values():
        executor.open.clear()
    request = await sample(accepted, sampler, 0)
    waiting = asyncio.create_task(polled.poll(request, accept=PROTOBUF_TYPE))
    (home,) = [
        name for name, one in parts.workers.items() if await is_waiting(one._scheduler, request)
    ]
    # Another worker computes the same sample, and its result is different.
    (other,) = [one for name, one in parts.workers.items() if name != home]
    stored = await other._store.requests.get(request)
    assert stored is not None
    theirs = encode_sample_response(SampleResponse(sequences=[SampledSequence("length", "theirs")]))
    await other._store.requests.finish_one(stored, Outcome(result=theirs))
    for executor in parts.executors.values():
        executor.open.set()
    answer = await waiting
    while answer.status == 408:
        answer = await polled.poll(request, accept=PROTOBUF_TYPE)
    assert answer.body == theirs


async def is_waiting(scheduler: Any, request_id: str) -> bool:
    """Whether a worker gets this request within a moment."""
    for _ in range(100):
        if request_id in scheduler._execution.claimed:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_request_that_does_not_exist_is_unknown_within_a_second(parts: Parts) -> None:
    for request in ("never", new_request_id(time.time())):
        answer = await parts.webs[POLLED].poll(request)
        assert answer.status == 404, answer


async def test_results_that_nobody_signed_are_dropped(
    parts: Parts, reads: Reads, tmp_path: Path
) -> None:
    accepted, polled = parts.webs
    sampler = await a_sampler(accepted)
    for executor in parts.executors.values():
        executor.open.clear()
    request = await sample(accepted, sampler, 0)
    forged = json.dumps(["finished", [[request, "local", "sample", "m", None, None, None, "AAAA"]]])
    with psycopg.connect(parts.db.replace("+psycopg", ""), autocommit=True) as connection:
        for text in (forged, "A" * SIGNATURE_CHARS + forged):
            connection.execute("SELECT pg_notify(%s, %s)", (WEB, text))
    answer = await polled.poll(request)
    assert answer.status == 408
    for executor in parts.executors.values():
        executor.open.set()
    assert (await polled.result(request))["sequences"]


async def test_one_look_finds_all_that_finished(
    parts: Parts, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_results, "LOOKED_AT", 2)
    web = parts.webs[ACCEPTED]
    sampler = await a_sampler(web)
    context: Any = context_of(web)
    await context.scheduler.notifier.close()  # it hears nothing
    sent = [await sample(web, sampler, number) for number in range(9)]
    assert len(context.futures) == len(sent)
    await until_finished(context.store, sent)
    await context.futures.look()
    await until_async(lambda: not len(context.futures))


async def until_finished(store: Store, request_ids: list[str]) -> None:
    async with asyncio.timeout(20):
        while len((await store.requests.news_of(request_ids))[0]) < len(request_ids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
