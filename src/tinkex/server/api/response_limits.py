"""
Limits for lists, searches, traces and reports: responses that grow with the data of an owner.

Each such route is `bounded`: its response has a maximum number of entries and bytes and is built in
a thread, and an owner builds one at a time, so that owners do not wait for each other. A test walks
the route table and fails for a list without a bound.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import OwnerSlots, context_of
from tinkex.server.store.database import REPORTERS
from tinkex.wire.base import LenientModel
from tinkex.wire.codec import JSON_TYPE, encode_json
from tinkex.wire.errors import UserFailure

#: Bytes of one response. Several copies of it are in memory before it is sent.
MAX_REPORT_BYTES = 32 * 2**20
#: Lists, searches and reports of one owner that are built at the same time.
MAX_REPORTS_PER_OWNER = 1
#: Entries of one response of a route without pages.
MAX_REPORT_ENTRIES = 20_000

# Query parameters of lists.
MAX_PAGE_SIZE = 10_000
PageSize = Annotated[int, Query(ge=0, le=MAX_PAGE_SIZE)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
#: `accessible`: also what other owners have published, and only that.
Access = Annotated[Literal["owned", "accessible"], Query()]

Params = ParamSpec("Params")
Route = Callable[Params, Awaitable[Response]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The maximum size of a route's response."""

    entries: int
    bytes: int = MAX_REPORT_BYTES


class ReportSlots:
    """Limits concurrent reports: per owner, and over all owners to the number of report threads."""

    def __init__(self) -> None:
        self._owners = OwnerSlots(MAX_REPORTS_PER_OWNER)
        self._all = asyncio.Semaphore(REPORTERS)

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncIterator[None]:
        async with self._owners.slot(owner), self._all:
            yield


def report_slots_of(request: Request) -> ReportSlots:
    slots: ReportSlots = request.app.state.report_slots
    return slots


async def _caller_owner(request: Request) -> str:
    return owner_of(request)


def bounded(
    *, entries: int, owner: Callable[[Request], Awaitable[str]] = _caller_owner
) -> Callable[[Route[Params]], Route[Params]]:
    """
    Declare the maximum of entries of a route, and run it one at a time per owner.

    `owner` finds the owner for routes whose requests carry no key.
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
    """The declared bound of a route."""
    bound: Bound | None = getattr(route, "bound", None)
    return bound


async def report(
    request: Request,
    build: Callable[[], LenientModel | Mapping[str, Any]],
    *,
    advice: str,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Build the response of a bounded route in a thread. `advice` says how to request less."""
    body = await context_of(request).store.build_report(lambda: encoded(build(), advice))
    return Response(body, media_type=JSON_TYPE, headers=dict(headers or {}))


def encoded(message: LenientModel | Mapping[str, Any], advice: str) -> bytes:
    """
    The same as `encode_json`, but entry by entry; raises UserFailure when it is too long.

    A single call for all entries would hold the interpreter lock and block the event loop, although
    this runs in another thread.
    """
    parts: list[bytes] = []
    size = 0
    for part in _parts(message):
        parts.append(part)
        size += len(part)
        if size > MAX_REPORT_BYTES:
            raise UserFailure(
                f"the response has more than the allowed {MAX_REPORT_BYTES} bytes. {advice}"
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
            for index, entry in enumerate(value):
                yield (b"," if index else b"") + encode_json(entry)
            yield b"]"
        elif isinstance(value, Mapping):
            yield b"{"
            for index, (key, entry) in enumerate(value.items()):
                yield (b"," if index else b"") + encode_json(key) + b":" + encode_json(entry)
            yield b"}"
        else:
            yield encode_json(value)
    yield b"}"
