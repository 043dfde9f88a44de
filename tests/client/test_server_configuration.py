"""The configuration that a server sends to its clients, and its refresh."""

import sys
import time

import pytest

import tinkex
from tinkex import SamplingParams, types
from tinkex.client import connection, submission
from tinkex.client.http import backpressure
from tinkex.testing import Answer, FakeService
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.protobuf import decode_sample_response

PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=4)


def test_configuration_is_refreshed_and_the_old_one_stays_after_a_failure(monkeypatch):
    monkeypatch.setattr(connection, "MIN_REFRESH_S", 0.02)
    fake = FakeService(dynamic_config={"refresh_interval_sec": 0})
    with fake.client() as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        fake.script("client/dynamic_config", Answer(status=404), Answer(status=422))
        fake._dynamic_config["sample_cancel_enabled"] = True
        fake._sample_s = 60.0
        deadline = time.monotonic() + 30
        while not fake.cancelled:
            assert time.monotonic() < deadline
            future = sampling.sample(PROMPT, 1, PARAMS)
            time.sleep(0.02)
            future.cancel()


def test_sizes_of_the_budgets_come_from_the_server():
    config = {
        "sample_dispatch_bytes_semaphore_size": 11,
        "inflight_response_bytes_semaphore_size": 12,
        "fwdbwd_dispatch_bytes_semaphore_size": 13,
        "sample_max_concurrent_requests": 14,
        "billing_exception_max_pause_duration_sec": 15,
    }
    fake = FakeService(config=config)
    with fake.client(api_key="tml-sizes") as service:
        service.create_sampling_client(base_model="fake/model")
        limits = service.holder._connected.value.limits
        assert limits.sample_bytes.size == 11
        assert limits.result_bytes.size == 12
        assert limits.training_bytes.size == 13
        assert limits.samples.size == 14
        assert limits.billing.max_pause_s == 15


def test_samples_that_share_a_poll_are_not_limited_by_open_files(monkeypatch):
    monkeypatch.setattr(connection, "max_open_polls", lambda: 7)
    for shared, size in ((True, 2000), (False, 7)):
        fake = FakeService(config={"sample_use_retrieve_futures": shared})
        with fake.client(api_key=f"tml-{shared}") as service:
            service.create_sampling_client(base_model="fake/model")
            assert service.holder._connected.value.limits.samples.size == size


def test_batches_go_uncompressed_where_there_is_no_zstd(monkeypatch, datum, caplog):
    for name in ("zstandard", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    submission._log_missing_zstd.cache_clear()
    fake = FakeService(config={"proto_compress_fwdbwd": True})
    with fake.client() as service, caplog.at_level("DEBUG", logger="tinkex"):
        model = service.create_lora_training_client("fake/model")
        for _ in range(3):
            model.forward_backward([datum], "cross_entropy").result(5)
    sent = [s for s in fake.requests if s.endpoint == "forward_backward"]
    assert not any("content-encoding" in s.headers for s in sent)
    assert sum("tinkex[zstd]" in record.getMessage() for record in caplog.records) == 1


def test_a_billing_pause_is_waited_out(monkeypatch, fake, service):
    monkeypatch.setattr(backpressure, "BILLING_PAUSE_S", 0.02)
    sampling = service.create_sampling_client(base_model="fake/model")
    fake.script("asample", Answer(status=402))
    fake.script("retrieve_future", Answer(status=402))
    assert sampling.sample(PROMPT, 1, PARAMS).result(5).sequences


# -- answers that do not fit what was asked ----------------------------------------------------------


def test_a_response_with_too_few_sequences_is_an_error_that_says_so(fake, service):
    sampling = service.create_sampling_client(base_model="fake/model")
    promise = {"request_id": "r", "sample_sequence_ids": ["q1", "q2"]}
    fake.script("asample", Answer(status=200, body=promise))
    one = pb.SampleResponse(sequences=[pb.SampledSequence(tokens=b"\1\0\0\0")])
    body, kind = one.SerializeToString(), {"content-type": "application/x-protobuf"}
    # The first could have been damaged in transit.
    fake.script("retrieve_future", *[Answer(status=200, body=body, headers=kind)] * 4)
    with pytest.raises(
        tinkex.APIResponseValidationError, match="has 1 sequences, but 2 sequence ids"
    ):
        sampling.sample(PROMPT, 2, PARAMS).result(5)


def test_bfloat16_in_a_sample_is_decoded_exactly():
    """Defect 23: read by value, 1.0 becomes 16256.0."""
    ones = pb.Tensor(dense=b"\x80\x3f\x00\xc0", dtype=pb.DTYPE_BFLOAT16, shape=[2])
    answer = decode_sample_response(
        pb.SampleResponse(target_prompt_logprobs=ones).SerializeToString()
    )
    assert answer.target_prompt_logprobs.tolist() == [1.0, -2.0]
    assert answer.target_prompt_logprobs.dtype == "float32"
