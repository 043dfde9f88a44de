"""T3, T4, T5, T14: futures, and the responses to polling them."""

import logging

import pytest

from tinkex.types import (
    CompleteMetadata,
    OptimStepResponse,
    ParsedCheckpointTinkerPath,
    RequestErrorCategory,
    RequestFailedResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    TryAgainResponse,
    UntypedAPIFuture,
)
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import WireError
from tinkex.wire.futures import read_future

# -- T3 ------------------------------------------------------------------------------------------


def test_t3_categories_are_lower_case_on_the_wire():
    assert [category.value for category in RequestErrorCategory] == ["unknown", "server", "user"]
    failed = RequestFailedResponse(error="no", category=RequestErrorCategory.User)
    assert encode_json(failed) == b'{"error":"no","category":"user"}'


@pytest.mark.parametrize(
    ("word", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("USER", RequestErrorCategory.User),
        ("Server", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("transient", RequestErrorCategory.Unknown),
        ("user_error", RequestErrorCategory.Unknown),
        ("", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
        (7, RequestErrorCategory.Unknown),
    ],
)
def test_t3_a_category_is_read_without_regard_to_case_and_a_new_word_is_unknown(word, category):
    assert RequestErrorCategory.parse(word) is category
    answer = read_future({"error": "no", "category": word}, OptimStepResponse)
    assert answer == RequestFailedResponse(error="no", category=category)


# -- T4 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"type": "try_again", "request_id": "r", "queue_state": "active"}, TryAgainResponse),
        ({"type": "try_again", "request_id": "r", "error": "x"}, TryAgainResponse),
        ({"status": "complete_metadata", "response_payload_size": 9}, CompleteMetadata),
        ({"error": "no", "category": "user"}, RequestFailedResponse),
        ({"error": None, "category": "user"}, RequestFailedResponse),  # whatever its value
        ({"metrics": {"a:sum": 1.0}}, OptimStepResponse),
        ({}, OptimStepResponse),
        ({"status": "try_again"}, OptimStepResponse),  # no such field
        ({"status": "failed", "metrics": None}, OptimStepResponse),
    ],
)
def test_t4_a_response_is_identified_by_its_fields(answer, found):
    assert type(read_future(answer, OptimStepResponse)) is found


def test_t4_a_response_that_matches_nothing_is_an_error_that_names_the_type():
    with pytest.raises(WireError, match="SaveWeightsResponse"):
        read_future({"no": "path"}, SaveWeightsResponse)


# -- T5 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["active", "paused_capacity", "paused_rate_limit"])
def test_t5_the_three_queue_states(state):
    body = encode_json({"type": "try_again", "request_id": "r", "queue_state": state})

    assert decode_json(TryAgainResponse, body).queue_state == state


@pytest.mark.parametrize("state", ["paused_for_lunch", "", None, 3])
def test_t5_an_unknown_queue_state_is_logged_and_means_active(state, caplog):
    with caplog.at_level(logging.INFO, logger="tinkex.wire.futures"):
        answer = read_future(
            {"type": "try_again", "request_id": "r", "queue_state": state}, OptimStepResponse
        )

    assert isinstance(answer, TryAgainResponse)
    assert answer.queue_state == "active"
    assert f"unknown queue state {str(state)!r}" in caplog.text


# -- T14 -----------------------------------------------------------------------------------------


def test_t14_the_public_answer_to_a_sampler_save_shows_the_path_only():
    body = b'{"path":"tinker://s:train:0/sampler_weights/a","sampling_session_id":"s:sample:0"}'

    public = decode_json(SaveWeightsForSamplerResponse, body)
    internal = decode_json(SaveWeightsForSamplerResponseInternal, body)

    assert set(public.model_dump()) == {"path", "type"}
    assert not hasattr(public, "sampling_session_id")
    assert internal.sampling_session_id == "s:sample:0"


def test_t14_an_unnamed_save_has_a_session_and_no_path():
    internal = decode_json(
        SaveWeightsForSamplerResponseInternal, b'{"sampling_session_id":"s:sample:0"}'
    )

    assert internal.path is None
    with pytest.raises(WireError, match="path"):
        decode_json(SaveWeightsForSamplerResponse, b'{"sampling_session_id":"s:sample:0"}')


# -- promises and paths --------------------------------------------------------------------------


def test_a_future_ignores_unknown_fields():
    promise = decode_json(UntypedAPIFuture, b'{"request_id":"r","new":1}')

    assert promise == UntypedAPIFuture(request_id="r")
    assert encode_json(promise) == b'{"request_id":"r"}'


@pytest.mark.parametrize(
    ("kind", "checkpoint_type"),
    [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")],
)
def test_a_path_is_parsed(kind, checkpoint_type):
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(f"tinker://s:train:0/{kind}/a")

    assert parsed.training_run_id == "s:train:0"
    assert parsed.checkpoint_type == checkpoint_type
    assert parsed.checkpoint_id == f"{kind}/a"


@pytest.mark.parametrize(
    "path",
    ["", "a", "tinker://", "tinker://a/weights", "tinker://a/weights/b/c", "tinker://a/other/b",
     "tinker:///weights/b", "tinker://a/weights/", "http://a/weights/b"],
)  # fmt: skip
def test_an_invalid_path_is_refused_with_the_valid_form(path):
    with pytest.raises(ValueError, match="tinker://RUN/KIND/NAME"):
        ParsedCheckpointTinkerPath.from_tinker_path(path)


def test_pages_of_the_hosted_service_quote_the_path():
    saved = SaveWeightsForSamplerResponse(path="tinker://s:train:0/sampler_weights/x")

    assert saved.get_console_url().endswith("/checkpoints/s%3Atrain%3A0/sampler_weights%2Fx")
    assert saved.get_playground_url().endswith(
        "checkpoint=tinker%3A%2F%2Fs%3Atrain%3A0%2Fsampler_weights%2Fx"
    )
