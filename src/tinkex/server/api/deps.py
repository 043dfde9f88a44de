"""Rows that never change, or whose change is announced, kept for the next request."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import Signer, owner_of, reader_owners
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.executor import Executor, ServedModel
from tinkex.server.scheduler.checkpoints import no_checkpoint
from tinkex.server.scheduler.results import Futures
from tinkex.server.scheduler.scheduler import Dispatcher
from tinkex.server.scheduler.session_timeout import Presence
from tinkex.server.settings import Settings, is_loopback
from tinkex.server.store import Model, Sampler, Session, Store, Version
from tinkex.wire.codec import JSON_TYPE, encode_json
from tinkex.wire.sdk_versions import Dialect

T = TypeVar("T")

# What nobody asked for in so long is forgotten; sooner when there is too much of it.
CACHE_TTL_S = 120.0
MAX_CACHED_ROWS = 5_000


class Cache(Generic[T]):
    """Rows by their id; those that do not exist are looked for again."""

    def __init__(
        self,
        read: Callable[[str], Awaitable[T | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        # Two generations: a row that is used moves to the new one, the old one goes as a whole.
        self._new: dict[str, T] = {}
        self._old: dict[str, T] = {}
        self._turned_s = clock()
        self._changes = 0

    async def get(self, key: str) -> T | None:
        if (found := self._new.get(key)) is not None:
            return found
        if (found := self._old.get(key)) is not None:
            self._keep(key, found)
            return found
        changes = self._changes
        row = await self._read(key)
        # What was read while something changed may be as it was before: not to be kept.
        if row is not None and changes == self._changes:
            self._keep(key, row)
        return row

    def forget(self, key: str) -> None:
        """Its row has changed."""
        self._changes += 1
        self._new.pop(key, None)
        self._old.pop(key, None)

    def _keep(self, key: str, row: T) -> None:
        now_s = self._clock()
        if now_s - self._turned_s > CACHE_TTL_S or len(self._new) >= MAX_CACHED_ROWS:
            self._old, self._new, self._turned_s = self._new, {}, now_s
        self._new[key] = row


@dataclass(slots=True)
class _OwnerSlot:
    places: asyncio.Semaphore
    #: Those who have a place, and those who wait for one.
    users: int = 0


class OwnerSlots:
    """Belongs to one event loop."""

    def __init__(self, max_concurrent: int) -> None:
        self._at_once = max_concurrent
        self._held: dict[str, _OwnerSlot] = {}

    def __len__(self) -> int:
        """Owners who have or want a place."""
        return len(self._held)

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        held = self._held.setdefault(owner, _OwnerSlot(asyncio.Semaphore(self._at_once)))
        held.users += 1
        try:
            async with held.semaphore:
                yield
        finally:
            held.users -= 1
            if not held.users:
                del self._held[owner]


# MERGED: What every route needs: the parts of the server, and look-ups that know the owner.


_SDK_AGENT = re.compile(r"AsyncTinker/Python (\S+)")


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of one server."""

    settings: Settings
    store: Store
    executor: Executor
    futures: Futures
    dispatcher: Dispatcher
    presence: Presence
    #: Signs links to files.
    signer: Signer
    _sessions: Cache[Session] = field(init=False)
    _models: Cache[Model] = field(init=False)
    _samplers: Cache[Sampler] = field(init=False)

    def __post_init__(self) -> None:
        runs = self.store.runs
        object.__setattr__(self, "_sessions", Cache(runs.session))
        object.__setattr__(self, "_models", Cache(runs.model))
        object.__setattr__(self, "_samplers", Cache(runs.sampler))

    async def session(self, request: Request, session_id: str) -> Session:
        session = await self._sessions.get(session_id)
        if session is None or session.owner != owner_of(request):
            raise not_found("session", session_id, "Create one with create_session.")
        return session

    async def open_session(self, request: Request, session_id: str) -> Session:
        """The session, for something new in it."""
        session = await self.session(request, session_id)
        if session.finished_s is not None:
            raise Refusal(
                410, f"session {session_id} was finished by its client. Create a new session."
            )
        self.presence.heard(session_id)
        return session

    def forget_session(self, session_id: str) -> None:
        """Its row has changed."""
        self._sessions.forget(session_id)

    async def model(self, request: Request, model_id: str) -> Model:
        model = await self._models.get(model_id)
        if model is None or model.owner != owner_of(request):
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
        """The served model of this name; a `:suffix` is cut off unless it is served itself."""
        served = {model.name: model for model in self.executor.served}
        found = served.get(name) or served.get(name.partition(":")[0])
        if found is None:
            names = ", ".join(sorted(served))
            raise Refusal(
                400,
                f"base model {name[:200]!r} is not served here. Served: {names}. To add it, "
                "start the server with `tinkex serve NAME=FOLDER`.",
            )
        return found

    def tokenizer_id(self, base_model: str) -> str:
        """
        What leads a client to the tokenizer of a base model.

        On one machine the folder itself works offline; elsewhere only the name means something.
        """
        if is_loopback(self.settings.host):
            for model in self.executor.served:
                if model.name == base_model:
                    return str(model.folder)
        return base_model


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def json_response(message: Any, status: int = 200) -> Response:
    return Response(encode_json(message), status, media_type=JSON_TYPE)


def dialect_of(request: Request, session: Session | None) -> Dialect:
    """What the client understands: by what its session said, else by its User-Agent."""
    if session is not None and session.sdk_version is not None:
        return Dialect.of(session.sdk_version)
    agent = _SDK_AGENT.match(request.headers.get("user-agent", ""))
    return Dialect.of(agent[1] if agent else None)


def openapi_body(message: type[Any]) -> Mapping[str, Any]:
    """OpenAPI for a route that reads its body itself; the schema is added with the others."""
    schema = {"$ref": f"#/components/schemas/{message.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": schema}}}}


# MERGED: Who may read a checkpoint: its owner, everybody once it is published, a holder of its owner's key.


async def readable_checkpoint(
    request: Request, context: Context, path: str, *, token: str | None = None
) -> tuple[Version, Model]:
    """A checkpoint and the run it was saved from; a 404 if there is none to read."""
    version = await context.store.checkpoints.find(
        path, readers=await reader_owners(request, token)
    )
    source = None if version is None else await context.store.runs.model(version.model_id)
    if version is None or source is None:
        raise Refusal(404, no_checkpoint(path))
    return version, source
