"""The web application: routes, middleware and lifespan."""

import functools
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from tinkex.server.api import (
    account,
    console_data,
    console_pages,
    console_stream,
    docs_page,
    downloads,
    errors,
    futures,
    local,
    metrics,
    models,
    openai_routes,
    openapi,
    operations,
    runs_and_checkpoints,
    sample_stream,
    sampling,
    sessions,
    submit,
    usage_by_key,
    weights,
)
from tinkex.server.api.auth import (
    CONSOLE_PAGES,
    Authentication,
    Authenticator,
    Tokens,
)
from tinkex.server.api.bodies import BodyBudgets, ReleaseBodyMemory
from tinkex.server.api.deps import Context
from tinkex.server.api.response_limits import ReportSlots
from tinkex.server.executor import Executor
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.server.request_metrics import CountRequests, HttpCounts
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.scheduler.session_status import SessionTimeouts
from tinkex.server.scheduling import scheduling
from tinkex.server.settings import Settings
from tinkex.server.store import Quota, Store
from tinkex.server.store.server_secrets import TOKENS

#: Starlette tries routes in order, so the most frequent come first.
ROUTERS = (
    futures.router,
    submit.router,
    submit.save_router,
    sampling.router,
    sample_stream.router,
    *openai_routes.routers,
    account.audit_router,
    account.key_router,
    account.router,
    account.unauthenticated_router,
    usage_by_key.router,
    weights.step_router,
    weights.router,
    downloads.router,
    models.custom_loss_router,
    models.router,
    operations.router,
    operations.telemetry_router,
    sessions.router,
    runs_and_checkpoints.router,
    console_pages.router,
    console_data.router,
    console_stream.router,
    local.router,
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What runs behind the routes, from the start of the application to its end."""

    context: Context
    cleanup: Cleanup


@asynccontextmanager
async def one_machine(
    settings: Settings, executor: Executor, store: Store, *, last_status: int
) -> AsyncIterator[Parts]:
    """A server that is alone on its database, with its scheduler and engines."""
    results = Futures(store, retention_s=settings.result_kept_s)
    async with scheduling(
        Scheduler.of, settings, executor, store, results, last_status=last_status
    ) as scheduler:
        session_timeouts = SessionTimeouts(store, scheduler, grace_s=settings.session_grace_s)
        context = Context(
            settings=settings,
            store=store,
            executor=executor,
            futures=results,
            scheduler=scheduler,
            session_timeouts=session_timeouts,
        )
        cleanup = Cleanup(settings=settings, store=store, scheduler=scheduler, futures=results)
        await session_timeouts.start()
        # Last: requests run from now on, so a failure counts as a crash of this process.
        await scheduler.start()
        cleanup.start()
        try:
            yield Parts(context=context, cleanup=cleanup)
        finally:
            results.release()
            await cleanup.close()
            await session_timeouts.close()
            await scheduler.close()
            await executor.close()


def create_app(
    settings: Settings,
    executor: Executor,
    store: Store,
    *,
    last_status: int = -signal.SIGKILL,
    parts: Callable[[], AbstractAsyncContextManager[Parts]] | None = None,
) -> FastAPI:
    """
    Build the application on an open store. Its lifespan starts and stops the scheduler.

    `last_status` is the exit status of the last web process on this folder. A web process of a
    cluster has other `parts`.
    """
    start = parts or functools.partial(
        one_machine, settings, executor, store, last_status=last_status
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with start() as running:
            app.state.context = running.context
            app.state.cleanup = running.cleanup
            yield

    app = FastAPI(
        title="tinkex",
        description="The Tinker training API, self-hosted.",
        lifespan=lifespan,
        # FastAPI's pages load scripts from a CDN; `docs_page` does not.
        docs_url=None,
        redoc_url=None,
        exception_handlers=errors.HANDLERS,
    )
    store.quotas.server, store.quotas.abandoned_s = Quota.of(settings), settings.abandoned_s
    app.state.authenticator = Authenticator(store.keys, Tokens(store.secrets[TOKENS]))
    #: For the routes of local administration; None refuses them.
    app.state.administration = None
    #: Adds models to a local server; None elsewhere.
    app.state.local_models = None
    app.state.body_budgets = BodyBudgets(settings)
    app.state.report_slots = ReportSlots()
    app.state.console_streams = console_stream.OpenStreams()
    #: Why the server is not ready yet; the web process sets it until the engine is up.
    app.state.starting = None
    app.add_middleware(ReleaseBodyMemory)
    app.add_middleware(Authentication, host=settings.host)
    app.state.http_counts = HttpCounts()
    app.add_middleware(CountRequests, counts=app.state.http_counts)
    for router in ROUTERS:
        # Not `include_router`, which would call the routes through FastAPI.
        app.router.routes.extend(router.routes)
    app.add_route("/metrics", metrics.metrics, methods=["GET"])
    app.add_route("/", console_pages.home, methods=["GET"])
    app.add_route("/console/{file:path}", console_pages.file, methods=["GET"])
    for name in CONSOLE_PAGES:
        app.add_route(f"/{name}", console_pages.page, methods=["GET"])
        app.add_route(f"/{name}/{{rest:path}}", console_pages.page, methods=["GET"])
    app.add_route("/readyz", operations.readyz, methods=["GET"])
    app.add_route("/docs", docs_page.docs, methods=["GET"])
    openapi.describe(app)
    return app
