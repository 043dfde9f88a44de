"""
Random histories of everything the store does, against a model of plain dictionaries.

After each operation every table and every file is compared with the model. At any point the store
is closed and opened, or dies in the middle of a transaction: what it had answered is there, what
it had not is undone. On SQLite, and on PostgreSQL where that is installed.

    TINKEX_PROPERTY_EXAMPLES=500 pytest tests/server/store/test_model.py

looks longer, and elsewhere each time.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from postgres import Postgres
from server.store import model as told
from tinkex.server.janitor import surplus
from tinkex.server.plan import Kind
from tinkex.server.store import (
    Accepted,
    Completion,
    Damaged,
    Model,
    NewRequest,
    Sampler,
    Status,
    Store,
    accepting,
    audit,
    catalog,
    checkpoints,
    finishing,
    history,
    keys,
    open_store,
    requests,
    retention,
    runs,
    snapshots,
    tally,
    telemetry,
)
from tinkex.server.store.checkpoints import NameTaken, Naming, SamplerTaken
from tinkex.server.store.files import ROOMS
from tinkex.server.store.finishing import SAMPLES_OF_A_CLONE
from tinkex.server.store.requests import INLINE_BYTES, ResultGone
from tinkex.server.store.tables import metadata
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse

T = TypeVar("T")

EXAMPLES = os.environ.get("TINKEX_PROPERTY_EXAMPLES")
STEPS = 50

#: Everything in the store that asks what time it is.
TIMED = (
    *(accepting, audit, catalog, checkpoints, finishing, history, keys),
    *(requests, retention, runs, snapshots, tally, telemetry),
)
OWNERS = st.sampled_from(["ann", "bob"])
PICK = st.integers(0, 15)
AGES_S = st.sampled_from([0.0, 10.0, 1000.0, 50_000.0])
THREE_AGES_S = st.tuples(AGES_S, AGES_S, AGES_S)
KINDS = ("weights", "sampler_weights")
NAMES = st.sampled_from(["a", "a", "b"])
LARGE = b"x" * (INLINE_BYTES + 1)
BASE = "b"


class Clock:
    """Takes the place of the module `time`: it is later only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def time(self) -> float:
        return self.now_s


def sampled(cached: int, drawn: int) -> bytes:
    """A sample's answer."""
    tokens = np.arange(drawn, dtype=np.int32)
    logprobs = np.zeros(drawn, np.float32)
    sequence = SampledSequence("length", "", tokens_np=tokens, logprobs_np=logprobs)
    return encode_sample_response(
        SampleResponse(sequences=[sequence], prompt_cache_hit_tokens=cached)
    )


class StoreMachine(RuleBasedStateMachine):
    """The store and its model, side by side. Ids are the store's; everything else is foretold."""

    url: ClassVar[str]
    root: ClassVar[Path]
    clock: ClassVar[Clock]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.world = told.World()
        #: Files that nothing refers to: left by work that was refused, or undone.
        self.orphans: set[str] = set()
        #: Rooms in which the last operation left one more, by what the model knows.
        self.left: list[str] = []
        self.steps = 0
        #: Requests whose rows were deleted.
        self.gone: set[str] = set()
        self.secrets: dict[int, str] = {}
        self.clock.now_s = 1_800_000_000.0
        self.store = self.opened()

    # -- the machinery -----------------------------------------------------------------------

    def opened(self) -> Store:
        return open_store(
            db_url=self.url, storage_url=str(self.folder), folder=self.folder, alone=True
        )

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    def later(self) -> float:
        """Each operation has a moment of its own."""
        self.clock.now_s += 1.0
        return self.clock.now_s

    def flush(self) -> None:
        """Any transaction takes along what nobody waited for."""
        self.run(self.store.retention.shrink())

    @staticmethod
    def pick(among: Sequence[T], number: int) -> T:
        return among[number % len(among)]

    @initialize()
    def empty(self) -> None:
        def act(connection: sa.Connection) -> None:
            for table in reversed(metadata.sorted_tables):
                connection.execute(table.delete())

        self.run(self.store._database.write(act))
        # Most operations need something to work on.
        for owner in ("ann", "bob"):
            self.create_session(owner, "k1")  # a key of each owner's own, though it reads the same
            self.create_model(1, 0)
            self.create_sampler(1, 0, join=False)
            self.accept_steps(1, [1, 2], Kind.FORWARD_BACKWARD, large=owner == "bob")
            self.accept_samples(1, 0, [0, 1])
            while self.world.waiting():
                outcome = "small" if owner == "ann" else "large"
                self.finish_requests([0, 1], outcome, again=False, beside=owner == "bob")
            ttl_s = 500.0 if owner == "ann" else None
            self.save_checkpoint(1, "weights", "a", 0.0, False, ttl_s, None)
            self.load_checkpoint(1, 1)
            self.save_checkpoint(1, "sampler_weights", "a", 0.0, False, None, 2)
        # One model has no snapshot, and the other two and a step to run after them: each way of
        # going on is there.
        for step_number in (1, 2):
            self.save_snapshot(1, -step_number, None)
        self.accept_steps(1, [7], Kind.OPTIM_STEP, large=False)
        # A name that is taken, one that is free again, and a model that could not be made.
        self.save_checkpoint(1, "weights", "a", 0.0, False, None, None)
        self.save_checkpoint(0, "weights", "a", 600.0, False, 500.0, None)
        self.create_model(0, 1)
        self.finish_requests([-1], "failed", again=False, beside=False)
        # One client was taken for gone and is back; the other one has work, and was not.
        self.lapse_sessions(0.0, 0, comes_back=True)

    def teardown(self) -> None:
        self.store.close()
        self.runner.close()

    # -- time, and the ends of processes -----------------------------------------------------

    @rule(seconds=st.sampled_from([10.0, 1000.0, 50_000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule(dies=st.booleans(), number=PICK, seq_id=st.integers(1, 9))
    def restart(self, dies: bool, number: int, seq_id: int) -> None:
        if dies:
            self.crash(number, seq_id)
        self.store.close()
        self.store = self.opened()

    @contextlib.asynccontextmanager
    async def one_transaction(self) -> AsyncIterator[None]:
        """All that is written inside is written together."""
        held, go = threading.Event(), threading.Event()

        def hold(_connection: sa.Connection) -> None:
            held.set()
            assert go.wait(30)

        first = self.store._database.submit(hold)
        await asyncio.to_thread(held.wait, 30)
        yield
        # Whoever was asked to write has come as far as to wait for it.
        await asyncio.sleep(0)
        go.set()
        await first

    def crash(self, number: int, seq_id: int) -> None:
        """The process dies in a transaction: nobody was answered, and nothing of it is there."""
        self.later()
        database = self.store._database

        def die(_connection: sa.Connection) -> None:
            raise SystemExit

        async def act() -> None:
            unanswered: list[asyncio.Future[Any]] = []
            async with self.one_transaction():
                submit(unanswered)
                await asyncio.sleep(0)
                unanswered.append(database.submit(die))
            await asyncio.to_thread(database.writer._thread.join, 30)
            assert not any(one.done() for one in unanswered)
            for one in unanswered:
                one.cancel()
            await asyncio.gather(*unanswered, return_exceptions=True)

        def submit(unanswered: list[asyncio.Future[Any]]) -> None:
            if self.world.models:
                model = self.pick(list(self.world.models.values()), number)
                new = self.step(model, seq_id, Kind.OPTIM_STEP)
                unanswered.append(asyncio.ensure_future(self.store.requests.accept(new)))
            unanswered += [
                self.store.requests.finish(one.request_id, b"never", None)
                for one in self.world.waiting()[:3]
            ]
            for session_id in self.world.sessions:
                self.store.runs.seen(session_id)
            for request_id in self.world.requests:
                self.store.requests.fetched(request_id)

        self.run(act())

    # -- sessions, models, samplers ----------------------------------------------------------

    @rule(owner=OWNERS, key=st.sampled_from([None, "k1", "k2"]))
    def create_session(self, owner: str, key: str | None) -> None:
        now_s = self.later()
        session = self.run(
            self.store.runs.create_session(
                owner=owner,
                sdk_version=None,
                tags=["t"],
                user_metadata={"n": 1},
                project_id=None,
                display_name=None,
                idempotency_key=key,
            )
        )
        known = [
            one
            for one in self.world.sessions.values()
            if key is not None and (one.owner, one.idempotency_key) == (owner, key)
        ]
        if known:
            assert session.session_id == known[0].session_id
            return
        assert session.session_id not in self.world.sessions
        self.world.sessions[session.session_id] = told.Session(
            session_id=session.session_id,
            owner=owner,
            idempotency_key=key,
            created_s=now_s,
            seen_s=now_s,
        )
        self.world.audit.append((now_s, "session.created"))

    def some_session(self, number: int) -> told.Session:
        return self.pick(list(self.world.sessions.values()), number)

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK, back=st.booleans())
    def see_session(self, number: int, back: bool) -> None:
        now_s = self.later()
        session = self.some_session(number)
        if back:
            self.store.runs.revive_session(session.session_id)
            session.lapsed_s = None
        else:
            self.store.runs.seen(session.session_id)
        session.seen_s = now_s
        self.flush()

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK)
    def finish_session(self, number: int) -> None:
        now_s = self.later()
        session = self.some_session(number)
        self.run(self.store.runs.finish_session(session.session_id, f"r{now_s}", None))
        if session.finished_s is None:
            session.finished_s, session.finish_reason = now_s, f"r{now_s}"
            self.world.audit.append((now_s, "session.finished"))

    @rule(age_s=AGES_S, number=PICK, comes_back=st.booleans())
    def lapse_sessions(self, age_s: float, number: int, comes_back: bool) -> None:
        now_s = self.later()
        silent = self.run(self.store.runs.silent_sessions(now_s - age_s))
        busy = {one.session_id for one in self.world.waiting()}
        assert set(silent) == {
            one.session_id
            for one in self.world.sessions.values()
            if one.finished_s is None
            and one.lapsed_s is None
            and one.seen_s < now_s - age_s
            and one.session_id not in busy
        }
        if silent:
            self.run(self.store.runs.lapse_sessions(silent))
        for session_id in silent:
            self.world.sessions[session_id].lapsed_s = now_s
        if silent and comes_back:
            place = list(self.world.sessions).index(self.pick(sorted(silent), number))
            self.see_session(place, back=True)

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK, model_seq_id=st.integers(0, 1))
    def create_model(self, number: int, model_seq_id: int) -> None:
        now_s = self.later()
        session = self.some_session(number)
        model = Model(
            model_id=f"{session.session_id}:train:{model_seq_id}",
            owner=session.owner,
            session_id=session.session_id,
            base_model=BASE,
            lora_config={"rank": 8},
            optimizer_config={},
            user_metadata=None,
            created_s=now_s,
        )
        mirrored = told.Model(
            model_id=model.model_id,
            owner=model.owner,
            session_id=model.session_id,
            model_seq_id=model_seq_id,
        )
        new = self.step(mirrored, 0, Kind.CREATE_MODEL)
        accepted = self.run(
            self.store.runs.create_model(model=model, model_seq_id=model_seq_id, request=new)
        )
        self.world.models.setdefault(model.model_id, mirrored)
        self.take(new, accepted, now_s)

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK, sampler_number=st.integers(0, 2), join=st.booleans())
    def create_sampler(self, number: int, sampler_number: int, join: bool) -> None:
        self.later()
        session = self.some_session(number)
        sampler = Sampler(
            sampling_session_id=f"{session.session_id}:sample:{sampler_number}",
            owner=session.owner,
            session_id=session.session_id,
            base_model=BASE,
            version_id=None,
            model_path=None,
        )
        found = self.run(self.store.runs.create_sampler(sampler, sampler_number))
        mirrored = self.world.samplers.setdefault(
            sampler.sampling_session_id,
            told.Sampler(
                sampling_session_id=sampler.sampling_session_id,
                owner=session.owner,
                session_id=session.session_id,
                sampling_session_seq_id=sampler_number,
                version_id=None,
            ),
        )
        assert found.version_id == mirrored.version_id
        if join:
            mirrored.clients += 1
            joined = self.run(self.store.runs.join_sampler(sampler.sampling_session_id))
            assert joined == mirrored.clients

    # -- requests ----------------------------------------------------------------------------

    def step(
        self, model: told.Model, seq_id: int, kind: Kind, *, payload: bytes = b"", tokens: int = 0
    ) -> NewRequest:
        return NewRequest(
            owner=model.owner,
            kind=kind,
            base_model=BASE,
            payload=payload or f"{model.model_id} {seq_id}".encode(),
            session_id=model.session_id,
            model_id=model.model_id,
            seq_id=seq_id,
            tokens=tokens,
        )

    def take(self, new: NewRequest, accepted: Accepted, now_s: float) -> told.Request:
        """What the model makes of an acceptance."""
        place = new.model_id or new.sampling_session_id
        assert place is not None
        assert new.seq_id is not None
        assert new.session_id is not None
        first = self.world.at(place, new.seq_id)
        assert accepted.is_new == (first is None)
        if first is not None:
            assert (accepted.request_id, accepted.kind) == (first.request_id, first.kind)
            if len(new.payload) > INLINE_BYTES:
                self.left.append("payloads")
            return first
        assert accepted.request_id not in self.world.requests
        assert accepted.request_id not in self.gone
        self.world.requests[accepted.request_id] = told.Request(
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

    def some_model(self, number: int) -> told.Model:
        return self.pick(list(self.world.models.values()), number)

    @precondition(lambda self: self.world.models)
    @rule(
        number=PICK,
        seq_ids=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        kind=st.sampled_from([Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP]),
        large=st.booleans(),
    )
    def accept_steps(self, number: int, seq_ids: list[int], kind: Kind, large: bool) -> None:
        """Some at once, repeats among them: the first of each number counts."""
        now_s = self.later()
        model = self.some_model(number)
        payload = LARGE if large else b""
        new = [self.step(model, one, kind, payload=payload, tokens=one) for one in seq_ids]

        async def act() -> list[Accepted]:
            return await asyncio.gather(*(self.store.requests.accept(one) for one in new))

        answers = zip(new, self.run(act()), strict=True)
        # Which of some repeats came first is for the store to say.
        for one, accepted in sorted(answers, key=lambda pair: not pair[1].is_new):
            self.take(one, accepted, now_s)

    @precondition(lambda self: self.world.models)
    @rule(number=PICK, seq_id=st.integers(1, 9))
    def refuse_step(self, number: int, seq_id: int) -> None:
        now_s = self.later()
        model = self.some_model(number)
        new = self.step(model, seq_id, Kind.OPTIM_STEP)
        self.run(self.store.requests.file_refused(new, "bad", cause="refused"))
        if self.world.at(model.model_id, seq_id) is None:
            [row] = [
                one
                for one in self.run(self.store.requests.log(model.model_id))
                if one.seq_id == seq_id
            ]
            accepted = Accepted(request_id=row.request_id, kind=row.kind, sequences=0, is_new=True)
            request = self.take(new, accepted, now_s)
            self.world.finish(request, None, "bad", now_s)

    @precondition(lambda self: self.world.samplers)
    @rule(number=PICK, clone_id=st.integers(0, 1), seq_ids=st.lists(st.integers(0, 3), min_size=1))
    def accept_samples(self, number: int, clone_id: int, seq_ids: list[int]) -> None:
        now_s = self.later()
        sampler = self.pick(list(self.world.samplers.values()), number)
        for seq_id in seq_ids[:3]:
            new = NewRequest(
                owner=sampler.owner,
                kind=Kind.SAMPLE,
                base_model=BASE,
                payload=b"{}",
                session_id=sampler.session_id,
                sampling_session_id=sampler.sampling_session_id,
                seq_id=clone_id * SAMPLES_OF_A_CLONE + seq_id,
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
                failing = self.store._database.submit(fail)
            with pytest.raises(ValueError, match="cannot be written"):
                await failing
            return [(result, await future) for result, future in futures]

        async def submitted() -> list[tuple[bytes | None, asyncio.Future[Completion | None]]]:
            futures: list[tuple[bytes | None, asyncio.Future[Completion | None]]] = []
            for number, one in enumerate(chosen):
                if outcome == "failed":
                    failing = self.store.requests.fail(
                        one.request_id, "no", category="server", cause="work"
                    )
                    futures.append((None, failing))
                    continue
                result = sampled(2, 3) if one.kind == Kind.SAMPLE else f"{now_s} {number}".encode()
                if outcome == "large" and one.kind != Kind.SAMPLE:
                    result += LARGE
                place = await self.store.requests.keep(result)
                futures.append((result, self.store.requests.finish(one.request_id, result, place)))
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

    def counted(self, request: told.Request, now_s: float) -> None:
        if request.status == "failed":
            return
        if request.kind == Kind.SAMPLE:
            self.world.count(request, now_s, prefill=3, cached=2, sampled=3)
        elif request.kind == Kind.FORWARD_BACKWARD:
            self.world.count(request, now_s, training=request.tokens)

    def completed(self, request: told.Request, event: Completion | None, now_s: float) -> None:
        if request.sampling_session_id is None:
            assert event is None
            return
        assert event is not None
        assert event.position > max(self.world.events, default=0)
        self.world.events[event.position] = told.Event(
            position=event.position,
            sampling_session_id=request.sampling_session_id,
            clone_id=request.seq_id // SAMPLES_OF_A_CLONE,
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
        """The first time counts."""
        for _ in range(times):
            self.fetch_once(numbers, owner, together)

    def fetch_once(self, numbers: list[int], owner: str, together: bool) -> None:
        now_s = self.later()
        finished = [one for one in self.world.requests.values() if one.status != "waiting"]
        chosen = [self.pick(finished, number) for number in numbers if finished]
        if together:
            ids = [one.request_id for one in chosen]
            self.store.requests.all_fetched(ids, owner=owner)
        for one in chosen:
            if not together:
                self.store.requests.fetched(one.request_id)
            if one.fetched_s is None and (not together or one.owner == owner):
                one.fetched_s = now_s
        self.flush()

    @rule(number=PICK, owner=OWNERS)
    def look(self, number: int, owner: str) -> None:
        if self.world.requests:
            self.read_request(number)
        if self.world.names:
            self.find_checkpoint(number, owner)
        self.list_checkpoints(owner)

    def read_request(self, number: int) -> None:
        """Through the front door, whatever the tables say."""
        one = self.pick(list(self.world.requests.values()), number)
        row = self.run(self.store.requests.get(one.request_id))
        assert row is not None
        assert (row.status, row.error) == (Status(one.status), one.error)
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

    # -- checkpoints -------------------------------------------------------------------------

    @precondition(lambda self: self.world.models)
    @rule(
        number=PICK,
        kind=st.sampled_from([KINDS[0], *KINDS]),
        name=NAMES,
        after_s=st.sampled_from([0.0, 600.0]),
        overwrite=st.sampled_from([False, False, True]),
        ttl_s=st.sampled_from([None, None, 500.0]),
        sampler_number=st.sampled_from([None, None, None, 0, 1]),
    )
    def save_checkpoint(
        self,
        number: int,
        kind: str,
        name: str,
        after_s: float,
        overwrite: bool,
        ttl_s: float | None,
        sampler_number: int | None,
    ) -> None:
        """Under a name or, with the number of a sampler, under none."""
        self.clock.now_s += after_s
        now_s = self.later()
        model = self.some_model(number)
        steps = [one for one in self.world.requests.values() if one.model_id == model.model_id]
        seq_id = max((one.seq_id for one in steps), default=0) + 1
        new = self.step(model, seq_id, Kind.SAVE_WEIGHTS)
        request = self.take(new, self.run(self.store.requests.accept(new)), now_s)
        version = self.store.checkpoints.new_version(
            owner=model.owner,
            model_id=model.model_id,
            kind=kind,
            name=name if sampler_number is None else None,
        ).sized(7)
        folder = self.store.checkpoints.folder(version)
        folder.mkdir(parents=True)
        (folder / "adapter").write_text(version.version_id)
        expires_s = None if ttl_s is None else now_s + ttl_s
        naming, sampler = None, None
        if sampler_number is None:
            naming = Naming(overwrite=overwrite, expires_s=expires_s, user_metadata={"m": 1})
        else:
            sampler = Sampler(
                sampling_session_id=f"{model.session_id}:sample:{sampler_number}",
                owner=model.owner,
                session_id=model.session_id,
                base_model=BASE,
                version_id=version.version_id,
                model_path=None,
            )
        key = (model.model_id, kind, name)
        known = self.world.names.get(key)
        refusal: type[Exception] | None = None
        if sampler is not None and sampler.sampling_session_id in self.world.samplers:
            refusal = SamplerTaken
        elif naming is not None and known is not None and not overwrite and known.alive(now_s):
            refusal = NameTaken
        saving = self.store.checkpoints.save(
            version,
            request_id=request.request_id,
            result=b"saved",
            naming=naming,
            sampler=None
            if sampler is None or sampler_number is None
            else (sampler, sampler_number),
        )
        if refusal is not None:
            with pytest.raises(refusal):
                self.run(saving)
            self.left.append("checkpoints")
            return
        self.run(saving)
        self.world.finish(request, b"saved", None, now_s)
        request.version_id = version.version_id
        self.world.audit.append((now_s, "checkpoint.saved"))
        self.world.versions[version.version_id] = told.Version(
            **{
                each.name: getattr(version, each.name)
                for each in fields(told.Version)
                if each.name != "discarded_s"
            }
        )
        if sampler is not None and sampler_number is not None:
            self.world.samplers[sampler.sampling_session_id] = told.Sampler(
                sampling_session_id=sampler.sampling_session_id,
                owner=model.owner,
                session_id=model.session_id,
                sampling_session_seq_id=sampler_number,
                version_id=version.version_id,
            )
        else:
            self.world.names[key] = told.Named(
                model_id=model.model_id,
                kind=kind,
                name=name,
                version_id=version.version_id,
                saved_s=now_s,
                expires_s=expires_s,
            )

    def find_checkpoint(self, number: int, owner: str) -> None:
        named = self.pick(list(self.world.names.values()), number)
        path = f"tinker://{named.model_id}/{named.kind}/{named.name}"
        found = self.run(self.store.checkpoints.find(path, readers=[owner]))
        version = self.world.versions[named.version_id]
        if named.alive(self.clock.now_s) and (named.public or version.owner == owner):
            assert found is not None
            assert found.version_id == version.version_id
            folder = self.run(self.store.checkpoints.open(found.version_id))
            assert (folder / "adapter").read_text() == version.version_id
        else:
            assert found is None

    @precondition(lambda self: self.world.names)
    @rule(number=PICK, request_number=PICK)
    def load_checkpoint(self, number: int, request_number: int) -> None:
        now_s = self.later()
        named = self.pick(list(self.world.names.values()), number)
        model = self.some_model(request_number)
        new = self.step(model, 10 + number % 4, Kind.LOAD_WEIGHTS)
        request = self.take(new, self.run(self.store.requests.accept(new)), now_s)
        if request.status != "waiting" or request.kind != Kind.LOAD_WEIGHTS:
            return
        self.run(self.store.requests.finish_load(request.request_id, b"{}", named.version_id))
        self.world.finish(request, b"{}", None, now_s)
        request.version_id = named.version_id

    @precondition(lambda self: self.world.names)
    @rule(
        number=PICK,
        change=st.sampled_from(["delete", "publish", "unpublish", "expire", "keep"]),
        after_s=st.sampled_from([0.0, 600.0]),
    )
    def change_name(self, number: int, change: str, after_s: float) -> None:
        """One that has expired meanwhile is not there, though its row is."""
        self.clock.now_s += after_s
        now_s = self.later()
        named = self.pick(list(self.world.names.values()), number)
        of = self.store.catalog
        key = {"model_id": named.model_id, "kind": named.kind, "name": named.name}
        alive = named.alive(now_s)
        if change == "delete":
            assert self.run(of.delete(**key)) is alive
            if alive:
                self.world.drop_names([named], now_s)
            return
        event = "checkpoint.expiry_set"
        if change in ("publish", "unpublish"):
            public = change == "publish"
            event = f"checkpoint.{change}ed"
            assert self.run(of.set_public(public, **key)) is alive
            named.public = public if alive else named.public
        else:
            expires_s = now_s + 2.0 if change == "expire" else None
            assert self.run(of.set_expiry(expires_s, **key)) is alive
            named.expires_s = expires_s if alive else named.expires_s
        if alive:
            self.world.audit.append((now_s, event))
        if change == "expire":
            # Gone with the first look after its moment.
            self.clock.now_s += 2.0
            self.drop_expired_names()

    def list_checkpoints(self, owner: str) -> None:
        found, count = self.run(
            self.store.catalog.checkpoints(owner=owner, kinds=KINDS, published=True)
        )
        there = [
            one
            for one in self.world.names.values()
            if one.alive(self.clock.now_s)
            and (one.public or self.world.versions[one.version_id].owner == owner)
        ]
        there.sort(key=lambda one: -one.saved_s)
        assert count == len(there)
        assert [one.version.version_id for one in found] == [one.version_id for one in there]

    # -- keeping and deleting ----------------------------------------------------------------

    @rule(
        last=st.integers(1, 8),
        ages_s=THREE_AGES_S,
        keep_last=st.integers(1, 3),
        dies=st.booleans(),
    )
    def tidy(
        self, last: int, ages_s: tuple[float, float, float], keep_last: int, dies: bool
    ) -> None:
        """As the janitor does: everything in turn, or it dies after any of it."""
        if not dies:
            self.tidy_parts(range(last), ages_s, keep_last)
            return
        self.tidy_parts(range(last - 1), ages_s, keep_last)
        self.tidy_and_die(last - 1, ages_s, keep_last)

    def tidy_and_die(self, part: int, ages_s: tuple[float, float, float], keep_last: int) -> None:
        """The rows are gone, and the process before it deletes their files: the next sweep does."""
        kept: set[str] = set()

        async def forget(places: Sequence[str]) -> None:
            kept.update(place for place in places if (self.folder / place).exists())

        if part == 7:  # what sweeps deletes no rows
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store.retention, "_remove", forget)
            self.tidy_parts([part], ages_s, keep_last)
        self.left += [place.partition("/")[0] for place in kept]
        self.store.close()
        self.store = self.opened()

    @rule(ages_s=THREE_AGES_S, parts=st.sampled_from([[0], [0, 1], [0, 7], [7]]))
    def tidy_requests(self, ages_s: tuple[float, float, float], parts: list[int]) -> None:
        self.tidy_parts(parts, ages_s, 1)

    @rule(
        ages_s=THREE_AGES_S,
        parts=st.sampled_from([[2, 4], [3, 4], [4], [4, 7]]),
        keep_last=st.integers(1, 3),
        dies=st.booleans(),
    )
    def tidy_checkpoints(
        self, ages_s: tuple[float, float, float], parts: list[int], keep_last: int, dies: bool
    ) -> None:
        if dies:
            self.tidy_and_die(4, ages_s, keep_last)
        self.tidy_parts(parts, ages_s, keep_last)

    @rule(ages_s=THREE_AGES_S, parts=st.sampled_from([[5], [6], [6, 7]]))
    def tidy_snapshots(self, ages_s: tuple[float, float, float], parts: list[int]) -> None:
        self.tidy_parts(parts, ages_s, 1)

    def tidy_parts(
        self, parts: Sequence[int], ages_s: tuple[float, float, float], keep_last: int
    ) -> None:
        for part in parts:
            (
                lambda: self.drop_results(*ages_s),
                lambda: self.drop_events(ages_s[0]),
                lambda: self.drop_expired_names(),
                lambda: self.keep_last_names(keep_last),
                lambda: self.drop_versions(ages_s[2]),
                lambda: self.drop_snapshots(*ages_s[1:]),
                lambda: self.drop_older_snapshots(ages_s[0]),
                lambda: self.sweep(),
            )[part]()

    def drop_expired_names(self) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_expired_names(now_s=now_s))
        gone = [one for one in self.world.names.values() if not one.alive(now_s)]
        self.world.drop_names(gone, now_s)

    @precondition(lambda self: self.world.names)
    @rule(number=PICK, keep_last=st.integers(0, 2))
    def save_while_names_are_dropped(self, number: int, keep_last: int) -> None:
        """A name that was to go and has got another checkpoint meanwhile stays."""
        named = self.pick(list(self.world.names.values()), number)
        models = list(self.world.models)

        def meanwhile() -> None:
            place = models.index(named.model_id)
            self.save_checkpoint(place, named.kind, named.name, 0.0, True, None, None)

        self.keep_last_names(keep_last, meanwhile)

    def keep_last_names(self, keep_last: int, meanwhile: Callable[[], None] | None = None) -> None:
        crowd = self.run(self.store.retention.crowded(keep_last=keep_last))
        doomed = self.surplus_names(keep_last)
        if meanwhile is not None:
            meanwhile()
        now_s = self.later()
        self.run(self.store.retention.drop_names(surplus(crowd, keep_last=keep_last)))
        there = {id(one) for one in self.world.names.values()}
        self.world.drop_names([one for one in doomed if id(one) in there], now_s)

    def surplus_names(self, keep_last: int) -> list[told.Named]:
        found = []
        for model_id in self.world.models:
            for kind in KINDS:
                of_kind = [
                    one
                    for one in self.world.names.values()
                    if (one.model_id, one.kind) == (model_id, kind)
                ]
                of_kind.sort(key=lambda one: -one.saved_s)
                found += [one for one in of_kind[keep_last:] if not one.public]
        return found

    def drop_versions(self, age_s: float) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_versions(abandoned_before_s=now_s - age_s))
        for version in self.world.versions.values():
            if version.discarded_s is None and not self.world.in_use(version, now_s - age_s):
                version.discarded_s = now_s

    def drop_results(self, fetched_s: float, unfetched_s: float, abandoned_s: float) -> None:
        now_s = self.later()
        bounds = {
            "fetched_before_s": now_s - fetched_s,
            "unfetched_before_s": now_s - unfetched_s,
            "abandoned_before_s": now_s - abandoned_s,
        }
        before = set(self.world.requests)
        dropped = self.run(self.store.retention.drop_results(**bounds))
        assert set(dropped) == self.world.drop_results(**bounds)
        self.gone |= before - set(self.world.requests)

    def drop_events(self, age_s: float) -> None:
        before_s = self.later() - age_s
        self.run(
            self.store.retention.drop_events(
                completions_before_s=before_s, telemetry_before_s=before_s, audit_before_s=before_s
            )
        )
        self.world.events = {
            position: one for position, one in self.world.events.items() if one.at_s >= before_s
        }
        self.world.audit = [one for one in self.world.audit if one[0] >= before_s]

    @precondition(lambda self: self.world.models)
    @rule(number=PICK, step_number=PICK, spoiled=st.sampled_from([None, "nan"]))
    def save_snapshot(self, number: int, step_number: int, spoiled: str | None) -> None:
        """After any step: it is refused while a step up to it has no result."""
        now_s = self.later()
        model = self.some_model(number)
        steps = {
            one.seq_id for one in self.world.requests.values() if one.model_id == model.model_id
        }
        first_waiting = sorted(one.seq_id for one in self.world.waiting(model.model_id))[:1]
        # The first that waits is tried most: just before it is allowed, at it is not.
        seq_id = self.pick([*first_waiting, *sorted(steps), *first_waiting] or [0], -step_number)
        known = self.world.snapshots.get(model.model_id)
        seq_id = max(seq_id, -1 if known is None else known.seq_id)
        place, folder = self.store.snapshots.new_place(model.model_id)
        folder.mkdir(parents=True)
        (folder / "state").write_text(place)
        snapshot = told.Snapshot(
            model_id=model.model_id,
            seq_id=seq_id,
            place=place,
            spoiled=spoiled,
            size_bytes=5,
            created_s=now_s,
        )
        saved = self.run(
            self.store.snapshots.save(
                model_id=model.model_id, seq_id=seq_id, place=place, size_bytes=5, spoiled=spoiled
            )
        )
        assert saved is self.world.snapshot(snapshot)
        newest = self.run(self.store.snapshots.newest(model.model_id))
        if newest is not None:
            opened = self.run(self.store.snapshots.open(newest))
            assert (opened / "state").read_text() == newest.place

    def drop_snapshots(self, silent_s: float, abandoned_s: float) -> None:
        now_s = self.later()
        behind = self.run(
            self.store.retention.without_snapshot(
                silent_before_s=now_s - silent_s,
                abandoned_before_s=now_s - abandoned_s,
                most=1000,
            )
        )
        assert set(behind) == {
            model.model_id
            for model in self.world.models.values()
            if not self.world.ended(model.session_id, now_s - abandoned_s)
            and self.world.sessions[model.session_id].seen_s < now_s - silent_s
            and any(one.status == "done" for one in self.log_of(model.model_id))
        }
        self.run(self.store.retention.drop_snapshots(abandoned_before_s=now_s - abandoned_s))
        self.world.drop_snapshots(now_s - abandoned_s)

    def drop_older_snapshots(self, age_s: float) -> None:
        now_s = self.later()
        self.run(self.store.retention.drop_older_snapshots(before_s=now_s - age_s))
        self.world.drop_older_snapshots(now_s - age_s)

    @precondition(lambda self: self.world.snapshots)
    @rule(number=PICK)
    def damage_snapshot(self, number: int) -> None:
        """The one before it, or the beginning, takes its place; or nobody does, and it is said."""
        self.later()
        bad = self.pick(list(self.world.snapshots.values()), number)
        file = self.folder / bad.place / "state"
        text = file.read_text()
        file.write_text("torn")
        if self.world.fall_back(bad.model_id):
            found = self.run(self.store.snapshots.sound(bad.model_id))
            before = self.world.snapshots.get(bad.model_id)
            assert (found and found.place) == (before and before.place)
        else:
            with pytest.raises(Damaged, match="not kept any more"):
                self.run(self.store.snapshots.sound(bad.model_id))
            file.write_text(text)

    def sweep(self) -> None:
        """Nothing is left on disk that nothing refers to."""
        swept = self.run(self.store.retention.sweep(before_s=float("inf")))
        assert swept == len(self.orphans) + len(self.left)
        self.orphans, self.left = set(), []

    # -- keys --------------------------------------------------------------------------------

    @rule(owner=OWNERS, number=PICK, act=st.sampled_from(["create", "use", "revoke"]))
    def keep_keys(self, owner: str, number: int, act: str) -> None:
        if act == "create" or not self.world.keys:
            self.create_key(owner, [None, 500.0][number % 2])
        else:
            self.use_key(number, revoke=act == "revoke")

    def create_key(self, owner: str, ttl_s: float | None) -> None:
        now_s = self.later()
        expires_s = None if ttl_s is None else now_s + ttl_s
        key, secret = self.run(self.store.keys.create(owner=owner, name="n", expires_s=expires_s))
        assert key.key_id > max(self.world.keys, default=0)
        self.secrets[key.key_id] = secret
        self.world.keys[key.key_id] = told.Key(
            key_id=key.key_id, owner=owner, name="n", created_s=now_s, expires_s=expires_s
        )
        self.world.audit.append((now_s, "key.created"))

    def use_key(self, number: int, revoke: bool) -> None:
        key = self.pick(list(self.world.keys.values()), number)
        for _ in range(2 if revoke else 0):  # the first time counts
            now_s = self.later()
            self.run(self.store.keys.revoke(key.key_id))
            if key.revoked_s is None:
                key.revoked_s = now_s
                self.world.audit.append((now_s, "key.revoked"))
        now_s = self.later()
        found = self.run(self.store.keys.by_secret(self.secrets[key.key_id]))
        assert found is not None
        expired = key.expires_s is not None and key.expires_s <= now_s
        state = "expired" if expired else "active"
        assert found.state(now_s) == ("revoked" if key.revoked_s is not None else state)
        assert self.run(self.store.keys.by_secret("tml-nobody")) is None
        self.store.keys.used(key.key_id)
        key.used_s = now_s
        self.flush()

    # -- what holds after every operation ----------------------------------------------------

    def log_of(self, model_id: str) -> list[told.Request]:
        snapshot = self.world.snapshots.get(model_id)
        return self.world.log(model_id, after=-1 if snapshot is None else snapshot.seq_id)

    @invariant()
    def the_tables_and_the_files_are_what_the_model_says(self) -> None:
        found = self.run(self.store._database.read(everything))
        self.compare_files(found)
        self.compare_rows(found)

    def compare_rows(self, found: dict[str, list[dict[str, Any]]]) -> None:
        world = self.world
        for table, expected in (
            ("sessions", world.sessions),
            ("models", world.models),
            ("samplers", world.samplers),
            ("checkpoint_versions", world.versions),
            ("checkpoint_names", world.names),
            ("snapshots", world.snapshots),
            ("completions", world.events),
            ("api_keys", world.keys),
        ):
            assert in_order(found[table], expected.values()) == in_order(
                [asdict(one) for one in expected.values()], expected.values()
            ), table
        rows = [self.with_bytes(row) for row in found["requests"]]
        assert in_order(rows, world.requests.values()) == in_order(
            [asdict(one) for one in world.requests.values()], world.requests.values()
        )
        ways_back = {row["model_id"]: row["place"] for row in found["older_snapshots"]}
        assert ways_back == {
            model_id: None if older is None else older.place
            for model_id, older in world.older.items()
        }
        used = {
            (row["owner"], row["hour"], row["session_id"], row["what"]): row["amount"]
            for row in found["usage"]
        }
        assert used == world.usage
        assert sorted((row["at_s"], row["event"]) for row in found["audit"]) == sorted(world.audit)

    def with_bytes(self, row: dict[str, Any]) -> dict[str, Any]:
        """A request with its payload and result, wherever they are."""
        for name in ("payload", "result"):
            place = row[f"{name}_place"]
            assert place is None or row[name] is None
            if place is not None:
                row[name] = (self.folder / place).read_bytes()
            elif row[name] is not None:
                row[name] = bytes(row[name])
        return row

    def compare_files(self, found: dict[str, list[dict[str, Any]]]) -> None:
        """What is referred to is there; nothing else, but what work that came to nothing left."""
        known = {row["place"] for row in found["checkpoint_versions"] if not row["discarded_s"]}
        known |= {row["place"] for row in found["snapshots"] + found["older_snapshots"]}
        for row in found["requests"]:
            known |= {row["payload_place"], row["result_place"]}
        known -= {None}
        there = set()
        for room, depth in ROOMS.items():
            for path in (self.folder / room).glob("/".join("*" * depth)):
                there.add(str(path.relative_to(self.folder)))
        assert known <= there
        # What went before stays until the next sweep, and nothing that was deleted joins it.
        assert self.orphans <= there - known
        joined = sorted(place.partition("/")[0] for place in there - known - self.orphans)
        assert joined == sorted(self.left)
        self.orphans, self.left = there - known, []

    @invariant()
    def a_new_start_finds_the_work_and_the_logs(self) -> None:
        """Many questions, so not after every step."""
        self.steps += 1
        if self.steps % 3:
            return
        waiting = self.run(self.store.requests.waiting())
        assert {one.request_id for one in waiting} == {
            one.request_id for one in self.world.waiting()
        }
        came = [self.world.requests[one.request_id].created_s for one in waiting]
        assert came == sorted(came)
        for model_id in list(self.world.models)[:2]:
            log = self.run(self.store.requests.log(model_id, after=2))
            assert [one.request_id for one in log] == [
                one.request_id for one in self.world.log(model_id, after=2)
            ]
        positions = sorted(self.world.events)
        middle = positions[len(positions) // 2] if positions else 0
        for sampling_session_id in list(self.world.samplers)[:2]:
            events = self.run(
                self.store.requests.completions(
                    sampling_session_id, 0, after=middle - 1, up_to=middle + 2
                )
            )
            assert [one.position for one in events] == [
                position
                for position in positions
                if middle <= position <= middle + 2
                and self.world.events[position].sampling_session_id == sampling_session_id
                and self.world.events[position].clone_id == 0
            ]
        if positions:
            assert self.run(self.store.requests.last_position()) == positions[-1]


def everything(connection: sa.Connection) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [dict(row._mapping) for row in connection.execute(sa.select(table))]
        for name, table in metadata.tables.items()
    }


def in_order(rows: list[dict[str, Any]], like: Any) -> list[tuple[Any, ...]]:
    """The fields that the model knows, in an order that does not depend on the database."""
    first = next(iter(like), None)
    if first is None:
        return [tuple(row.values()) for row in rows]
    names = [each.name for each in fields(first)]
    return sorted((tuple(row[name] for name in names) for row in rows), key=repr)


def check(url: str, root: Path, clock: Clock, *, examples: int) -> None:
    class Machine(StoreMachine):
        pass

    Machine.url, Machine.root, Machine.clock = url, root, clock
    # The same ones each time, unless more were asked for: those look elsewhere.
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=int(EXAMPLES or examples),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=EXAMPLES is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in TIMED:
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be had: what a dead process leaves behind is the same there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


# The threads that die in `crash`.
@pytest.mark.filterwarnings("ignore:Exception in thread tinkex-writer")
@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_on_sqlite_the_store_does_what_its_model_does(folder: Path, clock: Clock) -> None:
    check(f"sqlite:///{folder / 'tinkex.db'}", folder, clock, examples=20)


@pytest.mark.filterwarnings("ignore:Exception in thread tinkex-writer")
@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_on_postgresql_the_store_does_what_its_model_does(
    folder: Path, clock: Clock, postgres: Postgres
) -> None:
    check(postgres.database(), folder, clock, examples=12)
