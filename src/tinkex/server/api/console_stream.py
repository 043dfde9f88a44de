"""
What changes while a page of the console is open, as server-sent events.

    server   the state of the server (`console_data.server_state`), every two seconds if asked for
    runs     {"total"}: the number of the owner's runs, when it changes
    run      {"training_run_id", "status", "steps", "last_loss", ..., "points"}: a watched run changed;
             its points are the steps since the last event

The page names the runs it shows, and the last step that it has of each. Nothing is lost while it is
disconnected: it connects again with the steps that it has by then. A stream ends within three seconds
of the key of its browser.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.api.auth import Caller, caller_of, find_caller
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.console_data import server_state
from tinkex.server.api.deps import context_of
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.api.runs_and_checkpoints import step_metrics, time_of
from tinkex.server.api.sample_stream import (
    EVENT_STREAM,
    KEEP_ALIVE,
    KEEP_ALIVE_S,
    EventStream,
    event,
)
from tinkex.server.store import StorageError
from tinkex.server.store.checkpoint_catalog import RunSummary
from tinkex.server.store.step_history import NewestStep, StepPoint

router = APIRouter(prefix="/api/v1/console", tags=["console"], route_class=MessageRoute)

TICK_S = 1.0
#: How often, in ticks, the state of the server is sent, and runs without new steps are read.
SERVER_TICKS = 2
SUMMARY_TICKS = 4
#: Runs that one page watches.
MAX_WATCHED = 60
#: Steps of all watched runs in one tick; the rest follows a tick later.
MAX_POINTS = 500
#: Open streams: one for each page in a browser.
MAX_STREAMS_PER_OWNER = 32
MAX_STREAMS = 512
#: Tells browsers to connect again after this many milliseconds.
RECONNECT = b"retry: 1000\n\n"
EVENTS = {
    EVENT_STREAM: {
        "schema": {"type": "string", "description": "Events `server`, `runs` and `run`, as JSON."}
    }
}


@dataclass(slots=True)
class OpenStreams:
    """The number of open streams, by owner."""

    owners: dict[str, int] = field(default_factory=dict)

    def begin(self, owner: str) -> None:
        if self.owners.get(owner, 0) >= MAX_STREAMS_PER_OWNER:
            limit, whose = MAX_STREAMS_PER_OWNER, "one owner"
        elif sum(self.owners.values()) >= MAX_STREAMS:
            limit, whose = MAX_STREAMS, "all owners together"
        else:
            self.owners[owner] = self.owners.get(owner, 0) + 1
            return
        raise Refusal(
            429,
            f"{limit} pages of the console are open, the most of {whose}. Close some.",
            headers={"Retry-After": "10"},
        )

    def end(self, owner: str) -> None:
        self.owners[owner] -= 1
        if not self.owners[owner]:
            del self.owners[owner]


@router.get("/live", response_class=StreamingResponse, responses={200: {"content": EVENTS}})
async def live(
    request: Request,
    run: Annotated[list[str] | None, Query(max_length=MAX_WATCHED)] = None,
    after: Annotated[list[int] | None, Query(max_length=MAX_WATCHED)] = None,
    server: bool = False,
    runs: bool = False,
) -> Response:
    """
    Events of the runs and of the server.

    `after` has the last step that the page knows of each `run`; without it, events have no points.
    """
    ids = run or []
    if after is not None and len(after) != len(ids):
        raise Refusal(
            400, f"there are {len(ids)} `run` and {len(after)} `after`; give one for each."
        )
    caller = caller_of(request)
    catalog = context_of(request).store.checkpoint_catalog
    own = {one.model.model_id for one in await catalog.own_runs(ids, owner=caller.owner)}
    for one in ids:
        if one not in own:
            raise not_found("training run", one, "The page of runs lists yours.")
    numbers: list[int | None] = [None] * len(ids) if after is None else [*after]
    watch = _Watch(
        request=request,
        caller=caller,
        after=dict(zip(ids, numbers, strict=True)),
        sends_server=server,
        sends_runs=runs,
    )
    streams: OpenStreams = request.app.state.console_streams
    streams.begin(caller.owner)
    return _LiveStream(watch.events(), lambda: streams.end(caller.owner))


class _LiveStream(EventStream):
    """Calls `on_end` when it is over, also if the client left before the first event."""

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


@dataclass(kw_only=True)
class _Watch:
    """One open page."""

    request: Request
    caller: Caller
    #: The last step that the page has of each run; None if it wants no steps.
    after: dict[str, int | None]
    sends_server: bool
    sends_runs: bool
    _newest: dict[str, NewestStep] = field(default_factory=dict)
    _sent: dict[str, dict[str, Any]] = field(default_factory=dict)
    _total: int | None = None

    async def events(self) -> AsyncGenerator[bytes]:
        futures = context_of(self.request).futures
        tick, sent_s = 0, time.monotonic()
        yield RECONNECT
        while not futures.closing and await self._is_signed_in():
            for news in await self._news(tick):
                sent_s = time.monotonic()
                yield news
            if time.monotonic() - sent_s > KEEP_ALIVE_S:
                sent_s = time.monotonic()
                yield KEEP_ALIVE
            tick += 1
            await asyncio.sleep(TICK_S)

    async def _is_signed_in(self) -> bool:
        """Whether the key is still valid, and still the same owner's."""
        try:
            return (await find_caller(self.request)).owner == self.caller.owner
        except Refusal:
            return False
        except StorageError:
            return True

    async def _news(self, tick: int) -> list[bytes]:
        news: list[bytes] = []
        if self.sends_server and tick % SERVER_TICKS == 0:
            news.append(event("server", server_state(self.request, self.caller)))
        try:
            if self.sends_runs and tick % SUMMARY_TICKS == 0:
                news += await self._new_total()
            if self.after:
                news += await self._new_steps(reads_all=tick % SUMMARY_TICKS == 0)
        except StorageError:
            pass  # the page keeps what it has until the database answers again
        return news

    async def _new_total(self) -> list[bytes]:
        catalog = context_of(self.request).store.checkpoint_catalog
        _, total = await catalog.runs(owner=self.caller.owner, project_id=None, limit=0, offset=0)
        if total == self._total:
            return []
        self._total = total
        return [event("runs", {"total": total})]

    async def _new_steps(self, *, reads_all: bool) -> list[bytes]:
        """Events of the runs that have new steps, and of all that changed otherwise."""
        store = context_of(self.request).store
        found = await store.step_history.news(self.after, limit=MAX_POINTS)
        moved = [one for one, (newest, _) in found.items() if self._newest.get(one) != newest]
        moved += [one for one, (_, points) in found.items() if points and one not in moved]
        ids = list(self.after) if reads_all else moved
        if not ids:
            return []
        changed = []
        for run in await store.checkpoint_catalog.own_runs(ids, owner=self.caller.owner):
            run_id = run.model.model_id
            newest, points = found.get(run_id, (None, []))
            if newest is not None:
                self._newest[run_id] = newest
            summary = _summary(run)
            if not points and self._sent.get(run_id) == summary:
                continue
            self._sent[run_id] = summary
            if points:
                self.after[run_id] = points[-1].step
            changed.append((summary, points))
        # Steps may have many metrics of their own, so this is not done on the event loop.
        return await store.build_report(lambda: [_run_event(*one) for one in changed])


def _run_event(summary: Mapping[str, Any], points: Sequence[StepPoint]) -> bytes:
    return event("run", {**summary, "points": [step_metrics(point) for point in points]})


def _summary(run: RunSummary) -> dict[str, Any]:
    """What changes in a run. Metadata does not, and may be long."""
    return {
        "training_run_id": run.model.model_id,
        "status": run.status,
        "steps": run.steps,
        "last_loss": run.last_loss,
        "last_request_time": time_of(run.last_request_s),
    }
