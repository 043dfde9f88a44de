"""Rules for sessions and their models and samplers."""

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from server.store import reference_model as expected
from server.store.machine.base import AGES_S, BASE, OWNERS, PICK
from server.store.machine.requests import Requests
from tinkex.server.queued_request import Kind
from tinkex.server.store import Model, Sampler


class Clients(Requests):
    """Creation is idempotent; sessions finish, time out and come back."""

    @rule(owner=OWNERS, key=st.sampled_from([None, "k1", "k2"]))
    def create_session(self, owner: str, key: str | None) -> None:
        now_s = self.later()
        session = self.run(
            self.store.sessions.create_session(
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
        self.world.sessions[session.session_id] = expected.Session(
            session_id=session.session_id,
            owner=owner,
            idempotency_key=key,
            created_s=now_s,
            seen_s=now_s,
        )
        self.world.audit.append((now_s, "session.created"))

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK, back=st.booleans())
    def see_session(self, number: int, back: bool) -> None:
        now_s = self.later()
        session = self.some_session(number)
        if back:
            self.store.sessions.mark_active(session.session_id)
            session.lapsed_s = None
        else:
            self.store.sessions.mark_seen(session.session_id)
        session.seen_s = now_s
        self.flush()

    @precondition(lambda self: self.world.sessions)
    @rule(number=PICK)
    def finish_session(self, number: int) -> None:
        now_s = self.later()
        session = self.some_session(number)
        self.run(self.store.sessions.finish_session(session.session_id, f"r{now_s}", None))
        if session.finished_s is None:
            session.finished_s, session.finish_reason = now_s, f"r{now_s}"
            self.world.audit.append((now_s, "session.finished"))

    @rule(age_s=AGES_S, number=PICK, comes_back=st.booleans())
    def mark_timed_out(self, age_s: float, number: int, comes_back: bool) -> None:
        now_s = self.later()
        inactive = self.run(self.store.sessions.inactive_sessions(now_s - age_s))
        busy = {one.session_id for one in self.world.waiting()}
        assert set(inactive) == {
            one.session_id
            for one in self.world.sessions.values()
            if one.finished_s is None
            and one.lapsed_s is None
            and one.seen_s < now_s - age_s
            and one.session_id not in busy
        }
        if inactive:
            self.run(self.store.sessions.mark_timed_out(inactive, before_s=now_s - age_s))
        for session_id in inactive:
            self.world.sessions[session_id].lapsed_s = now_s
        if inactive and comes_back:
            index = list(self.world.sessions).index(self.pick(sorted(inactive), number))
            self.see_session(index, back=True)

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
        mirrored = expected.Model(
            model_id=model.model_id,
            owner=model.owner,
            session_id=model.session_id,
            model_seq_id=model_seq_id,
        )
        new = self.step(mirrored, 0, Kind.CREATE_MODEL)
        accepted = self.run(
            self.store.models.create_model(model=model, model_seq_id=model_seq_id, request=new)
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
        found = self.run(self.store.models.create_sampler(sampler, sampler_number))
        mirrored = self.world.samplers.setdefault(
            sampler.sampling_session_id,
            expected.Sampler(
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
            joined = self.run(self.store.models.add_sampler_client(sampler.sampling_session_id))
            assert joined == mirrored.clients
