"""The routes for operating a server: health, Prometheus metrics, and client telemetry."""

import json
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import Caller, owner_of
from tinkex.server.api.bodies import MessageRoute, read_body
from tinkex.server.api.deps import Context, context_of, describe_body, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.executor import Executor
from tinkex.server.store.storage_health import KINDS
from tinkex.wire.client_config import HealthResponse
from tinkex.wire.errors import WireError
from tinkex.wire.proto.frames_pb2 import Stats
from tinkex.wire.telemetry import TelemetrySendRequest

router = APIRouter(prefix="/api/v1", tags=["health"], route_class=MessageRoute)
telemetry_router = APIRouter(prefix="/api/v1", tags=["telemetry"], route_class=MessageRoute)

# Larger telemetry batches are dropped.
MAX_TELEMETRY_BYTES = 1024 * 1024


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """A 503 with advice while nothing new can be stored; reads still work then."""
    problem = context_of(request).store.health.problem
    if problem is not None:
        detail = f"{problem.text} {problem.advice}"
        return json_response({"status": "degraded", "trouble": problem.kind, "detail": detail}, 503)
    return json_response(HealthResponse(status="ok"))


@telemetry_router.post("/telemetry", dependencies=[describe_body(TelemetrySendRequest)])
async def telemetry(request: Request) -> Response:
    """Always accepted: after any other answer, clients retry every second, forever."""
    try:
        body = await read_body(request)
    except (Refusal, WireError):
        body = b""
    if context_of(request).settings.telemetry_kept_s > 0 and len(body) <= MAX_TELEMETRY_BYTES:
        _store_telemetry(request, body)
    return json_response({"status": "accepted"})


def _store_telemetry(request: Request, body: bytes) -> None:
    try:
        batch: Any = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(batch, dict) or not isinstance(events := batch.get("events"), list):
        return
    about = f"{batch.get('sdk_version')} {batch.get('platform')}"
    context_of(request).store.telemetry.record(
        events,
        owner=owner_of(request),
        session_id=str(batch.get("session_id")),
        about=about,
    )


async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    # With a key, the metrics of its owner only. Without a key, which is possible on loopback only,
    # the metrics of all owners.
    caller: Caller | None = getattr(request.state, "caller", None)
    owner = None if caller is None else caller.owner
    registry.register(_ServerMetrics(request.app.state.context, owner))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _ServerMetrics(Collector):
    """Reads counters of the server's parts on each scrape."""

    def __init__(self, context: Context, owner: str | None) -> None:
        self._context = context
        self._owner = owner

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "tinkex_requests_open", "Requests accepted and not finished", len(self._context.futures)
        )
        yield CounterMetricFamily(
            "tinkex_store_commits", "Transactions committed", self._context.store.commits
        )
        problem = self._context.store.health.problem
        troubles = GaugeMetricFamily(
            "tinkex_storage_trouble", "1 while nothing new can be stored", labels=["kind"]
        )
        for kind in KINDS:
            troubles.add_metric([kind], int(problem is not None and problem.kind == kind))
        yield troubles
        seconds = CounterMetricFamily(
            "tinkex_engine_compute_seconds", "Seconds engines computed", labels=["task"]
        )
        operations = CounterMetricFamily(
            "tinkex_engine_operations", "Operations engines finished", labels=["task"]
        )
        for task, (count, total_s) in self._context.scheduler.usage.by_task.items():
            # The field of a pass cannot be named `pass` in Python.
            name = "pass" if task == "run_pass" else task
            seconds.add_metric([name], total_s)
            operations.add_metric([name], count)
        yield seconds
        yield operations
        yield from self._owner_metrics()
        yield from _engine_metrics(self._context.executor)

    def _owner_metrics(self) -> Iterable[Metric]:
        """Open requests and compute time per owner."""
        used = CounterMetricFamily(
            "tinkex_owner_compute_seconds",
            "Seconds engines computed for an owner",
            labels=["owner"],
        )
        waiting = GaugeMetricFamily(
            "tinkex_owner_requests_open", "Requests of an owner that wait or run", labels=["owner"]
        )
        for owner, seconds in self._context.scheduler.usage.by_owner.items():
            if self._owner in (None, owner):
                used.add_metric([owner], seconds)
        for owner, load in self._context.futures.loads.items():
            if self._owner in (None, owner):
                waiting.add_metric([owner], load.requests)
        yield used
        yield waiting


def _engine_metrics(executor: Executor) -> Iterable[Metric]:
    """Each field of the engine statistics as a gauge, labeled with the base model."""
    all_stats = {model.name: executor.stats(model.name) for model in executor.served}
    for field in Stats.DESCRIPTOR.fields:
        gauge = GaugeMetricFamily(
            f"tinkex_engine_{field.name}",
            f"{field.name.replace('_', ' ').capitalize()} of the engine",
            labels=["base_model"],
        )
        for name, stats in all_stats.items():
            if stats is not None:
                gauge.add_metric([name], getattr(stats, field.name))
        yield gauge
