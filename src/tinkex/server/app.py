"""The web application: routes, errors, OpenAPI, metrics. Owns nothing that must outlive it."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tinkex.server.api import (
    account,
    checkpoints,
    downloads,
    errors,
    futures,
    models,
    openapi,
    operations,
    sampling,
    sessions,
    training,
    training_runs,
)
from tinkex.server.api.auth import Authentication, Caller, Gate, Signer, Tokens
from tinkex.server.api.bodies import Leaving
from tinkex.server.api.deps import Context
from tinkex.server.api.openapi import complete
from tinkex.server.executor import Executor
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.server.maintenance.disk_monitor import DiskMonitor
from tinkex.server.scheduler.base_model_check import BaseCheck
from tinkex.server.scheduler.crash_isolation import Roll
from tinkex.server.scheduler.results import Futures
from tinkex.server.scheduler.scheduler import Dispatcher
from tinkex.server.scheduler.session_timeout import Presence
from tinkex.server.settings import Settings
from tinkex.server.store import Quota, Store
from tinkex.server.store.storage_health import KINDS
from tinkex.wire import checkpoints as wire_checkpoints
from tinkex.wire import custom_loss as wire_custom_loss
from tinkex.wire import futures as wire_futures
from tinkex.wire import runs as wire_runs
from tinkex.wire import sampling as wire_sampling
from tinkex.wire import telemetry as wire_telemetry
from tinkex.wire import training as wire_training
from tinkex.wire.proto.frames_pb2 import Stats

#: Asked for all the time, so they go past FastAPI's own machinery.
HOT_ROUTES: dict[str, Callable[[Request], Any]] = {
    "/api/v1/asample": sampling.asample,
    "/api/v1/forward": training.forward,
    "/api/v1/forward_backward": training.forward_backward,
    "/api/v1/retrieve_future": futures.retrieve_future,
    "/api/v1/retrieve_futures": futures.retrieve_futures,
    "/api/v1/stream_sample": sampling.stream_sample,
}

ROUTERS = (
    account.audit_router,
    account.key_router,
    account.router,
    account.unauthed,
    checkpoints.router,
    downloads.router,
    futures.router,
    models.custom_loss_router,
    models.router,
    operations.router,
    operations.telemetry_router,
    sampling.router,
    sessions.router,
    training.router,
    training_runs.router,
)

#: Bodies that routes read themselves; named in the OpenAPI page.
BODIES: tuple[type[BaseModel], ...] = (
    checkpoints.WeightsInfoRequest,
    sessions.SetSessionProjectRequest,
    wire_checkpoints.CopyWeightsRequest,
    wire_checkpoints.LoadWeightsRequest,
    wire_checkpoints.SaveWeightsExternalRequest,
    wire_checkpoints.SaveWeightsForSamplerRequest,
    wire_checkpoints.SaveWeightsRequest,
    wire_checkpoints.SetCheckpointTtlRequest,
    wire_custom_loss.CreateCustomLossRequest,
    wire_futures.CancelFutureRequest,
    wire_runs.ClientConfigRequest,
    wire_runs.CreateSessionRequest,
    wire_runs.FinishSessionRequest,
    wire_runs.GetInfoRequest,
    wire_runs.SessionHeartbeatRequest,
    wire_runs.SessionSearchRequest,
    wire_sampling.CreateSamplingSessionRequest,
    wire_sampling.JoinSamplingSessionRequest,
    wire_telemetry.TelemetrySendRequest,
    wire_training.CreateModelRequest,
    wire_training.OptimStepRequest,
    wire_training.UnloadModelRequest,
)


def create_app(
    settings: Settings,
    executor: Executor,
    store: Store,
    *,
    rolls: Mapping[str, Roll] | None = None,
    web_crashed: bool = False,
) -> FastAPI:
    """The application over an open store; its lifespan starts and stops executor and dispatcher."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        waiting = Futures(store, kept_s=settings.result_kept_s)
        base_check = BaseCheck(
            store, executor.served, folder=settings.folder, accept=settings.accept_changed_base
        )
        base_check.start()
        dispatcher = Dispatcher(
            store=store,
            executor=executor,
            futures=waiting,
            gap_s=settings.gap_s,
            snapshot_steps=settings.snapshot_steps,
            snapshot_bytes=settings.snapshot_bytes,
            max_training=settings.max_training,
            max_sequences=settings.max_sequences,
            rolls=rolls,
            web_crashed=web_crashed,
            base_check=base_check,
        )
        presence = Presence(store, dispatcher, grace_s=settings.session_grace_s)
        app.state.context = Context(
            settings=settings,
            store=store,
            executor=executor,
            futures=waiting,
            dispatcher=dispatcher,
            presence=presence,
            signer=Signer.of_folder(settings.folder),
        )
        disk_monitor = DiskMonitor(settings, store)
        await disk_monitor.start()
        await dispatcher.start()
        await presence.start()
        cleanup = Cleanup(settings=settings, store=store, dispatcher=dispatcher, futures=waiting)
        cleanup.start()
        app.state.cleanup = cleanup
        try:
            yield
        finally:
            waiting.release()
            await cleanup.close()
            await disk_monitor.close()
            await presence.close()
            await dispatcher.close()
            await base_check.close()
            await executor.close()

    app = FastAPI(
        title="tinkex",
        description="The Tinker training API, self-hosted.",
        lifespan=lifespan,
        # FastAPI's own pages load their scripts from elsewhere; ours is below.
        docs_url=None,
        redoc_url=None,
        exception_handlers=errors.HANDLERS,
    )
    store.quotas.server, store.quotas.abandoned_s = Quota.of(settings), settings.abandoned_s
    app.state.gate = Gate(store.keys, Tokens.of_folder(settings.folder))
    app.add_middleware(Leaving)
    app.add_middleware(Authentication, host=settings.host)
    # Routes are tried in order, and each try costs: the hot ones come first.
    for path, endpoint in HOT_ROUTES.items():
        app.add_route(path, endpoint, methods=["POST"])
    for router in ROUTERS:
        app.include_router(router)
    app.add_route("/metrics", metrics, methods=["GET"])
    app.add_route("/docs", docs, methods=["GET"])
    _describe_bodies(app)
    return app


async def docs(request: Request) -> Response:
    """What there is to ask for, for people."""
    return HTMLResponse(openapi.page(request.app.openapi()), headers=openapi.HEADERS)


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    registry = CollectorRegistry()
    # With a key, of its owner only; without one, where only this machine can ask, of all.
    caller: Caller | None = getattr(request.state, "caller", None)
    owner = None if caller is None else caller.owner
    registry.register(_Figures(request.app.state.context, owner))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Figures(Collector):
    """Figures that are kept anyway, read when somebody asks."""

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
        for task, (count, total_s) in self._context.dispatcher.computed.items():
            seconds.add_metric([task.name.lower()], total_s)
            operations.add_metric([task.name.lower()], count)
        yield seconds
        yield operations
        yield from self._shares()
        yield from engine_gauges(self._context.executor)

    def _shares(self) -> Iterable[Metric]:
        """What each owner has, and has had, of the engines."""
        used = CounterMetricFamily(
            "tinkex_owner_compute_seconds",
            "Seconds engines computed for an owner",
            labels=["owner"],
        )
        waiting = GaugeMetricFamily(
            "tinkex_owner_requests_open", "Requests of an owner that wait or run", labels=["owner"]
        )
        for owner, seconds in self._context.dispatcher.used_s.items():
            if self._owner in (None, owner):
                used.add_metric([owner], seconds)
        for owner, load in self._context.futures.loads.items():
            if self._owner in (None, owner):
                waiting.add_metric([owner], load.requests)
        yield used
        yield waiting


def engine_gauges(executor: Executor) -> Iterable[Metric]:
    """Every field of the engines' own figures as a gauge with the base model as its label."""
    told = {model.name: executor.stats(model.name) for model in executor.served}
    for field in Stats.DESCRIPTOR.fields:
        gauge = GaugeMetricFamily(
            f"tinkex_engine_{field.name}",
            f"{field.name.replace('_', ' ').capitalize()} of the engine",
            labels=["base_model"],
        )
        for name, stats in told.items():
            if stats is not None:
                gauge.add_metric([name], getattr(stats, field.name))
        yield gauge


def _describe_bodies(app: FastAPI) -> None:
    """Routes read their bodies themselves, so their schemas are added to the page by hand."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(generate(), BODIES)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
