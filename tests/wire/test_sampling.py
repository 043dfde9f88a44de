"""T6, T7, T8: sampling requests and responses."""

import numpy as np
import pytest
from pydantic import ValidationError

from tinkex.types import (
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TopkLogprobs,
)
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure

REQUEST = {"prompt": ModelInput.from_ints([1, 2]), "sampling_params": SamplingParams()}


@pytest.mark.parametrize(
    ("named", "mode"),
    [
        ({"sampling_session_id": "s:sample:0", "seq_id": 3}, "session"),
        ({"model_path": "tinker://s:train:0/weights/a"}, "model_path"),
        ({"base_model": "org/model"}, "base_model"),
    ],
)
def test_t6_a_sample_names_its_model_in_one_of_three_ways(named, mode):
    assert SampleRequest(**REQUEST, **named).mode == mode


def test_t6_a_sample_that_names_no_model_says_what_is_possible():
    request = SampleRequest(**REQUEST)  # valid as a message

    with pytest.raises(UserFailure, match=r"sampling_session_id.*model_path.*base_model"):
        _ = request.mode


def test_t6_two_names_must_agree():
    request = SampleRequest(**REQUEST, sampling_session_id="s:sample:0", base_model="org/model")

    request.check_agrees(base_model="org/model", model_path=None)
    with pytest.raises(UserFailure, match=r"'org/model'.*'org/other'"):
        request.check_agrees(base_model="org/other", model_path=None)


@pytest.mark.parametrize("value", [None, True, False])
def test_t7_prompt_logprobs_has_three_states(value):
    request = SampleRequest(**REQUEST, prompt_logprobs=value)

    body = encode_json(request)

    assert request.prompt_logprobs is value
    assert (b'prompt_logprobs":' in body.replace(b"topk_prompt_logprobs", b"")) == (
        value is not None
    )
    assert decode_json(SampleRequest, body).prompt_logprobs is value


def test_t7_none_is_the_default_and_null_is_not_false():
    body = b'{"prompt":{"chunks":[]},"sampling_params":{},"prompt_logprobs":null}'

    assert SampleRequest(**REQUEST).prompt_logprobs is None
    assert decode_json(SampleRequest, body).prompt_logprobs is None


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_t8_a_sequence_stopped_for_one_of_two_reasons(reason):
    assert SampledSequence(reason, "q", [1]).stop_reason == reason


@pytest.mark.parametrize("reason", ["max_tokens", "stop_sequence", "eos", "STOP", "", None])
def test_t8_other_stop_reasons_are_refused(reason):
    with pytest.raises(ValueError, match="'length' or 'stop'"):
        SampledSequence(reason, "q", [1])


@pytest.mark.parametrize("stop", [None, "x", ["x", "y"], [1, 2], []])
def test_stop_is_a_text_texts_or_tokens_and_an_empty_list_is_kept(stop):
    request = SampleRequest(prompt=ModelInput.empty(), sampling_params=SamplingParams(stop=stop))

    assert decode_json(SampleRequest, encode_json(request)).sampling_params.stop == stop


def test_a_misspelt_setting_names_the_nearest():
    with pytest.raises(ValidationError, match="`max_token`; did you mean `max_tokens`"):
        SamplingParams(max_token=5)


# -- what comes back -----------------------------------------------------------------------------


def test_arrays_are_stored_and_lists_are_views_made_once():
    sequence = SampledSequence("stop", "q", np.array([5, 6]), np.array([-0.5, -1.0]))

    assert sequence.tokens_np.dtype == np.int32
    assert sequence.logprobs_np.dtype == np.float32
    assert sequence.tokens == [5, 6]
    assert sequence.tokens is sequence.tokens
    assert sequence.logprobs == [-0.5, -1.0]
    assert sequence.topk_logprobs is None
    assert SampledSequence("stop", "q").logprobs is None


def test_a_prompt_position_without_logprob_is_none():
    response = SampleResponse([], [float("nan"), -1.0])

    assert response.prompt_logprobs == [None, -1.0]
    assert np.isnan(response.prompt_logprobs_np[0])


def test_top_k_rows_lose_their_padding_and_an_empty_row_is_none():
    table = TopkLogprobs(
        token_ids=np.array([[0, 0], [7, 0], [0, 9], [0, 4]]),
        logprobs=np.array([[-99999, -99999], [-0.5, -99999], [-0.25, -1], [-99999, -1]]),
    )

    assert table.rows() == [
        None,
        [(7, -0.5)],
        [(0, -0.25), (9, -1.0)],  # token 0 with a real logprob is a token
        None,  # a row that starts with padding is empty
    ]


def test_rows_and_tables_are_the_same_thing():
    rows = [None, [(1, -0.5), (2, -1.5)], [(3, -0.25)]]

    assert TopkLogprobs.from_rows(rows).rows() == rows


def test_tables_of_different_shapes_do_not_fit():
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 1\)"):
        TopkLogprobs(np.zeros((1, 2), dtype=np.int32), np.zeros((1, 1)))
