"""T16: JSON decoding, what it accepts and rejects, and its speed."""

import gzip
import json
import logging
import time

import numpy as np
import pytest
import zstandard

from tinkex.types import (
    AdamParams,
    CreateModelRequest,
    CreateSessionRequest,
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    GetInfoResponse,
    ImageAssetPointerChunk,
    ImageChunk,
    LoadWeightsRequest,
    LoraConfig,
    ModelInput,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
    SaveWeightsRequest,
    SessionSearchRequest,
    SetCheckpointTtlRequest,
    TelemetrySendRequest,
)
from tinkex.wire import codec
from tinkex.wire.codec import decode_forward_json, decode_json, decompress, encode_json
from tinkex.wire.errors import TooLarge, UserFailure, WireError


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


SAMPLE = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "s", "seq_id": 4}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b"}


# -- T16: what is new ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "fields"),
    [
        (SampleRequest, SAMPLE),
        (CreateModelRequest, MODEL),
        (SaveWeightsRequest, {"model_id": "m"}),
        (GetInfoResponse, {"model_data": {}, "model_id": "m"}),
    ],
)
def test_unknown_fields_of_a_message_are_ignored_and_logged_once(type_, fields, caplog):
    codec._logged.clear()
    with caplog.at_level(logging.DEBUG, logger="tinkex.wire.codec"):
        first = decode_json(type_, body(**fields, brand_new={"a": 1}))
        second = decode_json(type_, body(**fields, brand_new=[2]))

    assert first == second == decode_json(type_, body(**fields))
    assert [record.field for record in caplog.records] == ["brand_new"]
    assert caplog.records[0].levelno == logging.DEBUG


@pytest.mark.parametrize(
    ("type_", "fields", "field"),
    [
        (SampleRequest, {**SAMPLE, "sampling_params": {"max_token": 5}}, "max_tokens"),
        (SampleRequest, {**SAMPLE, "sampling_params": {"min_p": 0.1}}, "min_p"),
        (OptimStepRequest, {"model_id": "m", "adam_params": {"lr": 1.0}}, "lr"),
        (OptimStepRequest, {"model_id": "m", "adam_params": {"amsgrad": True}}, "amsgrad"),
        (
            OptimStepRequest,
            {"model_id": "m", "optimizer_params": {"type": "dimuon", "learning_rat": 1.0}},
            "learning_rate",
        ),
        (CreateModelRequest, {**MODEL, "lora_config": {"rank": 8, "alpha": 64}}, "alpha"),
        (CreateModelRequest, {**MODEL, "optimizer_config": {"type": "adamw", "x": 1}}, "x"),
    ],
)
def test_an_unknown_setting_is_a_user_failure(type_, fields, field):
    with pytest.raises(UserFailure, match=f"`{field}`"):
        decode_json(type_, body(**fields))


def test_the_failure_says_which_step_it_belongs_to():
    fields = {"model_id": "m", "seq_id": 9, "adam_params": {"lr": 1.0}}

    with pytest.raises(UserFailure) as failure:
        decode_json(OptimStepRequest, body(**fields))

    assert failure.value.request == {"model_id": "m", "seq_id": 9}


def test_an_unknown_setting_that_is_null_is_ignored():
    fields = {**SAMPLE, "sampling_params": {"max_tokens": 5, "min_p": None}}

    request = decode_json(SampleRequest, body(**fields))

    assert request.sampling_params == SamplingParams(max_tokens=5)


@pytest.mark.parametrize(
    ("make", "wrong", "near"),
    [
        (lambda: SamplingParams(max_token=5), "max_token", "max_tokens"),
        (lambda: AdamParams(learning_rat=1), "learning_rat", "learning_rate"),
        (lambda: LoraConfig(rank=1, train_attention=True), "train_attention", "train_attn"),
        (lambda: SaveWeightsRequest(model_id="m", ttl=3), "ttl", "ttl_seconds"),
    ],
)
def test_in_python_a_misspelt_keyword_names_the_nearest_field(make, wrong, near):
    with pytest.raises(ValueError, match=f"unknown field `{wrong}`") as refused:
        make()
    assert near in str(refused.value)


# -- T16: what is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "raw", "loc", "kind"),
    [
        (CreateModelRequest, b'{"session_id":"s","base_model":"b"}', ["model_seq_id"], "missing"),
        (CreateModelRequest, body(**{**MODEL, "model_seq_id": "0"}), ["model_seq_id"], "int_type"),
        (CreateModelRequest, body(**{**MODEL, "model_seq_id": 0.5}), ["model_seq_id"], "int_type"),
        (CreateModelRequest, body(**{**MODEL, "base_model": 3}), ["base_model"], "string_type"),
        (CreateModelRequest, body(**MODEL, lora_config={"rank": "8"}), ["lora_config", "rank"], "int_type"),
        (CreateModelRequest, body(**MODEL, lora_config={}), ["lora_config", "rank"], "missing"),
        (SaveWeightsRequest, body(model_id="m", overwrite=1), ["overwrite"], "bool_type"),
        (SaveWeightsRequest, body(model_id="m", seq_id=2**63), ["seq_id"], "int_size"),
        (OptimStepRequest, body(model_id="m", adam_params={"eps": "x"}), ["adam_params", "eps"], "float_type"),
        (SampleRequest, body(**{**SAMPLE, "prompt": [1]}), ["prompt"], "dict_type"),
        (SampleRequest, body(**{**SAMPLE, "prompt": {}}), ["prompt", "chunks"], "missing"),
        (SampleRequest, body(**{**SAMPLE, "prompt": {"chunks": [{"tokens": "x"}]}}), ["prompt", "chunks", 0, "type"], "union_tag_invalid"),
        (SampleRequest, body(**{**SAMPLE, "prompt": {"chunks": [{"type": "text", "tokens": [1]}]}}), ["prompt", "chunks", 0, "type"], "union_tag_invalid"),
        (SampleRequest, body(**{**SAMPLE, "prompt": {"chunks": [{"tokens": [1, "x"]}]}}), ["prompt", "chunks", 0, "tokens"], "value_error"),
        (SampleRequest, b"[]", [], "model_type"),
        (SampleRequest, b'{"prompt":', [], "json_invalid"),
        (SampleRequest, b"\xff\xfe", [], "json_invalid"),
        (SampleRequest, b"", [], "json_invalid"),
    ],
)  # fmt: skip
def test_a_missing_or_mistyped_field_is_named_with_its_path(type_, raw, loc, kind):
    with pytest.raises(WireError) as refused:
        decode_json(type_, raw)

    first = refused.value.detail()[0]
    assert first["loc"] == ["body", *loc]
    assert first["type"] == kind
    assert first["msg"]


def test_every_bad_field_is_named():
    with pytest.raises(WireError) as refused:
        decode_json(CreateModelRequest, b'{"session_id":7}')

    assert [error.loc for error in refused.value.errors] == [
        ("session_id",),
        ("model_seq_id",),
        ("base_model",),
    ]


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"data": 3}, "data"),
        ({"data": [{"loss_fn_inputs": {}}]}, "data[0].model_input"),
        (
            {"data": [{"model_input": {"chunks": [{"tokens": [1]}, 5]}}]},
            "data[0].model_input.chunks[1]",
        ),
        (
            {
                "data": [
                    {
                        "model_input": {"chunks": []},
                        "loss_fn_inputs": {"weights": {"data": [1], "dtype": "float16"}},
                    }
                ]
            },
            "data[0].loss_fn_inputs.weights.dtype",
        ),
        ({"data": [], "loss_fn_config": {"beta": [1]}}, "loss_fn_config.beta"),
        ({"data": [], "loss_fn": 7}, "loss_fn"),
    ],
)
def test_a_bad_pass_is_refused_with_the_path_of_the_bad_field(data, path):
    work = {"loss_fn": "ppo", **data}

    with pytest.raises(WireError, match=r"^forward_backward_input[.]") as refused:
        decode_forward_json(body(forward_backward_input=work, model_id="m", seq_id=1))

    assert str(refused.value).startswith(f"forward_backward_input.{path}: ")


@pytest.mark.parametrize(
    ("change", "loc"),
    [
        ({"model_id": None}, ("model_id",)),
        ({"model_id": 3}, ("model_id",)),
        ({"seq_id": "1"}, ("seq_id",)),
        ({"seq_id": -1}, ("seq_id",)),
        ({"seq_id": 2**31}, ("seq_id",)),
        ({"seq_id": True}, ("seq_id",)),
    ],
)
def test_a_pass_with_a_bad_model_or_step_id_is_refused(change, loc):
    fields = {"forward_backward_input": {"data": [], "loss_fn": "ppo"}, "model_id": "m"}

    with pytest.raises(WireError) as refused:
        decode_forward_json(body(**{**fields, **change}))
    assert refused.value.errors[0].loc == loc


def test_a_pass_without_input_is_refused():
    with pytest.raises(WireError, match="forward_backward_input: Field required"):
        decode_forward_json(b'{"model_id":"m"}')


def test_a_loss_this_version_does_not_know_is_left_to_the_engine_to_refuse():
    request, _ = decode_forward_json(
        body(forward_backward_input={"data": [], "loss_fn": "newest"}, model_id="m")
    )

    assert request.forward_backward_input.loss_fn == "newest"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_json_that_is_not_json_is_refused(number):
    raw = b'{"adam_params":{"learning_rate":%s},"model_id":"m"}' % number.encode()

    with pytest.raises(WireError, match="invalid JSON"):
        decode_json(OptimStepRequest, raw)


# -- old bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "made"),
    [
        ({"tokens": [1, 2]}, EncodedTextChunk(tokens=[1, 2])),
        (
            {"data": "eA==", "format": "png", "height": 3, "width": 4, "tokens": 5},
            ImageChunk(data=b"x", format="png", expected_tokens=5),
        ),
        (
            {"location": "a", "format": "png", "height": 3, "width": 4, "tokens": 5},
            ImageAssetPointerChunk(location="a", format="png", expected_tokens=5),
        ),
        ({"data": "eA==", "format": "jpeg"}, ImageChunk(data=b"x", format="jpeg")),
        (
            {"location": "a", "data": None, "format": "png"},
            ImageAssetPointerChunk(location="a", format="png"),
        ),
    ],
)
def test_a_chunk_without_a_type_shows_it_in_its_keys(chunk, made):
    prompt = decode_json(SampleRequest, body(**{**SAMPLE, "prompt": {"chunks": [chunk]}})).prompt

    assert prompt.chunks == [made]


def test_a_load_without_optimizer_is_weights_only():
    request = decode_json(
        LoadWeightsRequest, body(model_id="m", seq_id=1, path="tinker://r/weights/a")
    )

    assert request.optimizer is False


def test_sessions_and_telemetry_of_old_clients_lack_fields():
    session = decode_json(CreateSessionRequest, b'{"sdk_version":"0.4.1"}')
    telemetry = decode_json(
        TelemetrySendRequest, body(events=[], platform="x", sdk_version="0.4.1", session_id="s")
    )

    assert (session.tags, session.user_metadata) == ([], None)
    assert telemetry.process_uuid == ""


def test_an_explicit_null_is_the_same_as_absent():
    request = decode_json(
        CreateModelRequest,
        body(**MODEL, user_metadata=None, lora_config={"rank": 4, "seed": None}),
    )

    assert request == CreateModelRequest(**MODEL, lora_config=LoraConfig(rank=4))


def test_a_null_inside_a_users_own_data_is_kept():
    request = decode_json(CreateModelRequest, body(**MODEL, user_metadata={"a": None}))

    assert request.user_metadata == {"a": None}


def test_the_key_of_the_input_distinguishes_forward_from_forward_backward():
    work = {"data": [], "loss_fn": "cross_entropy"}

    _, forward = decode_forward_json(body(forward_input=work, model_id="m"))
    _, backward = decode_forward_json(body(forward_backward_input=work, model_id="m"))

    assert (forward, backward) == (True, False)


def test_times_in_requests_are_read_from_text():
    request = decode_json(
        SessionSearchRequest,
        b'{"cursor":{"last_created_at":"2026-01-02T03:04:05Z","last_session_id":"s"}}',
    )

    assert request.cursor.last_created_at.isoformat() == "2026-01-02T03:04:05+00:00"


# -- out -----------------------------------------------------------------------------------------


def test_json_is_compact_utf8_and_leaves_out_what_is_none():
    request = SaveWeightsRequest(model_id="m", user_metadata={"note": "é"})

    assert encode_json(request).decode() == (
        '{"model_id":"m","overwrite":false,"user_metadata":{"note":"é"},"type":"save_weights"}'
    )


def test_a_dict_is_sent_unchanged_because_null_may_have_a_meaning():
    assert encode_json({"ttl_seconds": None}) == b'{"ttl_seconds":null}'
    assert decode_json(SetCheckpointTtlRequest, b'{"ttl_seconds":3600}').ttl_seconds == 3600


def test_messages_inside_dicts_and_lists_are_encoded_too():
    prompt = ModelInput.from_ints([1])

    assert json.loads(encode_json({"a": [prompt, {"b": AdamParams()}], "n": [1, 2]})) == {
        "a": [prompt.model_dump(), {"b": AdamParams().model_dump()}],
        "n": [1, 2],
    }


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_json_does_not_have_is_refused(number):
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode_json({"x": [1.0, number]})
    with pytest.raises(ValueError, match="AdamParams"):
        encode_json(AdamParams(learning_rate=number))


def test_strings_that_spell_nan_or_infinity_may_be_sent():
    assert json.loads(encode_json({"text": "NaN and Infinity"})) == {"text": "NaN and Infinity"}


# -- speed ---------------------------------------------------------------------------------------


def test_a_large_json_body_decodes_at_the_speed_of_parsing_it():
    """Converting 64 x 1024 tokens costs little more than parsing them: no loop over numbers."""
    rng = np.random.default_rng(0)
    data = [
        Datum(
            ModelInput.from_ints(rng.integers(0, 1000, 1024)),
            {"target_tokens": rng.integers(0, 1000, 1024), "weights": rng.random(1024)},
        )
        for _ in range(64)
    ]
    request = ForwardBackwardRequest(ForwardBackwardInput(data, "cross_entropy"), "m", 1)
    raw = encode_json(request)

    def best(work: object) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            work(raw)
            times.append(time.perf_counter() - start)
        return min(times)

    assert decode_forward_json(raw) == (request, False)
    assert best(decode_forward_json) < 8 * best(codec.parse_json)  # measured: 2.4 times


SPAN = {"type": "prompt", "sequence_id": "q", "offset": 0, "length": 1}
TENSOR = {"data": [1], "dtype": "int64"}


def spans(**change: object) -> dict[str, object]:
    return {"model_input_spans": [{**SPAN, **change}], "loss_fn_input_spans": [SPAN]}


@pytest.mark.parametrize(
    ("datum", "config", "field"),
    [
        ({}, {"beta": 10**400}, "beta"),
        (spans(offset=2**63), None, "offset"),
        (spans(offset="a"), None, "offset"),
        (spans(length=-1), None, "length"),
        (spans(sequence_id=5), None, "sequence_id"),
        (
            {"model_input": {"chunks": [{"data": "", "format": "png", "expected_tokens": 2**31}]}},
            None,
            "expected_tokens",
        ),
        (
            {"model_input": {"chunks": [{"data": "", "format": "png", "expected_tokens": -1}]}},
            None,
            "expected_tokens",
        ),
        (
            {
                "loss_fn_inputs": {
                    "weights": {
                        **TENSOR,
                        "shape": [1, 1],
                        "sparse_crow_indices": [[0], [1, 2]],
                        "sparse_col_indices": [0],
                    }
                }
            },
            None,
            "sparse_crow_indices",
        ),
    ],
)
def test_numbers_that_fit_no_field_are_errors_with_a_path(datum, config, field):
    valid = {"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {}}
    work = {"data": [{**valid, **datum}], "loss_fn": "cross_entropy", "loss_fn_config": config}
    with pytest.raises(WireError) as caught:
        decode_forward_json(body(forward_backward_input=work, model_id="m", seq_id=1))
    assert caught.value.errors[0].loc[-1] == field


@pytest.mark.parametrize("key", ["rank", "seed"])
def test_a_rank_or_seed_beyond_64_bits_is_malformed(key):
    lora = {"rank": 8, key: 10**30}
    with pytest.raises(WireError, match=f"lora_config.{key}: .* does not fit in 64 bits"):
        decode_json(CreateModelRequest, body(**MODEL, lora_config=lora))


# -- compression ---------------------------------------------------------------------------------

TEXT = b"tokens " * 1000
ZSTD = zstandard.ZstdCompressor().compress(TEXT)
STREAMED = zstandard.ZstdCompressor().compressobj()
STREAMED = STREAMED.compress(TEXT) + STREAMED.flush()  # a frame without a size field

HALVES = b"".join(zstandard.ZstdCompressor().compress(half) for half in (TEXT[:9], TEXT[9:]))
LONG = zstandard.ZstdCompressor().compress(np.random.default_rng(0).bytes(500_000))


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (TEXT, None),
        (TEXT, ""),
        (TEXT, "identity"),
        (ZSTD, "zstd"),
        (ZSTD, " ZSTD "),
        (STREAMED, "zstd"),
        (HALVES, "zstd"),
        (gzip.compress(TEXT, mtime=0), "gzip"),
        (gzip.compress(TEXT[:7], mtime=0) + gzip.compress(TEXT[7:], mtime=0), "gzip"),
    ],
)
def test_bodies_are_unpacked_up_to_the_limit(packed, encoding):
    assert decompress(packed, encoding, max_bytes=len(TEXT)) == TEXT
    with pytest.raises(TooLarge, match=str(len(TEXT) - 1)):
        decompress(packed, encoding, max_bytes=len(TEXT) - 1)


def test_an_empty_compressed_body_is_empty():
    empty = zstandard.ZstdCompressor().compress(b"")

    assert decompress(empty, "zstd", max_bytes=5) == b""
    assert decompress(gzip.compress(b"", mtime=0), "gzip", max_bytes=5) == b""


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (TEXT, "zstd"),
        (TEXT, "gzip"),
        (ZSTD[:-5], "zstd"),
        (ZSTD + b"tail", "zstd"),
        (LONG[: len(LONG) // 2], "zstd"),  # several blocks were valid
        (b"", "zstd"),
        (STREAMED[:9], "zstd"),
        (gzip.compress(TEXT, mtime=0)[:-9], "gzip"),
        (gzip.compress(TEXT, mtime=0) + b"tail", "gzip"),
        (TEXT, "br"),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_refused(packed, encoding):
    with pytest.raises(WireError):
        decompress(packed, encoding, max_bytes=10**6)


def test_a_decompression_bomb_stops_at_the_limit():
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(200_000_000))

    with pytest.raises(TooLarge):
        decompress(bomb, "zstd", max_bytes=1000)
    with pytest.raises(TooLarge):
        decompress(gzip.compress(bytes(20_000_000), mtime=0), "gzip", max_bytes=1000)
