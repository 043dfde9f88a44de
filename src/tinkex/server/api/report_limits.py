"""
Lists, searches, traces and reports: answers that grow with what an owner has.

Each route that makes one is `bounded`. It has an end in entries and in bytes, its answer is read
and built off the event loop, and an owner gets one at a time, so that nobody waits for another
owner's lists. A test walks the routes and fails for a list without a bound.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import OwnerSlots, context_of
from tinkex.server.store.database import REPORTERS
from tinkex.wire.base import LenientModel
from tinkex.wire.codec import JSON_TYPE, encode_json
from tinkex.wire.errors import UserFailure

#: Bytes of one answer. It is in memory several times before it is sent.
MAX_REPORT_BYTES = 32 * 2**20
#: Lists, searches and reports of one owner.
MAX_REPORTS_PER_OWNER = 1
#: Entries of one answer, where a route has no pages.
MAX_REPORT_ENTRIES = 20_000

Params = ParamSpec("Params")
Route = Callable[Params, Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    entries: int
    bytes: int = MAX_REPORT_BYTES


class ReportSlots:
    """OwnerSlots for lists and reports; over all owners, as many at once as there are threads for them."""

    def __init__(self) -> None:
        self._of_owner = OwnerSlots(MAX_REPORTS_PER_OWNER)
        self._all = asyncio.Semaphore(REPORTERS)

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        async with self._of_owner.slot(owner), self._all:
            yield


def report_slots_of(request: Request) -> ReportSlots:
    reports: ReportSlots = request.app.state.report_slots
    return reports


async def _caller_owner(request: Request) -> str:
    return owner_of(request)


def bounded(
    *, entries: int, owner: Callable[[Request], Awaitable[str]] = _caller_owner
) -> Callable[[Route[Params]], Route[Params]]:
    """
    Declare that a route lists at most so many entries, and let an owner have one at a time.

    `owner` finds whose turn it takes, where the request does not say who asks.
    """

    def decorate(route: Route[Params]) -> Route[Params]:
        @functools.wraps(route)
        async def with_slot(*args: Params.args, **kwargs: Params.kwargs) -> Response:
            request = kwargs["request"]
            assert isinstance(request, Request)
            async with report_slots_of(request).slot(await owner(request)):
                return await route(*args, **kwargs)

        with_slot.__dict__["bound"] = Bound(entries=entries)
        return with_slot

    return decorate


def bound_of(route: Callable[..., Any]) -> Bound | None:
    """What a route was declared with."""
    bound: Bound | None = getattr(route, "bound", None)
    return bound


async def report(
    request: Request,
    build: Callable[[], LenientModel | Mapping[str, Any]],
    *,
    advice: str,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The answer of a bounded route: built off the event loop. `advice` says how to ask for less."""
    body = await context_of(request).store.build_report(lambda: encoded(build(), advice))
    return Response(body, media_type=JSON_TYPE, headers=dict(headers or {}))


def encoded(message: LenientModel | Mapping[str, Any], advice: str) -> bytes:
    """
    The same as `encode_json`, entry by entry; raises when it is too long.

    One call for all entries would not let go of the interpreter, and the event loop would stand
    still although this is another thread.
    """
    parts: list[bytes] = []
    size = 0
    for part in _parts(message):
        parts.append(part)
        size += len(part)
        if size > MAX_REPORT_BYTES:
            raise UserFailure(
                f"the answer has more than {MAX_REPORT_BYTES} bytes, which is the most. {advice}"
            )
    return b"".join(parts)


def _parts(message: LenientModel | Mapping[str, Any]) -> Iterator[bytes]:
    if isinstance(message, LenientModel):
        named = [(name, getattr(message, name)) for name in type(message).model_fields]
        fields = {name: value for name, value in named if value is not None}
    else:
        fields = dict(message)
    yield b"{"
    for number, (name, value) in enumerate(fields.items()):
        yield (b"," if number else b"") + encode_json(name) + b":"
        if isinstance(value, list):
            yield b"["
            for place, entry in enumerate(value):
                yield (b"," if place else b"") + encode_json(entry)
            yield b"]"
        elif isinstance(value, Mapping):
            yield b"{"
            for place, (key, entry) in enumerate(value.items()):
                yield (b"," if place else b"") + encode_json(key) + b":" + encode_json(entry)
            yield b"}"
        else:
            yield encode_json(value)
    yield b"}"
