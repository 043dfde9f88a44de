"""Rows that never change, or whose change is announced, kept for the next request."""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import Signer, owner_of, reader_owners
from tinkex.server.api.bodies import (
    RETRY_AFTER_S,
    SMALL_BYTES,
    TAKEN,
    Intake,
    NoRoom,
    Place,
    Reports,
    Room,
)
from tinkex.server.api.errors import Refusal, missing
from tinkex.server.executor import Executor, ServedModel
from tinkex.server.scheduler.checkpoints import no_checkpoint
from tinkex.server.scheduler.results import Futures
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.scheduler.session_status import SessionTimeouts
from tinkex.server.settings import Settings, is_loopback
from tinkex.server.store import Model, Sampler, Session, Store, Version
from tinkex.wire.codec import JSON_TYPE, decode_json, decompress, encode_json
from tinkex.wire.errors import TooLarge
from tinkex.wire.sdk_versions import Dialect

T = TypeVar("T")

# What nobody asked for in so long is forgotten; sooner when there is too much of it.
KEPT_S = 120.0
MOST_NEW = 5_000


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
        if now_s - self._turned_s > KEPT_S or len(self._new) >= MOST_NEW:
            self._old, self._new, self._turned_s = self._new, {}, now_s
        self._new[key] = row


# MERGED: What every route needs: the parts of the server, and look-ups that know the owner.


# A client that has begun to send would read a refusal as a broken connection and try again for
# minutes; so a body that is too large is swallowed first, up to so many times the limit.
SWALLOWED = 8
# Smaller bodies are unpacked and decoded where they arrive: moving to a thread would cost more.
INLINE_BYTES = 128 * 1024
# Of a body that is too large, its two ends are kept, to see whose step it was.
KEPT_END_BYTES = 4096
#: Where in the scope of a request its body is, for who must say whose step was refused.
SENT = "tinkex.sent"

_SDK_AGENT = re.compile(r"AsyncTinker/Python (\S+)")


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of one server."""

    settings: Settings
    store: Store
    executor: Executor
    futures: Futures
    scheduler: Scheduler
    session_timeouts: SessionTimeouts
    #: Signs links to files.
    signer: Signer
    #: Bodies that are arriving.
    intake: Intake = field(init=False)
    room: Room = field(init=False)
    #: Lists and reports that are made.
    reports: Reports = field(init=False, default_factory=Reports)
    _sessions: Cache[Session] = field(init=False)
    _models: Cache[Model] = field(init=False)
    _samplers: Cache[Sampler] = field(init=False)

    def __post_init__(self) -> None:
        runs = self.store.runs
        intake = Intake(max_body_bytes=self.settings.max_body_bytes)
        object.__setattr__(self, "intake", intake)
        room = Room(self.settings.max_arriving_bytes, wait_s=self.settings.arriving_wait_s)
        object.__setattr__(self, "room", room)
        object.__setattr__(self, "_sessions", Cache(runs.session))
        object.__setattr__(self, "_models", Cache(runs.model))
        object.__setattr__(self, "_samplers", Cache(runs.sampler))

    async def session(self, request: Request, session_id: str) -> Session:
        session = await self._sessions.get(session_id)
        if session is None or session.owner != owner_of(request):
            raise missing("session", session_id, "Create one with create_session.")
        return session

    async def open_session(self, request: Request, session_id: str) -> Session:
        """The session, for something new in it."""
        session = await self.session(request, session_id)
        if session.finished_s is not None:
            raise Refusal(
                410, f"session {session_id} was finished by its client. Create a new session."
            )
        self.session_timeouts.touch(session_id)
        return session

    def forget_session(self, session_id: str) -> None:
        """Its row has changed."""
        self._sessions.forget(session_id)

    async def model(self, request: Request, model_id: str) -> Model:
        model = await self._models.get(model_id)
        if model is None or model.owner != owner_of(request):
            raise missing("model", model_id, "Create one with create_model.")
        return model

    async def sampler(self, request: Request, sampling_session_id: str) -> Sampler:
        sampler = await self._samplers.get(sampling_session_id)
        if sampler is None or sampler.owner != owner_of(request):
            raise missing(
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


async def read_body(request: Request) -> bytes:
    """The body of a message without data, unpacked, within the limits."""
    context = context_of(request)
    settings = context.settings
    with context.intake.holding(owner_of(request)) as more:
        limit = min(settings.max_body_bytes, settings.max_message_bytes)
        packed = await _received(
            request, limit, more, "The server's setting is TINKEX_MAX_MESSAGE_BYTES."
        )
        limit = min(settings.max_decoded_bytes, settings.max_message_bytes)
        unpacked = decompress(packed, request.headers.get("content-encoding"), max_bytes=limit)
    request.scope[SENT] = unpacked
    return unpacked


async def read_data(request: Request, decode: Callable[[bytes], T]) -> T:
    """A pass or a sample, which may be large: its body, unpacked, within the limits, and decoded."""
    context = context_of(request)
    settings = context.settings
    owner = owner_of(request)
    with context.intake.holding(owner) as more:
        packed = await _received(
            request,
            settings.max_body_bytes,
            more,
            "Send fewer or shorter "
            "examples in one request, or start the server with a larger TINKEX_MAX_BODY_BYTES.",
        )
        encoding = request.headers.get("content-encoding")

        def unpack(most: int = settings.max_decoded_bytes) -> bytes:
            unpacked = decompress(packed, encoding, max_bytes=most)
            request.scope[SENT] = unpacked
            return unpacked

        if len(packed) <= INLINE_BYTES:
            # More may come out of it than went in.
            with contextlib.suppress(TooLarge):
                return decode(unpack(min(INLINE_BYTES, settings.max_decoded_bytes)))
        async with context.intake.turn(owner), context.room.work:
            return await asyncio.to_thread(lambda: decode(unpack()))


async def _received(
    request: Request, limit: int, more: Callable[[int], None], advice: str
) -> bytes:
    body = bytearray()
    total = 0
    tail = b""
    full: Refusal | None = None
    # Before anything is read; what does not say how much it is, is large once more than a little came.
    declared = request.headers.get("content-length", "")
    place = await _room(request, min(int(declared), limit)) if declared.isdecimal() else None
    async for part in request.stream():
        total += len(part)
        if total <= limit and full is None:
            try:
                if place is None and not declared and total > SMALL_BYTES:
                    place = await _room(request, limit)
                if place is not None:
                    _arrived(request, place, len(part))
                more(len(part))
                body += part
            except Refusal as refusal:
                full = refusal
                body.clear()
            continue
        # The first part that is read may be over the limit by itself.
        body += part[: max(0, KEPT_END_BYTES - len(body))]
        tail = (tail + part)[-KEPT_END_BYTES:]
        if total > limit * SWALLOWED:
            break
    if total > limit:
        request.scope[SENT] = bytes(body[:KEPT_END_BYTES]) + b" " + tail
        raise TooLarge(f"the body has {total} bytes or more, and {limit} are allowed. {advice}")
    if full is not None:
        raise full
    return bytes(body)


async def _room(request: Request, size: int) -> Place | None:
    """Room for a body, kept until its request is answered."""
    room = context_of(request).room
    try:
        place = await room.take(size)
    except NoRoom as full:
        raise _no_room(full) from None
    if place is not None:
        request.scope[TAKEN] = (room, place)
    return place


def _arrived(request: Request, place: Place, size: int) -> None:
    try:
        context_of(request).room.arrived(place, size)
    except NoRoom as slow:
        raise _no_room(slow) from None


def _no_room(why: NoRoom) -> Refusal:
    return Refusal(429, str(why), headers={"Retry-After": str(RETRY_AFTER_S)})


async def read_json(request: Request, message: type[T]) -> T:
    """The body as a wire type."""
    return decode_json(message, await read_body(request))


def answer(message: Any, status: int = 200) -> Response:
    return Response(encode_json(message), status, media_type=JSON_TYPE)


def dialect_of(request: Request, session: Session | None) -> Dialect:
    """What the client understands: by what its session said, else by its User-Agent."""
    if session is not None and session.sdk_version is not None:
        return Dialect.of(session.sdk_version)
    agent = _SDK_AGENT.match(request.headers.get("user-agent", ""))
    return Dialect.of(agent[1] if agent else None)


def describe(message: type[Any]) -> Mapping[str, Any]:
    """OpenAPI for a route that reads its body itself; the schema is added with the others."""
    schema = {"$ref": f"#/components/schemas/{message.__name__}"}
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": schema}}}}


# MERGED: Who may read a checkpoint: its owner, everybody once it is published, a holder of its owner's key.


async def readable(
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
