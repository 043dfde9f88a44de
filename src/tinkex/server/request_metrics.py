"""
What the server counts about requests while they run; `api/metrics.py` shows it as a page.

- `HttpCounts`: every HTTP request, by method, route template and status.
- `Timings`: accepted work, such as steps and samples, by kind: how long it waited and ran.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkex.server.queued_request import Outcome

#: Requests that reach no route share this label: unknown paths, and refused keys.
NO_ROUTE = "other"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})

#: Routes that hold a request on purpose, or send for as long as the client reads. They have a
#: histogram of their own; in the other one they would hide slow requests.
LONG_ROUTES = frozenset(
    {
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/stream_sample",
        "/api/v1/console/live",
        *("/v1/chat/completions", "/v1/completions"),
        *("/oai/api/v1/chat/completions", "/oai/api/v1/completions"),
        "/api/v1/downloads/{version_id}/{file}",
    }
)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_SECONDS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 300.0)
#: Of accepted work.
TIMING_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts values up to each bound. Not thread-safe: use it on one event loop."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        #: One for each bound, and one for larger values.
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each bound as text, and how many values were at most that large."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else f"{bound:g}"), total


class _Route:
    """What happened to the requests of one method and route template."""

    __slots__ = ("seconds", "statuses")

    def __init__(self, template: str) -> None:
        self.seconds = Histogram(LONG_SECONDS if template in LONG_ROUTES else SECONDS)
        self.statuses: defaultdict[int, int] = defaultdict(int)


class HttpCounts:
    """The HTTP requests of this process, by method and route template."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], _Route] = {}

    def add(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request; status 0 if there was no answer."""
        # The router has put it here; but not that of a page, whose path is fixed.
        fixed = "endpoint" in scope and not scope.get("path_params")
        default: str = scope["path"] if fixed else NO_ROUTE
        template: str = getattr(scope.get("route"), "path", default)
        method = scope["method"]
        key = (method if method in METHODS else NO_ROUTE, template)
        route = self.routes.get(key)
        if route is None:
            route = self.routes[key] = _Route(template)
        route.statuses[status] += 1
        route.seconds.observe(seconds)


class CountRequests:
    """Middleware around all others: counts each request when it has ended."""

    def __init__(self, app: ASGIApp, *, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        began_s = time.perf_counter()

        # Not a coroutine of its own: each would take a microsecond for each message.
        def send_and_note(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            # Starlette answers it with a 500 outside of this middleware.
            status = status or 500
            raise
        finally:
            self._counts.add(scope, status, time.perf_counter() - began_s)


class Timings:
    """How long requests waited and ran, and how they ended, by kind."""

    def __init__(self) -> None:
        #: From acceptance to the first time that an engine got the request.
        self.queue_s: defaultdict[str, Histogram] = defaultdict(_seconds)
        #: From acceptance until the outcome was stored.
        self.total_s: defaultdict[str, Histogram] = defaultdict(_seconds)
        self.finished: defaultdict[tuple[str, str], int] = defaultdict(int)

    def finish(self, kind: str, outcome: Outcome | None, seconds: float) -> None:
        ended = "done"
        if outcome is not None and outcome.error is not None:
            ended = "user_error" if outcome.category == "user" else "server_error"
        self.finished[kind, ended] += 1
        self.total_s[kind].observe(seconds)


def _seconds() -> Histogram:
    return Histogram(TIMING_SECONDS)
