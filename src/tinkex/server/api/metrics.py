"""
The page at /metrics, in the text format of Prometheus.

Labels take values from closed sets only: route templates, methods, statuses, kinds of requests, and
served base models with their replicas. They never hold an owner, a key or a path that a client sent.
"""

from collections import defaultdict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.deps import Context
from tinkex.server.executor import COUNTERS, Executor
from tinkex.server.request_metrics import LONG_ROUTES, Histogram, HttpCounts
from tinkex.server.store.storage_health import KINDS
from tinkex.wire.proto.frames_pb2 import Stats

#: Status of a request whose client disconnected before the answer.
NO_ANSWER = "none"


async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    state = request.app.state
    registry.register(_ServerMetrics(state.context, state.http_counts))
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _ServerMetrics(Collector):
    """Reads counters of the server's parts on each scrape."""

    def __init__(self, context: Context, requests: HttpCounts) -> None:
        self._context = context
        self._requests = requests

    def collect(self) -> Iterable[Metric]:
        yield from _http_metrics(self._requests)
        yield from self._work_metrics()
        yield from self._storage_metrics()
        yield from _engine_metrics(self._context.executor)

    def _work_metrics(self) -> Iterable[Metric]:
        """Accepted work: steps, samples and the like."""
        futures, usage = self._context.futures, self._context.scheduler.usage
        yield GaugeMetricFamily(
            "tinkex_requests_open", "Requests accepted and not finished", len(futures)
        )
        yield GaugeMetricFamily(
            "tinkex_owners_active", "Owners with unfinished requests", len(futures.loads)
        )
        finished = CounterMetricFamily(
            "tinkex_requests_finished",
            "Requests that ended: done, or failed by a user's or the server's error",
            labels=["kind", "outcome"],
        )
        for (kind, outcome), count in futures.timings.finished.items():
            finished.add_metric([kind, outcome], count)
        yield finished
        yield _histograms(
            "tinkex_request_queue_seconds",
            "Seconds from acceptance until a request was sent to an engine",
            ["kind"],
            (([kind], one) for kind, one in futures.timings.queue_s.items()),
        )
        yield _histograms(
            "tinkex_request_seconds",
            "Seconds from acceptance until the result was stored",
            ["kind"],
            (([kind], one) for kind, one in futures.timings.total_s.items()),
        )
        seconds = CounterMetricFamily(
            "tinkex_engine_compute_seconds", "Seconds engines computed", labels=["task"]
        )
        operations = CounterMetricFamily(
            "tinkex_engine_operations", "Operations engines finished", labels=["task"]
        )
        for task, (count, total_s) in usage.by_task.items():
            # The field of a pass cannot be named `pass` in Python.
            name = "pass" if task == "run_pass" else task
            seconds.add_metric([name], total_s)
            operations.add_metric([name], count)
        yield seconds
        yield operations

    def _storage_metrics(self) -> Iterable[Metric]:
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


def _http_metrics(requests: HttpCounts) -> Iterable[Metric]:
    counted = CounterMetricFamily(
        "tinkex_http_requests",
        "HTTP requests by route template and status; `other` reached no route",
        labels=["method", "route", "status"],
    )
    for (method, template), route in requests.routes.items():
        for status, count in route.statuses.items():
            counted.add_metric([method, template, str(status or NO_ANSWER)], count)
    yield counted
    by_length = defaultdict(list)
    for (method, template), route in requests.routes.items():
        by_length[template in LONG_ROUTES].append(([method, template], route.seconds))
    yield _histograms(
        "tinkex_http_request_seconds",
        "Seconds of HTTP requests, without polls, streams and downloads",
        ["method", "route"],
        by_length[False],
    )
    yield _histograms(
        "tinkex_http_long_request_seconds",
        "Seconds of polls, streams and downloads, which the server holds on purpose",
        ["method", "route"],
        by_length[True],
    )


def _histograms(
    name: str, text: str, labels: list[str], found: Iterable[tuple[list[str], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in found:
        family.add_metric(values, list(histogram.buckets()), histogram.sum)
    return family


def _engine_metrics(executor: Executor) -> Iterable[Metric]:
    """
    Each field of the engine statistics, labeled with the base model and the replica.

    In a cluster the replica is a worker, and every web process has the statistics of all of them.
    """
    all_stats = [
        ([model.name, engine if model.workers else str(number)], executor.stats(engine))
        for model in executor.served
        for number, engine in enumerate(model.engines)
    ]
    for field in Stats.DESCRIPTOR.fields:
        family = CounterMetricFamily if field.name in COUNTERS else GaugeMetricFamily
        metric = family(
            f"tinkex_engine_{field.name}",
            f"{field.name.replace('_', ' ').capitalize()} of the engine",
            labels=["base_model", "replica"],
        )
        for labels, stats in all_stats:
            if stats is not None:
                metric.add_metric(labels, getattr(stats, field.name))
        yield metric
