"""A reference model of the store on plain dictionaries, for the stateful test."""

from dataclasses import dataclass, field

Name = tuple[str, str, str]


@dataclass(kw_only=True, slots=True)
class Session:
    session_id: str
    owner: str
    idempotency_key: str | None
    created_s: float
    seen_s: float
    finished_s: float | None = None
    finish_reason: str | None = None
    lapsed_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Model:
    model_id: str
    owner: str
    session_id: str
    model_seq_id: int


@dataclass(kw_only=True, slots=True)
class Sampler:
    sampling_session_id: str
    owner: str
    session_id: str
    sampling_session_seq_id: int
    version_id: str | None
    clients: int = 0


@dataclass(kw_only=True, slots=True)
class Request:
    request_id: str
    owner: str
    session_id: str
    kind: str
    seq_id: int
    created_s: float
    #: The bytes, from the row or a file; None once they are deleted.
    payload: bytes | None
    model_id: str | None = None
    sampling_session_id: str | None = None
    version_id: str | None = None
    tokens: int = 0
    status: str = "waiting"
    result: bytes | None = None
    result_bytes: int | None = None
    error: str | None = None
    finished_s: float | None = None
    fetched_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Event:
    position: int
    sampling_session_id: str
    clone_id: int
    request_id: str
    result_bytes: int | None
    at_s: float


@dataclass(kw_only=True, slots=True)
class Version:
    version_id: str
    owner: str
    model_id: str
    kind: str
    name: str | None
    place: str
    size_bytes: int
    created_s: float
    discarded_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Named:
    model_id: str
    kind: str
    name: str
    version_id: str
    saved_s: float
    expires_s: float | None
    public: bool = False

    def alive(self, now_s: float) -> bool:
        return self.expires_s is None or self.expires_s > now_s


@dataclass(kw_only=True, slots=True)
class Snapshot:
    model_id: str
    seq_id: int
    place: str
    spoiled: str | None
    size_bytes: int
    created_s: float


@dataclass(kw_only=True, slots=True)
class Key:
    key_id: int
    owner: str
    name: str
    created_s: float
    expires_s: float | None
    used_s: float | None = None
    revoked_s: float | None = None


@dataclass(slots=True)
class World:
    """The expected content of the store."""

    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    #: By sampler and position.
    events: dict[tuple[str, int], Event] = field(default_factory=dict)
    versions: dict[str, Version] = field(default_factory=dict)
    names: dict[Name, Named] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    #: The fallback of a model, None for an empty model; missing if there is no fallback.
    older: dict[str, Snapshot | None] = field(default_factory=dict)
    keys: dict[int, Key] = field(default_factory=dict)
    #: By owner, hour, session and kind of tokens.
    usage: dict[tuple[str, int, str, str], int] = field(default_factory=dict)
    #: Time and event.
    audit: list[tuple[float, str]] = field(default_factory=list)

    # -- questions ---------------------------------------------------------------------------

    def waiting(self, model_id: str | None = None) -> list[Request]:
        return [
            one
            for one in self.requests.values()
            if one.status == "waiting" and model_id in (None, one.model_id)
        ]

    def log(self, model_id: str, *, after: int) -> list[Request]:
        steps = [
            one
            for one in self.requests.values()
            if one.model_id == model_id and one.seq_id > after and one.status != "waiting"
        ]
        return sorted(steps, key=lambda one: one.seq_id)

    def at(self, parent_id: str, seq_id: int) -> Request | None:
        """The request of a model or a sampler with this seq_id."""
        for one in self.requests.values():
            if parent_id in (one.model_id, one.sampling_session_id) and one.seq_id == seq_id:
                return one
        return None

    def newest_position(self, sampling_session_id: str) -> int:
        """Of the events that were not deleted."""
        return max(
            (position for of, position in self.events if of == sampling_session_id), default=0
        )

    def ended(self, session_id: str, abandoned_before_s: float) -> bool:
        session = self.sessions[session_id]
        return session.finished_s is not None or session.seen_s < abandoned_before_s

    def needed(self, request: Request, abandoned_before_s: float) -> bool:
        """Whether recovery may need it, or it has the error of a model that was not created."""
        if request.model_id is None:
            return False
        if request.seq_id == 0 and request.status == "failed":
            return True
        snapshot = self.snapshots.get(request.model_id)
        if request.model_id in self.older:
            snapshot = self.older[request.model_id]
        if request.seq_id <= (-1 if snapshot is None else snapshot.seq_id):
            return False
        of_model = self.models[request.model_id]
        return not self.ended(of_model.session_id, abandoned_before_s) or bool(
            self.waiting(request.model_id)
        )

    def in_use(self, version: Version, abandoned_before_s: float) -> bool:
        if any(name.version_id == version.version_id for name in self.names.values()):
            return True
        if any(
            sampler.version_id == version.version_id
            and not self.ended(sampler.session_id, abandoned_before_s)
            for sampler in self.samplers.values()
        ):
            return True
        return any(
            one.version_id == version.version_id
            and (
                one.status == "waiting"
                or (one.kind == "load_weights" and self.needed(one, abandoned_before_s))
            )
            for one in self.requests.values()
        )

    # -- changes -----------------------------------------------------------------------------

    def finish(
        self, request: Request, result: bytes | None, error: str | None, at_s: float
    ) -> None:
        request.status = "failed" if result is None else "done"
        request.result, request.error = result, error
        request.result_bytes = None if result is None else len(result)
        request.finished_s = at_s

    def count(self, request: Request, at_s: float, **amounts: int) -> None:
        for what, amount in amounts.items():
            if amount:
                key = (request.owner, int(at_s) // 3600, request.session_id, what)
                self.usage[key] = self.usage.get(key, 0) + amount

    def drop_results(
        self, *, fetched_before_s: float, unfetched_before_s: float, abandoned_before_s: float
    ) -> set[str]:
        """Decides for all before deleting any."""
        old = [
            (one, self.needed(one, abandoned_before_s))
            for one in self.requests.values()
            if one.finished_s is not None
            and (
                one.finished_s < unfetched_before_s
                if one.fetched_s is None
                else one.fetched_s < fetched_before_s
            )
        ]
        gone = set()
        for one, needed in old:
            if not needed:
                del self.requests[one.request_id]
                gone.add(one.request_id)
            elif one.result is not None:
                one.result = None
                gone.add(one.request_id)
        return gone

    def snapshot(self, new: Snapshot) -> bool:
        """Refused while a step that it contains may run again."""
        past = [
            one
            for one in self.requests.values()
            if one.model_id == new.model_id and one.seq_id <= new.seq_id
        ]
        if any(one.status == "waiting" for one in past):
            return False
        before = self.snapshots.get(new.model_id)
        for one in past:
            if before is not None and one.seq_id <= before.seq_id:
                one.payload = None
        self.older[new.model_id] = before
        self.snapshots[new.model_id] = new
        return True

    def drop_older_snapshots(self, before_s: float) -> None:
        for model_id in list(self.older):
            newest = self.snapshots[model_id]
            if newest.created_s < before_s:
                del self.older[model_id]
                for one in self.requests.values():
                    if one.model_id == model_id and one.seq_id <= newest.seq_id:
                        one.payload = None

    def fall_back(self, model_id: str) -> bool:
        """The newest is damaged: whether there is a fallback."""
        if model_id not in self.older:
            return False
        before = self.older.pop(model_id)
        del self.snapshots[model_id]
        if before is not None:
            self.snapshots[model_id] = before
        return True

    def drop_snapshots(self, abandoned_before_s: float) -> None:
        for model_id in list(self.snapshots):
            session_id = self.models[model_id].session_id
            if self.ended(session_id, abandoned_before_s) and not self.waiting(model_id):
                del self.snapshots[model_id]
                self.older.pop(model_id, None)

    def drop_names(self, gone: list[Named], at_s: float) -> None:
        for name in gone:
            del self.names[name.model_id, name.kind, name.name]
            self.audit.append((at_s, "checkpoint.deleted"))
