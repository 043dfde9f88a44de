"""Protobuf: byte layouts, rejected messages, and thousands of broken bodies."""

import random
import tracemalloc

import numpy as np
import pytest

from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptAltTokens,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)

SPARSE = TensorData(
    data=[1.0, -2.0],
    dtype="float32",
    shape=[2, 8],
    sparse_crow_indices=[0, 1, 2],
    sparse_col_indices=[7, 0],
)
REQUEST = ForwardBackwardRequest(
    ForwardBackwardInput(
        [
            Datum(
                ModelInput.from_ints([1, 2]).append(ImageChunk(data=b"png", format="png")),
                {"target_tokens": [2, 3], "weights": [1.0, -0.5]},
            ),
            Datum(
                ModelInput.from_ints([3]),
                {"weights": SPARSE},
                [PromptProvenanceSpan(sequence_id="q", length=1)],
                [SampledProvenanceSpan(sequence_id="q", offset=3, length=1)],
            ),
        ],
        "ppo",
        {"clip_low_threshold": 0.75, "loss_id": "abc"},
    ),
    "s:train:0",
    7,
)
OUTPUT = ForwardBackwardOutput(
    "ArrayRecord",
    [
        {"logprobs": TensorData(data=[-1.0, -2.0], dtype="float32", shape=[2])},
        {"logprobs": TensorData(data=[-3.0], dtype="float32", shape=[1])},
    ],
    {"loss:sum": 1.5},
)
RESPONSE = SampleResponse(
    [
        SampledSequence(
            "stop", "a", [5, 6], [-0.5, -1.0], TopkLogprobs.from_rows([[(1, -0.5)]] * 2)
        ),
        SampledSequence("length", "b", [7]),
    ],
    [float("nan"), -1.0],
    TopkLogprobs.from_rows([None, [(1, -0.5), (2, -1.0)]]),
    SPARSE,
    3,
    PromptAltTokens(TensorData(data=[1, 2], dtype="int64", shape=[2, 1]), SPARSE),
)


def little(values, dtype):
    return np.array(values, dtype=dtype).tobytes()


# -- layouts -------------------------------------------------------------------------------------


def test_a_request_uses_the_documented_fields():
    message = pb.ForwardBackwardRequest.FromString(encode_forward_backward_request(REQUEST))

    assert (message.model_id, message.seq_id, message.loss_fn) == ("s:train:0", 7, "ppo")
    assert message.data[0].model_input[0].encoded_text.tokens == little([1, 2], "<i4")
    targets = message.data[0].loss_fn_inputs["target_tokens"]
    assert (targets.dense, targets.dtype, list(targets.shape)) == (
        little([2, 3], "<i8"),
        pb.DTYPE_INT64,
        [2],
    )
    csr = message.data[1].loss_fn_inputs["weights"].sparse_csr
    assert csr.values == little([1.0, -2.0], "<f4")
    assert csr.crow_indices == little([0, 1, 2], "<i8")
    assert csr.col_indices == little([7, 0], "<i8")
    # Numbers are in both maps, strings only in the newer one.
    assert dict(message.loss_fn_config) == {"clip_low_threshold": 0.75}
    assert message.loss_fn_config_v2["clip_low_threshold"].number == 0.75
    assert message.loss_fn_config_v2["loss_id"].text == "abc"
    assert not message.forward_only


def test_forward_only_is_encoded_and_equal_requests_have_equal_bytes():
    forward = encode_forward_backward_request(REQUEST, forward_only=True)

    assert decode_forward_backward_request(forward) == (REQUEST, True)
    again, _ = decode_forward_backward_request(encode_forward_backward_request(REQUEST))
    assert encode_forward_backward_request(again) == encode_forward_backward_request(REQUEST)


def test_the_newer_config_map_wins_and_the_older_one_is_enough():
    message = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo", loss_fn_config={"beta": 1.0})
    assert _config(message) == {"beta": 1.0}

    message.loss_fn_config_v2["beta"].number = 2.0
    message.loss_fn_config_v2["name"].text = "x"
    assert _config(message) == {"beta": 2.0, "name": "x"}


def _config(message):
    request, _ = decode_forward_backward_request(message.SerializeToString())
    return request.forward_backward_input.loss_fn_config


def test_a_step_number_of_zero_is_none_given():
    body = pb.ForwardBackwardRequest(model_id="m", loss_fn="ppo").SerializeToString()

    request, _ = decode_forward_backward_request(body)

    assert request.seq_id is None
    assert request.forward_backward_input.loss_fn_config is None


def test_results_are_concatenated_with_byte_offsets():
    message = pb.ForwardBackwardOutput.FromString(encode_forward_backward_output(OUTPUT))

    (record,) = message.loss_fn_outputs
    assert record.num_datums == 2
    assert record.fields["logprobs"].data == little([-1, -2, -3], "<f4")
    assert record.fields["logprobs"].offsets == little([0, 8, 12], "<i8")
    assert list(record.fields["logprobs"].trailing_shape) == []


def test_results_that_do_not_fit_together_get_records_of_their_own():
    outputs = [
        {"logprobs": TensorData(data=[1.0] * 6, dtype="float32", shape=[3, 2])},
        {"logprobs": TensorData(data=[1.0] * 2, dtype="float32", shape=[1, 2])},
        {"logprobs": TensorData(data=[1.0] * 3, dtype="float32", shape=[1, 3])},
        {"logprobs": TensorData(data=[1, 2, 3], dtype="int64", shape=[1, 3])},
        {},
        {},
    ]
    body = encode_forward_backward_output(ForwardBackwardOutput("ArrayRecord", outputs))

    assert len(pb.ForwardBackwardOutput.FromString(body).loss_fn_outputs) == 4
    assert decode_forward_backward_output(body).loss_fn_outputs == outputs


def test_narrow_results_are_widened_by_their_bits():
    message = pb.ForwardBackwardOutput(loss_fn_output_type="module:TorchLossReturn")
    record = message.loss_fn_outputs.add(num_datums=1)
    for name, dtype, raw in [
        ("half", pb.DTYPE_BFLOAT16, little([0x3F80, 0xC000], "<u2")),  # 1.0, -2.0
        ("int", pb.DTYPE_INT32, little([-5, 6], "<i4")),
    ]:
        field = record.fields[name]
        field.dtype, field.data = dtype, raw
        field.offsets = little([0, len(raw)], "<i8")

    output = decode_forward_backward_output(message.SerializeToString())

    assert output.loss_fn_output_type == "TorchLossReturn"
    assert output.loss_fn_outputs[0]["half"].data == [1.0, -2.0]
    assert output.loss_fn_outputs[0]["int"].data == [-5, 6]
    assert output.loss_fn_outputs[0]["int"].dtype == "int64"


def test_a_record_without_tensors_stands_for_its_examples():
    message = pb.ForwardBackwardOutput()
    message.loss_fn_outputs.add(num_datums=3)

    assert decode_forward_backward_output(message.SerializeToString()).loss_fn_outputs == [{}] * 3
    assert decode_forward_backward_output(b"").loss_fn_output_type == "ArrayRecord"


def test_a_sample_uses_the_documented_fields():
    message = pb.SampleResponse.FromString(encode_sample_response(RESPONSE))

    assert message.sequences[0].tokens == little([5, 6], "<i4")
    assert message.sequences[0].logprobs == little([-0.5, -1.0], "<f4")
    assert [s.stop_reason for s in message.sequences] == [
        pb.STOP_REASON_STOP,
        pb.STOP_REASON_LENGTH,
    ]
    assert np.isnan(np.frombuffer(message.prompt_logprobs, "<f4")).tolist() == [True, False]
    topk = message.topk_prompt_logprobs
    assert (topk.length, topk.k) == (2, 2)
    assert topk.token_ids == little([[0, 0], [1, 2]], "<i4")
    assert topk.logprobs == little([[-99999, -99999], [-0.5, -1.0]], "<f4")
    assert decode_sample_response(encode_sample_response(RESPONSE), ["a", "b"]) == RESPONSE


def test_sequence_ids_come_from_the_submission():
    body = encode_sample_response(RESPONSE)

    assert [s.sequence_id for s in decode_sample_response(body).sequences] == ["", ""]
    with pytest.raises(WireError, match="has 2 sequences, but 3 sequence ids"):
        decode_sample_response(body, ["a", "b", "c"])


def test_an_asset_pointer_is_not_allowed_in_a_pass():
    pointer = ImageAssetPointerChunk(location="a", format="png", expected_tokens=1)
    request = ForwardBackwardRequest(
        ForwardBackwardInput([Datum(ModelInput(chunks=[pointer]))], "cross_entropy"), "m", 1
    )

    with pytest.raises(UserFailure, match=r"data\[0\].*ImageChunk"):
        encode_forward_backward_request(request)


def test_decoded_arrays_are_read_only_views():
    request, _ = decode_forward_backward_request(encode_forward_backward_request(REQUEST))
    tensor = request.forward_backward_input.data[0].loss_fn_inputs["weights"]

    assert not tensor.values_np.flags.owndata
    assert not tensor.values_np.flags.writeable


# -- what is refused -----------------------------------------------------------------------------


def request_with(change):
    message = pb.ForwardBackwardRequest.FromString(encode_forward_backward_request(REQUEST))
    change(message)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.ClearField("model_id"), "model_id"),
        (lambda m: setattr(m, "seq_id", -1), "seq_id"),
        (lambda m: m.ClearField("loss_fn"), "loss_fn"),
        (lambda m: m.loss_fn_config_v2["empty"].SetInParent(), "loss_fn_config.empty"),
        (lambda m: m.data[0].model_input.add(), "data[0].model_input[2]"),
        (
            lambda m: setattr(m.data[0].model_input[0].encoded_text, "tokens", b"123"),
            "data[0].model_input[0].tokens",
        ),
        (
            lambda m: setattr(m.data[0].model_input[1].image, "format", "gif"),
            "data[0].model_input[1].format",
        ),
        (
            lambda m: setattr(m.data[0].model_input[1].image, "expected_tokens", -1),
            "data[0].model_input[1].expected_tokens",
        ),
        (
            lambda m: setattr(m.data[0].model_input[1].image.override_dimensions, "width", 8),
            "data[0].model_input[1].override_dimensions",
        ),
        (lambda m: m.data[1].ClearField("model_input_spans"), "data[1].model_input_spans"),
        (lambda m: m.data[1].model_input_spans.add(), "data[1].model_input_spans[1]"),
        (
            lambda m: setattr(m.data[1].loss_fn_input_spans[0].sampled_tokens, "offset", -1),
            "data[1].loss_fn_input_spans[0]",
        ),
    ],
)
def test_a_bad_request_is_refused_with_its_path(change, path):
    with pytest.raises(WireError) as refused:
        decode_forward_backward_request(request_with(change))
    assert str(refused.value).startswith(path + ": ")


@pytest.mark.parametrize(
    ("tensor", "path"),
    [
        (pb.Tensor(dtype=pb.DTYPE_INT64), ""),
        (pb.Tensor(dense=b"1234567", dtype=pb.DTYPE_INT64), ".dense"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_UNSPECIFIED), ".dense.dtype"),
        (pb.Tensor(dense=b"", dtype=9), ".dense.dtype"),
        (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[2]), ".shape"),
        (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[-1, -1]), ".shape"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_INT64, shape=[2**62, 2**62]), ".shape"),
        (pb.Tensor(dense=b"", dtype=pb.DTYPE_INT64, shape=[2**62, 0]), ".shape"),
        (pb.Tensor(dense=bytes(8), dtype=pb.DTYPE_INT64, shape=[1] * 17), ".shape"),
        (
            pb.Tensor(sparse_csr=pb.SparseCsr(crow_indices=b"1"), dtype=pb.DTYPE_INT64),
            ".sparse_csr.crow_indices",
        ),
        (
            pb.Tensor(
                sparse_csr=pb.SparseCsr(crow_indices=little([0, 0], "<i8")),
                dtype=pb.DTYPE_INT64,
                shape=[1, 2**50],
            ),
            ".shape",
        ),
        (
            pb.Tensor(
                sparse_csr=pb.SparseCsr(
                    values=little([1], "<i8"),
                    crow_indices=little([0, 1], "<i8"),
                    col_indices=little([5], "<i8"),
                ),
                dtype=pb.DTYPE_INT64,
                shape=[1, 5],
            ),
            ".sparse_col_indices",
        ),
    ],
)
def test_a_bad_tensor_is_refused_with_its_path(tensor, path):
    body = request_with(lambda m: m.data[0].loss_fn_inputs["weights"].CopyFrom(tensor))

    with pytest.raises(WireError) as refused:
        decode_forward_backward_request(body)
    assert str(refused.value).startswith(f"data[0].loss_fn_inputs.weights{path}: ")


@pytest.mark.parametrize(
    ("fields", "count", "path"),
    [
        ({"offsets": b"123"}, 1, "fields.x.offsets"),
        ({"offsets": b""}, 1, "fields.x.offsets"),
        ({"offsets": little([4, 8], "<i8")}, 1, "fields.x.offsets"),
        ({"offsets": little([0, 12], "<i8")}, 1, "fields.x.offsets"),
        ({"offsets": little([0, 16, 4, 8], "<i8")}, 3, "fields.x.offsets"),
        ({"offsets": little([0, 2, 8], "<i8")}, 2, "fields.x.offsets"),
        ({"trailing_shape": [-2]}, 1, "fields.x.trailing_shape"),
        ({"trailing_shape": [3]}, 1, "fields.x.offsets"),
        ({"trailing_shape": [0]}, 1, "fields.x.offsets"),
        ({"trailing_shape": [2**40, 2**40]}, 1, "fields.x.offsets"),
        ({"trailing_shape": [1] * 16}, 1, "fields.x.trailing_shape"),
        ({"dtype": 77}, 1, "fields.x.dtype"),
        ({}, 2, "fields.x"),
        ({}, -1, "num_datums"),
    ],
)
def test_a_bad_result_is_refused_with_its_path(fields, count, path):
    valid = {"data": bytes(8), "offsets": little([0, 8], "<i8"), "dtype": pb.DTYPE_FLOAT32}
    record = pb.ArrayRecord(num_datums=count, fields={"x": pb.BatchedTensor(**{**valid, **fields})})
    body = pb.ForwardBackwardOutput(loss_fn_outputs=[record]).SerializeToString()

    with pytest.raises(WireError) as refused:
        decode_forward_backward_output(body)
    assert str(refused.value).startswith(f"loss_fn_outputs[0].{path}: ")


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (pb.SampleResponse(prompt_logprobs=b"123"), "prompt_logprobs"),
        (pb.SampleResponse(prompt_cache_hit_tokens=-1), "prompt_cache_hit_tokens"),
        (
            pb.SampleResponse(sequences=[pb.SampledSequence(stop_reason=5)]),
            "sequences[0].stop_reason",
        ),
        (pb.SampleResponse(sequences=[pb.SampledSequence(tokens=b"1")]), "sequences[0].tokens"),
        (
            pb.SampleResponse(topk_prompt_logprobs=pb.TopkLogprobs(k=2**31, length=2**31)),
            "topk_prompt_logprobs.token_ids",
        ),
        (
            pb.SampleResponse(
                topk_prompt_logprobs=pb.TopkLogprobs(k=1, length=1, token_ids=b"1234")
            ),
            "topk_prompt_logprobs.logprobs",
        ),
        (pb.SampleResponse(prompt_alt_tokens=pb.PromptAltTokens()), "prompt_alt_tokens.tokens"),
        (pb.SampleResponse(target_prompt_logprobs=pb.Tensor()), "target_prompt_logprobs"),
    ],
)
def test_a_bad_sample_is_refused_with_its_path(message, path):
    with pytest.raises(WireError) as refused:
        decode_sample_response(message.SerializeToString())
    assert str(refused.value).startswith(path + ": ")


@pytest.mark.parametrize(
    "body",
    [
        pb.ForwardBackwardOutput(
            loss_fn_outputs=[pb.ArrayRecord(num_datums=2**62)]
        ).SerializeToString(),
        pb.ForwardBackwardOutput(
            loss_fn_outputs=[pb.ArrayRecord(num_datums=2**16)] * 50
        ).SerializeToString(),
    ],
    ids=["one", "many"],
)
def test_a_small_body_makes_no_large_allocation(body):
    tracemalloc.start()
    with pytest.raises(WireError, match="examples"):
        decode_forward_backward_output(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 20 * 2**20


# -- fuzz ----------------------------------------------------------------------------------------

DECODERS = [
    (decode_forward_backward_request, encode_forward_backward_request(REQUEST)),
    (decode_forward_backward_output, encode_forward_backward_output(OUTPUT)),
    (decode_sample_response, encode_sample_response(RESPONSE)),
]


def mutated(body: bytes, rng: random.Random) -> bytes:
    made = bytearray(body)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(made)) if made else 0
        match rng.randrange(6):
            case 0 if made:
                made[at] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del made[at:]
            case 3:
                del made[at : at + rng.randrange(1, 9)]
            case 4:
                made[at:at] = rng.randbytes(rng.randrange(1, 12))
            case 5:
                piece = made[at : at + rng.randrange(1, 40)]
                made[at:at] = piece
    return bytes(made)


@pytest.mark.parametrize(("decode", "body"), DECODERS, ids=["request", "output", "sample"])
def test_thousands_of_broken_bodies_raise_nothing_but_a_wire_error(decode, body):
    rng = random.Random(20260101)
    refused = 0
    for _ in range(3000):
        try:
            decode(mutated(body, rng))
        except WireError:
            refused += 1

    assert 500 < refused < 3000  # both outcomes occurred


def test_bytes_that_were_never_a_message_are_refused():
    with pytest.raises(WireError, match="ForwardBackwardRequest"):
        decode_forward_backward_request(b'{"json": true}')


def test_our_descriptors_coexist_with_the_official_ones():
    assert pb.DESCRIPTOR.package == "tinkex_wire"
    assert pb.DESCRIPTOR.name == "tinkex/wire/proto/tinkex_wire.proto"
