"""
What every route needs: the parts of the server, look-ups that check the owner, and JSON responses.

`Cache` and `OwnerSlots` are small helpers of this package.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Body, Depends
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import Signer, owner_of, reader_owners
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.api.openai_prompts import Tokenizers
from tinkex.server.executor import Executor, ServedModel
from tinkex.server.scheduler.checkpoints import no_checkpoint
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.scheduler.scheduler_port import SchedulerPort
from tinkex.server.scheduler.session_status import SessionTimeouts
from tinkex.server.settings import Settings, is_loopback
from tinkex.server.store import Model, Sampler, Session, Store, Version
from tinkex.server.store.server_secrets import LINKS
from tinkex.wire.codec import JSON_TYPE, encode_json
from tinkex.wire.sdk_versions import SdkVersion

T = TypeVar("T")

_SDK_AGENT = re.compile(r"AsyncTinker/Python (\S+)")

# Cached rows are evicted when they were not used for this long, or earlier when the cache is full.
CACHE_TTL_S = 120.0
# Sessions in a web process of a cluster: another process may finish them, and its notification may
# be lost.
SHARED_SESSION_TTL_S = 3.0
MAX_CACHED_ROWS = 5_000
# The first worker of a cluster loads its base model before it registers.
NO_MODEL_RETRY_S = 5


class Cache(Generic[T]):
    """
    Caches rows by id. A row must never change, or `forget` must be called after a change.

    Missing rows are not cached.
    """

    def __init__(
        self,
        read: Callable[[str], Awaitable[T | None]],
        clock: Callable[[], float] = time.monotonic,
        *,
        max_age_s: float | None = None,
    ) -> None:
        """With `max_age_s`, a row is read again when it is older than twice that."""
        self._read = read
        self._max_age_s = max_age_s
        self._clock = clock
        # Two dictionaries instead of a time for each row. A row that is used moves from the old one
        # to the new one; from time to time the old one is dropped, and the new one becomes the old
        # one.
        self._new: dict[str, T] = {}
        self._old: dict[str, T] = {}
        self._rotated_s = clock()
        self._changes = 0

    async def get(self, key: str) -> T | None:
        if self._max_age_s is not None and self._clock() - self._rotated_s > self._max_age_s:
            self._old, self._new, self._rotated_s = self._new, {}, self._clock()
        if (found := self._new.get(key)) is not None:
            return found
        if (found := self._old.get(key)) is not None:
            if self._max_age_s is None:
                self._store(key, found)
            return found
        changes = self._changes
        row = await self._read(key)
        # A row that was read during a change may be outdated, so it is not cached.
        if row is not None and changes == self._changes:
            self._store(key, row)
        return row

    def forget(self, key: str) -> None:
        """Evict a row that has changed."""
        self._changes += 1
        self._new.pop(key, None)
        self._old.pop(key, None)

    def _store(self, key: str, row: T) -> None:
        now_s = self._clock()
        if now_s - self._rotated_s > CACHE_TTL_S or len(self._new) >= MAX_CACHED_ROWS:
            self._old, self._new, self._rotated_s = self._new, {}, now_s
        self._new[key] = row


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of one server, and owner-checked look-ups."""

    settings: Settings
    store: Store
    executor: Executor
    futures: Futures
    scheduler: SchedulerPort
    session_timeouts: SessionTimeouts
    #: Whether other web processes change the same rows.
    shared: bool = False
    #: Of the served models, for OpenAI's routes.
    tokenizers: Tokenizers = field(init=False, default_factory=Tokenizers)
    #: Signs links to files and traces.
    signer: Signer = field(init=False)
    _sessions: Cache[Session] = field(init=False)
    _models: Cache[Model] = field(init=False)
    _samplers: Cache[Sampler] = field(init=False)

    def __post_init__(self) -> None:
        max_age_s = SHARED_SESSION_TTL_S if self.shared else None
        sessions = Cache(self.store.sessions.session, max_age_s=max_age_s)
        object.__setattr__(self, "signer", Signer(self.store.secrets[LINKS]))
        object.__setattr__(self, "_sessions", sessions)
        object.__setattr__(self, "_models", Cache(self.store.models.model))
        object.__setattr__(self, "_samplers", Cache(self.store.models.sampler))

    async def session(self, request: Request, session_id: str) -> Session:
        session = await self._sessions.get(session_id)
        if session is None or session.owner != owner_of(request):
            raise not_found("session", session_id, "Create one with create_session.")
        return session

    async def open_session(self, request: Request, session_id: str) -> Session:
        """The session, for adding something to it; a 410 if it is finished."""
        session = await self.session(request, session_id)
        if session.finished_s is not None:
            raise Refusal(
                410, f"session {session_id} was finished by its client. Create a new session."
            )
        timeouts = self.session_timeouts
        timeouts.last_request_s[session_id] = time.monotonic()
        if session_id in timeouts.timed_out:
            timeouts.revive(session_id)
        return session

    def forget_session(self, session_id: str) -> None:
        """Evict a session that has changed from the cache."""
        self._sessions.forget(session_id)

    async def find_model(self, request: Request, model_id: str) -> Model | None:
        """The model, if it is the caller's."""
        model = await self._models.get(model_id)
        return None if model is None or model.owner != owner_of(request) else model

    async def model(self, request: Request, model_id: str) -> Model:
        if (model := await self.find_model(request, model_id)) is None:
            raise not_found("model", model_id, "Create one with create_model.")
        return model

    async def sampler(self, request: Request, sampling_session_id: str) -> Sampler:
        sampler = await self._samplers.get(sampling_session_id)
        if sampler is None or sampler.owner != owner_of(request):
            raise not_found(
                "sampling session", sampling_session_id, "Create one with create_sampling_session."
            )
        return sampler

    def base_model(self, name: str) -> ServedModel:
        """The served model of this name; without its `:suffix` if the full name is not served."""
        served = {model.name: model for model in self.executor.served}
        found = served.get(name) or served.get(name.partition(":")[0])
        if found is None:
            names = ", ".join(sorted(served)) or "none"
            raise Refusal(
                400,
                f"base model {name[:200]!r} is not served here. Served: {names}. To add it, "
                f"start {self._server_of_models}.",
            )
        return found

    def any_base_model(self) -> str:
        """The name of a served model, for work that any engine can do."""
        if not self.executor.served:
            raise Refusal(
                503,
                f"no base model is served yet. Start {self._server_of_models}.",
                headers={"Retry-After": str(NO_MODEL_RETRY_S)},
            )
        return self.executor.served[0].name

    @property
    def _server_of_models(self) -> str:
        if self.shared:
            return "a worker of the same database with `tinkex worker NAME`"
        return "the server with `tinkex serve NAME=FOLDER`"

    def tokenizer_id(self, base_model: str) -> str:
        """
        What a client loads the tokenizer of a base model from.

        On the same machine that is the model folder, which works offline; elsewhere it is the name.
        """
        if is_loopback(self.settings.host):
            for model in self.executor.served:
                if model.name == base_model:
                    return str(model.folder)
        return base_model


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def readable_checkpoint(
    request: Request, context: Context, path: str, *, token: str | None = None
) -> tuple[Version, Model]:
    """A checkpoint and its training run; a 404 unless it is the caller's, published, or shared."""
    version = await context.store.checkpoints.find(
        path, readers=await reader_owners(request, token)
    )
    source = None if version is None else await context.store.models.model(version.model_id)
    if version is None or source is None:
        raise Refusal(404, no_checkpoint(path))
    return version, source


def json_response(message: Any, status: int = 200) -> Response:
    return Response(encode_json(message), status, media_type=JSON_TYPE)


def dialect_of(request: Request, session: Session | None) -> SdkVersion:
    """The dialect of the client: by the SDK version of its session, else by its User-Agent."""
    if session is not None and session.sdk_version is not None:
        return SdkVersion.of(session.sdk_version)
    agent = _SDK_AGENT.match(request.headers.get("user-agent", ""))
    return SdkVersion.of(agent[1] if agent else None)


def describe_body(message_type: type[Any]) -> Any:
    """The body in the description of a route that reads it itself. It is never called."""

    def described(message: Any) -> None: ...

    body = Body(title=message_type.__name__)
    described.__annotations__["message"] = Annotated[message_type, body]
    return Depends(described)


@dataclass(slots=True)
class _OwnerSlot:
    semaphore: asyncio.Semaphore
    #: Holders and waiters.
    users: int = 0


class OwnerSlots:
    """A semaphore per owner; owners without a holder take no memory. Belongs to one event loop."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._owners: dict[str, _OwnerSlot] = {}

    def __len__(self) -> int:
        """Owners with holders or waiters."""
        return len(self._owners)

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        slot = self._owners.setdefault(owner, _OwnerSlot(asyncio.Semaphore(self._max_concurrent)))
        slot.users += 1
        try:
            async with slot.semaphore:
                yield
        finally:
            slot.users -= 1
            if not slot.users:
                del self._owners[owner]
