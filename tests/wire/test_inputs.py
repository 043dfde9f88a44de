"""T11, T12: prompts, chunks and training examples."""

import base64
from collections import UserDict

import numpy as np
import pytest
from pydantic import ValidationError

from tinkex.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    TensorData,
)
from tinkex.wire.errors import WireError

PROMPT = ModelInput.from_ints([1, 2, 3])


# -- prompts -------------------------------------------------------------------------------------


def test_a_prompt_is_built_by_appending_and_the_old_one_stays():
    longer = PROMPT.append_int(4).append(EncodedTextChunk(tokens=[5, 6]))

    assert longer.to_ints() == [1, 2, 3, 4, 5, 6]
    assert [chunk.length for chunk in longer.chunks] == [4, 2]
    assert longer.length == 6
    assert PROMPT.to_ints() == [1, 2, 3]
    assert ModelInput.empty().to_ints() == []


def test_a_token_joins_the_text_before_it_and_starts_one_after_an_image():
    picture = ImageChunk(data=b"x", format="png", expected_tokens=5)
    prompt = ModelInput.empty().append_int(1).append_int(2).append(picture).append_int(3)

    assert [chunk.type for chunk in prompt.chunks] == ["encoded_text", "image", "encoded_text"]
    assert prompt.chunks[0].tokens == [1, 2]
    for wrong in (2**31, 1.5, "3"):
        with pytest.raises(ValueError):  # noqa: PT011 (the words are those of any prompt)
            prompt.append_int(wrong)


class Words:
    """A minimal tokenizer: each word is the number it spells."""

    def encode(self, text, *, add_special_tokens):
        return [0] * add_special_tokens + [int(word) for word in text.split()]


class Wrapped(Words):
    def encode(self, text, *, add_special_tokens):
        class Encoding:
            ids = Words.encode(self, text, add_special_tokens=add_special_tokens)

        return Encoding()


@pytest.mark.parametrize("tokenizer", [Words(), Wrapped()])
def test_a_prompt_is_made_from_text_by_any_encoder(tokenizer):
    assert ModelInput.from_text("5 6 7", tokenizer).to_ints() == [0, 5, 6, 7]
    bare = ModelInput.from_text("5 6", tokenizer, add_special_tokens=False)
    assert bare.to_ints() == [5, 6]


def test_tokens_are_copied_and_read_only():
    source = np.array([1, 2, 3], dtype=np.int32)
    prompt = ModelInput.from_ints(source)

    source[:] = 9

    assert prompt.tokens_np.dtype == np.int32
    assert prompt.tokens_np.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens_np[0] = 9


@pytest.mark.parametrize("tokens", [[True], [1, True], [1, False, 2]])
def test_a_json_boolean_is_not_a_token(tokens):
    with pytest.raises(WireError, match="not token ids"):
        EncodedTextChunk._read({"type": "encoded_text", "tokens": tokens})


@pytest.mark.parametrize(
    "tokens", [["a"], [1.5], [[1, 2]], [2**31], [-(2**31) - 1], [None], [True]]
)
def test_invalid_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match="token"):
        ModelInput.from_ints(tokens)


def test_a_prompt_with_an_image_has_no_token_list_and_says_which_chunk():
    picture = ImageChunk(data=b"x", format="png", expected_tokens=7)
    prompt = PROMPT.append(picture)

    assert prompt.length == 10
    with pytest.raises(ValueError, match=r"chunks\[1\] has type 'image'"):
        prompt.to_ints()
    with pytest.raises(ValueError, match="expected_tokens"):
        _ = PROMPT.append(ImageChunk(data=b"x", format="png")).length


# -- T12: images and audio ------------------------------------------------------------------------


def test_an_image_is_bytes_in_python_and_base64_on_the_wire():
    chunk = ImageChunk(data=b"\xff\x00", format="jpeg", expected_tokens=3)

    assert chunk.data == b"\xff\x00"
    assert chunk.model_dump() == {
        "data": "/wA=",
        "format": "jpeg",
        "expected_tokens": 3,
        "type": "image",
    }
    assert ImageChunk(data="/wA=", format="jpeg").data == b"\xff\x00"


def test_an_asset_pointer_names_its_location():
    chunk = ImageAssetPointerChunk(format="png", location="s3://bucket/a.png", expected_tokens=2)

    assert chunk.length == 2
    assert chunk.model_dump()["location"] == "s3://bucket/a.png"


@pytest.mark.parametrize(
    ("chunk", "wrong", "near"),
    [
        (ImageChunk, {"image_data": b"x"}, "data"),
        (ImageChunk, {"expected_token": 3}, "expected_tokens"),
        (ImageAssetPointerChunk, {"asset_location": "a"}, "location"),
    ],
)
def test_other_spellings_are_refused(chunk, wrong, near):
    with pytest.raises(ValidationError, match=f"unknown field.*`{near}`|{near}"):
        chunk(format="png", **wrong)


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_other_kinds_of_chunks_are_refused_by_name(kind):
    with pytest.raises(
        WireError, match=rf"must be one of .* image_asset_pointer, dmel, not '{kind}'"
    ):
        ModelInput.model_validate({"chunks": [{"type": kind, "data": "AA==", "format": "mp4"}]})


def test_only_the_two_formats_exist():
    with pytest.raises(ValidationError, match="png"):
        ImageChunk(data=b"x", format="gif")


def test_text_that_is_not_base64_is_refused():
    with pytest.raises(ValidationError, match="base64"):
        ImageChunk(data="no!", format="png")


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (bytes([0, 2, 5, 80]), 5),  # dtype 0, two dimensions, 5 x 80
        (bytes([254, 7, 1, 0x80, 0x01]), 128),  # constant, dtype 7, one dimension of LEB128 128
    ],
)
def test_the_length_of_audio_is_in_its_header(header, length):
    assert DmelChunk(dmel=header + b"payload").length == length
    assert DmelChunk(dmel=base64.b64encode(header).decode()).length == length


@pytest.mark.parametrize("header", [b"", b"\xfe", b"\x08", b"\x00", b"\x00\x00", b"\x00\x01\x80"])
def test_a_broken_header_is_a_value_error(header):
    with pytest.raises(ValueError, match="dmel"):
        _ = DmelChunk(dmel=header).length


# -- T11: examples -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "dtype"),
    [
        ("target_tokens", "int64"),
        ("weights", "float32"),
        ("advantages", "float32"),
        ("logprobs", "float32"),
        ("clip_low_threshold", "float32"),
        ("clip_high_threshold", "float32"),
        ("sequence_ratio_mask", "float32"),
        ("something_new", "int64"),  # by its values
    ],
)
def test_lists_get_their_dtype_from_the_key(key, dtype):
    made = Datum(model_input=PROMPT, loss_fn_inputs={key: [1, 0, 1]})

    tensor = made.loss_fn_inputs[key]
    assert isinstance(tensor, TensorData)
    assert tensor.dtype == dtype
    assert tensor.shape == [3]
    assert tensor.data == [1, 0, 1]


def test_every_kind_of_value_gives_the_same_tensor():
    torch = pytest.importorskip("torch")
    rows = [[1.0, 2.0], [3.0, 4.0]]
    kinds = [
        rows,
        ((1.0, 2.0), (3.0, 4.0)),
        np.array(rows),
        np.array(rows, dtype=np.float32),
        torch.tensor(rows),
        TensorData(data=[1.0, 2.0, 3.0, 4.0], dtype="float32", shape=[2, 2]),
    ]

    made = [Datum(PROMPT, {"advantages": kind}).loss_fn_inputs["advantages"] for kind in kinds]

    assert all(tensor == made[0] for tensor in made)
    assert made[0].shape == [2, 2]


@pytest.mark.parametrize("key", ["weights", "advantages", "logprobs"])
def test_a_mask_written_as_a_list_is_ones_and_zeros_as_upstream(key):
    prompt = ModelInput.from_ints([1, 2])
    for mask, shape in (([True, False], [2]), ((True, False), [2]), ([[True], [False]], [2, 1])):
        tensor = Datum(prompt, {key: mask}).loss_fn_inputs[key]
        assert (tensor.dtype, tensor.shape, tensor.data) == ("float32", shape, [1.0, 0.0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_tokens", [True, False]),  # a boolean is not a token
        ("mask", [True, False]),
        ("weights", np.array([True, False])),  # also rejected upstream
        ("weights", ["yes"]),
    ],
)
def test_other_bools_and_texts_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"^{key}: "):
        Datum(ModelInput.from_ints([1, 2]), {key: value})


def test_the_mapping_of_a_tokenizer_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"\['input_ids'\]"):
        ModelInput.from_ints({"input_ids": [1, 2], "attention_mask": [1, 1]})
    with pytest.raises(ValueError, match=r"\['input_ids'\]"):
        ModelInput.from_ints(UserDict({"input_ids": [1, 2]}))


def test_prompts_have_the_methods_of_the_models_that_they_are_upstream():
    prompt = ModelInput.from_ints([1, 2])
    assert prompt.dict() == prompt.model_dump()
    assert prompt.json() == prompt.model_dump_json()
    assert prompt.copy() == prompt.model_copy() == ModelInput.model_construct(chunks=prompt.chunks)
    assert prompt.model_fields_set == {"chunks"}
    assert prompt.model_extra is None
    schema = EncodedTextChunk.model_json_schema()
    assert schema["title"] == "EncodedTextChunk"
    assert schema["required"] == ["tokens"]
    assert schema["properties"]["tokens"]["items"] == {"type": "integer"}
    assert schema["additionalProperties"] is False
    assert ModelInput.model_json_schema()["required"] == ["chunks"]


def test_ragged_lists_are_refused_by_name():
    with pytest.raises(ValueError, match="weights: the nested lists have different lengths"):
        Datum(PROMPT, {"weights": [[1.0], [1.0, 2.0]]})


@pytest.mark.parametrize("value", ["abc", 3, None, {"data": [1]}])
def test_invalid_tensors_are_refused_by_name(value):
    with pytest.raises(TypeError, match="weights"):
        Datum(PROMPT, {"weights": value})


def test_lists_are_sent_as_tensors():
    made = Datum(PROMPT, {"target_tokens": [1, 2, 3]})

    assert made.model_dump()["loss_fn_inputs"]["target_tokens"] == {
        "data": [1, 2, 3],
        "dtype": "int64",
        "shape": [3],
        "sparse_crow_indices": None,
        "sparse_col_indices": None,
    }


# -- provenance ----------------------------------------------------------------------------------

SPANS = [
    PromptProvenanceSpan(sequence_id="q", length=1),
    SampledProvenanceSpan(sequence_id="q", offset=4, length=2),
]


def test_provenance_covers_the_tokens_exactly():
    plain = Datum(PROMPT, {"target_tokens": [2, 3, 4]})

    made = plain.with_provenance(model_input=SPANS, loss_fn_inputs=SPANS)

    assert made.model_input_spans == SPANS
    assert plain.model_input_spans is None
    with pytest.raises(ValueError, match=r"model_input.* covers 1 tokens, but there are 3"):
        plain.with_provenance(model_input=SPANS[:1], loss_fn_inputs=SPANS)
    with pytest.raises(ValueError, match=r"target_tokens.* covers 1 tokens"):
        plain.with_provenance(model_input=SPANS, loss_fn_inputs=SPANS[:1])


def test_provenance_is_given_for_both_or_neither():
    with pytest.raises(ValueError, match="both"):
        Datum(PROMPT, {}, model_input_spans=SPANS)


def test_examples_with_provenance_survive_json():
    made = Datum(PROMPT, {"target_tokens": [2, 3, 4]}).with_provenance(SPANS, SPANS)

    assert Datum.model_validate(made.model_dump()) == made
