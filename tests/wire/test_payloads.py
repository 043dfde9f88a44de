"""T17: the types backed by NumPy support the interface of pydantic models."""

import copy
import json
import pickle

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tinkex.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)

TENSOR = TensorData(data=[1.5, float("nan"), -2.0, 0.0], dtype="float32", shape=[2, 2])
SPARSE = TensorData(
    data=[1, 2],
    dtype="int64",
    shape=[2, 3],
    sparse_crow_indices=[0, 1, 2],
    sparse_col_indices=[2, 0],
)
FINITE = TensorData(data=[1.5, -2.0], dtype="float32")
PROMPT = ModelInput(chunks=[EncodedTextChunk(tokens=[1, 2]), ImageChunk(data=b"x", format="png")])
DATUM = Datum(PROMPT, {"target_tokens": SPARSE, "weights": FINITE})
WORK = ForwardBackwardInput([DATUM], "ppo", {"clip_low_threshold": 0.8})
TOPK = TopkLogprobs.from_rows([None, [(1, -0.5), (2, -1.0)]])
SEQUENCE = SampledSequence("stop", "q", [1, 2], [-0.5, -1.0], TOPK)
EVERYTHING = [
    TENSOR,
    SPARSE,
    EncodedTextChunk(tokens=[1, 2]),
    PROMPT,
    DATUM,
    WORK,
    ForwardBackwardRequest(WORK, "m", 3),
    ForwardBackwardOutput("ArrayRecord", [{"logprobs": FINITE}], {"loss:sum": 1.0}),
    TOPK,
    SEQUENCE,
    PromptAltTokens(SPARSE, FINITE),
    SampleResponse(
        [SEQUENCE], [float("nan"), -1.0], TOPK, FINITE, 2, PromptAltTokens(SPARSE, TENSOR)
    ),
]
each = pytest.mark.parametrize("value", EVERYTHING, ids=lambda value: type(value).__name__)


@each
def test_a_dump_is_plain_and_validates_to_an_equal_object(value):
    dumped = value.model_dump()

    text = json.dumps(dumped)  # plain all the way down
    assert type(value).model_validate(json.loads(text)) == value
    assert type(value).model_validate(value) is value


@each
def test_json_text_goes_both_ways(value):
    assert type(value).model_validate_json(value.model_dump_json()) == value


@each
def test_pickles_and_copies_are_equal_and_still_read_only(value):
    for made in (
        pickle.loads(pickle.dumps(value)),
        copy.copy(value),
        copy.deepcopy(value),
        value.model_copy(),
        value.model_copy(deep=True),
    ):
        assert made == value
        assert hash(made) == hash(value)


def test_unpickled_arrays_cannot_be_written_to():
    again = pickle.loads(pickle.dumps(SEQUENCE))

    with pytest.raises(ValueError, match="read-only"):
        again.tokens_np[0] = 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TENSOR, TENSOR.model_copy(update={"shape": [4]})),
        (FINITE, TensorData(data=[1, -2], dtype="int64")),
        (SPARSE, SPARSE.model_copy(update={"sparse_col_indices": [2, 1]})),
        (PROMPT, PROMPT.append_int(1)),
        (DATUM, Datum(PROMPT, {"weights": FINITE})),
        (SEQUENCE, SEQUENCE.model_copy(update={"tokens_np": [1, 3]})),
        (SEQUENCE, SEQUENCE.model_copy(update={"logprobs_np": None})),
    ],
)
def test_a_difference_anywhere_shows(one, other):
    assert one != other
    assert one != "something else"


def test_a_flat_tensor_equals_itself_with_its_shape_written_out():
    assert FINITE.model_copy(update={"shape": [2]}) == FINITE


def test_a_copy_may_replace_fields_and_is_checked():
    renamed = SEQUENCE.model_copy(update={"sequence_id": "other"})

    assert (renamed.sequence_id, renamed.tokens) == ("other", [1, 2])
    with pytest.raises(ValueError, match="elements"):
        TENSOR.model_copy(update={"shape": [5]})


def test_they_are_fields_of_a_users_own_model():
    class Record(BaseModel):
        model_config = ConfigDict(frozen=True)

        prompt: ModelInput
        data: list[Datum] = []
        weights: TensorData | None = None
        sample: SampledSequence
        chunk: ModelInputChunk
        either: ModelInput | Datum | None = None

    record = Record(
        prompt=PROMPT,
        data=[DATUM, DATUM.model_dump()],
        sample=SEQUENCE,
        chunk={"tokens": [1]},
        either=DATUM,
    )

    assert record.prompt is PROMPT
    assert record.data[1] == DATUM
    assert record.chunk == EncodedTextChunk(tokens=[1])
    assert Record.model_validate(record.model_dump()) == record
    assert Record.model_validate_json(record.model_dump_json()) == record
    weights = record.model_dump(exclude_none=True)["data"][0]["loss_fn_inputs"]["weights"]
    assert weights == {"data": [1.5, -2.0], "dtype": "float32"}
    with pytest.raises(ValidationError, match=r"prompt"):
        Record(prompt=[1, 2], sample=SEQUENCE, chunk={"tokens": [1]})


def test_they_have_a_json_schema():
    assert TypeAdapter(list[Datum]).json_schema()["items"] == {"title": "Datum", "type": "object"}


@pytest.mark.parametrize(
    ("made", "wrong", "near"),
    [
        (lambda: Datum(model_inputs=PROMPT), "model_inputs", "model_input"),
        (lambda: TensorData(data=[1], dtpye="int64"), "dtpye", "dtype"),
        (lambda: ForwardBackwardInput([], "ppo", loss_config={}), "loss_config", "loss_fn_config"),
        (lambda: ModelInput(chunk=[]), "chunk", "chunks"),
    ],
)
def test_t16_a_misspelt_keyword_names_the_nearest_field(made, wrong, near):
    with pytest.raises(TypeError, match=f"`{wrong}`; did you mean `{near}`"):
        made()


@each
def test_nothing_can_be_set_or_added(value):
    with pytest.raises(AttributeError):
        value.anything = 1
    assert not hasattr(value, "__dict__")


def test_a_tensor_with_the_wrong_inside_says_where():
    bad = {"model_input": {"chunks": []}, "loss_fn_inputs": {"weights": {"data": ["x"]}}}

    with pytest.raises(ValueError, match=r"loss_fn_inputs\.weights\.dtype"):
        Datum.model_validate(bad)


def test_arrays_given_to_a_response_are_not_followed():
    logprobs = np.array([-1.0, -2.0], dtype=np.float32)
    response = SampleResponse([], logprobs)

    logprobs[:] = 0

    assert response.prompt_logprobs == [-1.0, -2.0]
