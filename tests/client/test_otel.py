"""OpenTelemetry: not imported when off; when on, operations are spans, propagated in requests."""

import os
import subprocess
import sys

import pytest
from opentelemetry import metrics as meters
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import tinkex
from tinkex import types
from tinkex.client.observe import instrumentation
from tinkex.client.settings import Settings
from tinkex.testing import FakeService

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def exporter():
    """Providers can be set once in a process."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    meters.set_meter_provider(MeterProvider([reader]))
    return spans, reader


@pytest.fixture
def spans(exporter):
    exporter[0].clear()
    return exporter[0]


@pytest.fixture
def traced(fake):
    settings = Settings(base_url="http://127.0.0.1:9", otel=True)
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    yield service
    service.close("success").result(5)


def sent_in(fake: FakeService, endpoint: str) -> list[str]:
    """The spans that requests to an endpoint belong to, in hex."""
    headers = [seen.headers for seen in fake.requests if seen.endpoint == endpoint]
    return [each["traceparent"].split("-")[2] for each in headers if "traceparent" in each]


def test_every_operation_is_a_span_of_the_caller_and_is_propagated_in_its_requests(
    fake, traced, spans, datum
):
    with trace.get_tracer("user").start_as_current_span("mine") as mine:
        training = traced.create_lora_training_client("fake/model")
        training.forward_backward([datum], "cross_entropy").result(5)
    found = {span.name: span for span in spans.get_finished_spans()}
    step = found["tinkex.forward_backward"]
    assert step.parent.span_id == mine.get_span_context().span_id
    assert step.attributes["tinkex.subject"] == training.model_id
    assert step.attributes["tinkex.outcome"] == "done"
    assert "tinkex.create_model" in found
    here = f"{step.context.span_id:016x}"
    assert sent_in(fake, "forward_backward") == [here]
    assert sent_in(fake, "retrieve_future")[-1] == here


def test_samples_belong_to_the_span_of_their_caller(fake, traced, spans):
    sampling = traced.create_sampling_client(
        base_model="fake/model", retry_config=tinkex.RetryConfig(max_connections=1)
    )
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    futures, callers = [], []
    for number in range(4):
        with trace.get_tracer("user").start_as_current_span(f"caller {number}") as caller:
            callers.append(caller.get_span_context().span_id)
            futures.append(sampling.sample(prompt, 1, params))
    for future in futures:
        future.result(5)
    found = [span for span in spans.get_finished_spans() if span.name == "tinkex.sample"]
    assert [span.parent.span_id for span in found] == callers
    assert sent_in(fake, "asample") == [f"{span.context.span_id:016x}" for span in found]


def test_a_failure_is_traced_by_its_type_and_not_by_its_message(fake, traced, spans):
    with pytest.raises(tinkex.RequestFailedError):
        traced.create_lora_training_client("tml-secret/model")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "RequestFailedError"
    assert "tml-secret" not in span.to_json()


def test_metrics_are_exported(fake, traced, exporter, datum):
    training = traced.create_lora_training_client("fake/model")
    training.forward_backward([datum], "cross_entropy").result(5)
    data = exporter[1].get_metrics_data()
    scopes = [each for resource in data.resource_metrics for each in resource.scope_metrics]
    found = {metric.name: metric for scope in scopes for metric in scope.metrics}
    assert {"tinkex.requests", "tinkex.bytes_sent", "tinkex.operations_in_flight"} <= set(found)
    durations = found["tinkex.operation.duration"].data.data_points
    assert "forward_backward" in {point.attributes["operation"] for point in durations}
    requests = found["tinkex.requests"].data.data_points
    assert "forward_backward" in {point.attributes["endpoint"] for point in requests}


class Refusing(SpanProcessor):
    """A program's own processor that fails for the spans of one name."""

    name = ""

    def on_start(self, span, parent_context=None):
        if span.name == self.name:
            raise OSError("the disk of the traces is full")


@pytest.fixture
def refusing(exporter):
    processor = Refusing()
    trace.get_tracer_provider().add_span_processor(processor)
    yield processor
    processor.name = ""


def test_a_step_that_cannot_start_fails_and_the_next_one_runs(fake, traced, refusing, datum):
    training = traced.create_lora_training_client("fake/model")
    training.optim_step(ADAM).result(5)
    refusing.name = "tinkex.forward_backward"
    failed = [training.forward_backward([datum], "cross_entropy") for _ in range(2)]
    last = training.optim_step(ADAM)
    for each in failed:
        with pytest.raises(OSError, match="the disk of the traces is full"):
            each.result(5)
    last.result(5)
    assert [(number, kind) for _, number, kind in fake.ran] == [
        (1, "optim_step"),
        (2, "optim_step"),
    ]
    assert instrumentation.METRICS.family("operations_in_flight").get("forward_backward", 0) == 0


def test_a_sample_that_cannot_start_fails_and_the_next_one_runs(fake, traced, refusing):
    sampling = traced.create_sampling_client(
        base_model="fake/model", retry_config=tinkex.RetryConfig(max_connections=1)
    )
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
    sampling.sample(prompt, 1, params).result(5)
    refusing.name = "tinkex.sample"
    failed = [sampling.sample(prompt, 1, params) for _ in range(3)]
    for each in failed:
        with pytest.raises(OSError, match="the disk of the traces is full"):
            each.result(5)
    refusing.name = ""
    assert sampling.sample(prompt, 1, params).result(5).sequences


def test_without_tracing_no_header_is_sent(fake, service, datum):
    training = service.create_lora_training_client("fake/model")
    training.forward_backward([datum], "cross_entropy").result(5)
    assert not any("traceparent" in seen.headers for seen in fake.requests)


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


PROGRAM = """
import sys
from tinkex.testing import FakeService
with FakeService().client() as service:
    service.create_lora_training_client("fake/model")
print("opentelemetry" in sys.modules)
"""


@pytest.mark.parametrize(("word", "loaded"), [("0", "False"), ("1", "True")])
def test_it_is_imported_only_if_the_environment_enables_it(word, loaded):
    done = run(PROGRAM, TINKEX_OTEL=word)
    assert done.stdout.strip() == loaded, done.stderr


def test_without_the_extra_it_is_refused_by_name():
    hide = "import sys; sys.modules['opentelemetry'] = None\n"
    done = run(hide + PROGRAM, TINKEX_OTEL="1")
    assert "pip install 'tinkex[otel]'" in done.stderr
