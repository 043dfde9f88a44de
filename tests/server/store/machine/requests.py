"""Rules for requests: accepted once, finished once, stored until their results are fetched."""

import asyncio
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis.stateful import precondition, rule

from server.store import reference_model as expected
from server.store.machine.base import BASE, OWNERS, PICK, Base
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store import Completion
from tinkex.server.store.request_rows import SAMPLES_PER_CLONE
from tinkex.server.store.requests import INLINE_BYTES, ResultGone
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse

LARGE = b"x" * (INLINE_BYTES + 1)


def sampled(cached: int, drawn: int) -> bytes:
    """The result of a sample."""
    tokens = np.arange(drawn, dtype=np.int32)
    logprobs = np.zeros(drawn, np.float32)
    sequence = SampledSequence("length", "", tokens_np=tokens, logprobs_np=logprobs)
    return encode_sample_response(
        SampleResponse(sequences=[sequence], prompt_cache_hit_tokens=cached)
    )


class Requests(Base):
    """Requests are repeated, concurrent, or in one group with a write that fails."""

    def step(
        self,
        model: expected.Model,
        seq_id: int,
        kind: Kind,
        *,
        payload: bytes = b"",
        tokens: int = 0,
    ) -> QueuedRequest:
        return QueuedRequest(
            owner=model.owner,
            kind=kind,
            base_model=BASE,
            payload=payload or f"{model.model_id} {seq_id}".encode(),
            session_id=model.session_id,
            model_id=model.model_id,
            seq_id=seq_id,
            tokens=tokens,
        )

    def queued(self, one: expected.Request) -> QueuedRequest:
        """The request as the scheduler has it."""
        return QueuedRequest(
            request_id=one.request_id,
            owner=one.owner,
            kind=Kind(one.kind),
            base_model=BASE,
            session_id=one.session_id,
            model_id=one.model_id,
            sampling_session_id=one.sampling_session_id,
            seq_id=one.seq_id,
            version_id=one.version_id,
            tokens=one.tokens,
        )

    def take(self, new: QueuedRequest, accepted: QueuedRequest, now_s: float) -> expected.Request:
        """Apply an accepted request to the model."""
        place = new.model_id or new.sampling_session_id
        assert place is not None
        assert new.seq_id is not None
        assert new.session_id is not None
        first = self.world.at(place, new.seq_id)
        assert (accepted is new) == (first is None)
        if first is not None:
            assert (accepted.request_id, accepted.kind) == (first.request_id, first.kind)
            if len(new.payload or b"") > INLINE_BYTES:
                self.left.append("payloads")
            return first
        assert accepted.request_id not in self.world.requests
        assert accepted.request_id not in self.gone
        self.world.requests[accepted.request_id] = expected.Request(
            request_id=accepted.request_id,
            owner=new.owner,
            session_id=new.session_id,
            kind=new.kind,
            seq_id=new.seq_id,
            created_s=now_s,
            payload=new.payload,
            model_id=new.model_id,
            sampling_session_id=new.sampling_session_id,
            tokens=new.tokens,
        )
        return self.world.requests[accepted.request_id]

    @precondition(lambda self: self.world.models)
    @rule(
        number=PICK,
        seq_ids=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        kind=st.sampled_from([Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP]),
        large=st.booleans(),
    )
    def accept_steps(self, number: int, seq_ids: list[int], kind: Kind, large: bool) -> None:
        """Concurrent requests with repeats: the first of each seq_id counts."""
        now_s = self.later()
        model = self.some_model(number)
        payload = LARGE if large else b""
        new = [self.step(model, one, kind, payload=payload, tokens=one) for one in seq_ids]

        async def act() -> list[QueuedRequest]:
            return await asyncio.gather(*(self.store.requests.accept(one) for one in new))

        answers = zip(new, self.run(act()), strict=True)
        # The store decides which of concurrent repeats is the first.
        for one, accepted in sorted(answers, key=lambda pair: pair[0] is not pair[1]):
            self.take(one, accepted, now_s)

    @precondition(lambda self: self.world.models)
    @rule(number=PICK, seq_id=st.integers(1, 9))
    def refuse_step(self, number: int, seq_id: int) -> None:
        now_s = self.later()
        model = self.some_model(number)
        new = self.step(model, seq_id, Kind.OPTIM_STEP)
        self.run(self.store.requests.store_refused(new, Outcome(error="bad", category="user")))
        if self.world.at(model.model_id, seq_id) is None:
            [row] = [
                one
                for one in self.run(self.store.requests.log(model.model_id))
                if one.seq_id == seq_id
            ]
            new.request_id = row.request_id
            request = self.take(new, new, now_s)
            self.world.finish(request, None, "bad", now_s)

    @precondition(lambda self: self.world.samplers)
    @rule(number=PICK, clone_id=st.integers(0, 1), seq_ids=st.lists(st.integers(0, 3), min_size=1))
    def accept_samples(self, number: int, clone_id: int, seq_ids: list[int]) -> None:
        now_s = self.later()
        sampler = self.pick(list(self.world.samplers.values()), number)
        for seq_id in seq_ids[:3]:
            new = QueuedRequest(
                owner=sampler.owner,
                kind=Kind.SAMPLE,
                base_model=BASE,
                payload=b"{}",
                session_id=sampler.session_id,
                sampling_session_id=sampler.sampling_session_id,
                seq_id=clone_id * SAMPLES_PER_CLONE + seq_id,
                sequences=1,
                tokens=5,
            )
            self.take(new, self.run(self.store.requests.accept(new)), now_s)

    @precondition(lambda self: self.world.requests)
    @rule(
        numbers=st.lists(PICK, min_size=1, max_size=4),
        outcome=st.sampled_from(["small", "large", "failed"]),
        again=st.booleans(),
        beside=st.booleans(),
    )
    def finish_requests(self, numbers: list[int], outcome: str, again: bool, beside: bool) -> None:
        """
        Some at once, in order, finished ones among them: those stay as they were.

        A write `beside` them that cannot be done undoes only itself.
        """
        now_s = self.later()
        among = list(self.world.requests.values())
        if not again:
            among = self.world.waiting() or among
        chosen = [self.pick(among, number) for number in numbers]

        def fail(_connection: sa.Connection) -> None:
            raise ValueError("this cannot be written")

        async def act() -> list[tuple[bytes | None, Completion | None]]:
            if not beside:
                return [(result, await future) for result, future in await submitted()]
            async with self.one_transaction():
                futures = await submitted()
                failing = self.store._database.write(fail)
            with pytest.raises(ValueError, match="cannot be written"):
                await failing
            return [(result, await future) for result, future in futures]

        async def submitted() -> list[tuple[bytes | None, asyncio.Future[Completion | None]]]:
            futures: list[tuple[bytes | None, asyncio.Future[Completion | None]]] = []
            for number, one in enumerate(chosen):
                if outcome == "failed":
                    failing = self.store.requests.finish_one(
                        self.queued(one), Outcome(error="no", category="server")
                    )
                    futures.append((None, failing))
                    continue
                result = sampled(2, 3) if one.kind == Kind.SAMPLE else f"{now_s} {number}".encode()
                if outcome == "large" and one.kind != Kind.SAMPLE:
                    result += LARGE
                key = await self.store.requests.store_result(result)
                done = Outcome(result=result, result_key=key)
                futures.append((result, self.store.requests.finish_one(self.queued(one), done)))
            return futures

        for one, (result, event) in zip(chosen, self.run(act()), strict=True):
            if one.status != "waiting":
                assert event is None
                if result is not None and len(result) > INLINE_BYTES:
                    self.left.append("results")
                continue
            self.world.finish(one, result, None if result is not None else "no", now_s)
            self.counted(one, now_s)
            self.completed(one, event, now_s)

    def counted(self, request: expected.Request, now_s: float) -> None:
        if request.status == "failed":
            return
        if request.kind == Kind.SAMPLE:
            self.world.count(request, now_s, prefill=3, cached=2, sampled=3)
        elif request.kind == Kind.FORWARD_BACKWARD:
            self.world.count(request, now_s, training=request.tokens)

    def completed(self, request: expected.Request, event: Completion | None, now_s: float) -> None:
        if request.sampling_session_id is None:
            assert event is None
            return
        assert event is not None
        sampler_id = request.sampling_session_id
        assert event.position > self.world.newest_position(sampler_id)
        self.world.events[sampler_id, event.position] = expected.Event(
            position=event.position,
            sampling_session_id=request.sampling_session_id,
            clone_id=request.seq_id // SAMPLES_PER_CLONE,
            request_id=request.request_id,
            result_bytes=request.result_bytes,
            at_s=now_s,
        )

    @precondition(lambda self: self.world.requests)
    @rule(
        numbers=st.lists(PICK, min_size=1, max_size=4),
        owner=OWNERS,
        together=st.booleans(),
        times=st.integers(1, 2),
    )
    def fetch(self, numbers: list[int], owner: str, together: bool, times: int) -> None:
        """Only the first call counts."""
        for _ in range(times):
            self.fetch_once(numbers, owner, together)

    def fetch_once(self, numbers: list[int], owner: str, together: bool) -> None:
        now_s = self.later()
        finished = [one for one in self.world.requests.values() if one.status != "waiting"]
        chosen = [self.pick(finished, number) for number in numbers if finished]
        if together:
            ids = [one.request_id for one in chosen]
            self.store.requests.mark_all_fetched(ids, owner=owner)
        for one in chosen:
            if not together:
                self.store.requests.mark_fetched(one.request_id)
            if one.fetched_s is None and (not together or one.owner == owner):
                one.fetched_s = now_s
        self.flush()

    def read_request(self, number: int) -> None:
        """Read through the store's methods."""
        one = self.pick(list(self.world.requests.values()), number)
        row = self.run(self.store.requests.get(one.request_id))
        assert row is not None
        assert (row.outcome is None) == (one.status == "waiting")
        if row.outcome is not None:
            assert row.outcome.error == one.error
        if one.result is None:
            with pytest.raises(ResultGone):
                self.run(self.store.requests.result(one.request_id))
        else:
            assert self.run(self.store.requests.result(one.request_id)) == one.result
        if one.payload is not None:
            payload = self.run(self.store.requests.payload(one.request_id))
            given = payload.read_bytes() if isinstance(payload, Path) else payload
            assert given == one.payload
        for request_id in self.gone:
            assert self.run(self.store.requests.get(request_id)) is None
