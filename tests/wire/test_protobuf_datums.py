"""The fast encoding of training data writes the same bytes as the generated code."""

import numpy as np
import pytest

from tinkex.wire import protobuf
from tinkex.wire.inputs import Datum, ModelInput, PromptProvenanceSpan
from tinkex.wire.prompt_chunks import EncodedTextChunk, ImageChunk
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.protobuf_datums import encode_datum
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

PLAIN = {
    "one token": Datum(ModelInput.from_ints([7]), {"weights": [1.0]}),
    "no tokens": Datum(ModelInput([EncodedTextChunk(tokens=[])]), {}),
    "no chunks": Datum(ModelInput.empty(), {"target_tokens": [1, 2]}),
    "several chunks": Datum(
        ModelInput([EncodedTextChunk(tokens=[1, 2]), EncodedTextChunk(tokens=[3])]),
        {"weights": [0.5] * 3, "advantages": [1.0] * 3, "target_tokens": [2, 3, 4]},
    ),
    "long": Datum(ModelInput.from_ints(range(70_000)), {"weights": [1.0] * 70_000}),
    "no values": Datum(
        ModelInput.from_ints([1]), {"weights": TensorData(data=[], dtype="float32", shape=[0])}
    ),
    "no shape": Datum(
        ModelInput.from_ints([1]), {"weights": TensorData(data=[1.0, 2.0], dtype="float32")}
    ),
    "a table whose columns lie together": Datum(
        ModelInput.from_ints([1, 2]),
        {"target_tokens": TensorData.from_numpy(np.arange(6).reshape(3, 2).T)},
    ),
    "a name with accents": Datum(ModelInput.from_ints([1]), {"poids é": [1.0]}),
}
OTHER = {
    "a picture": Datum(ModelInput([ImageChunk(data=b"png", format="png")]), {}),
    "spans": Datum(
        ModelInput.from_ints([1]),
        {},
        [PromptProvenanceSpan(sequence_id="s", offset=0, length=1)],
        [PromptProvenanceSpan(sequence_id="s", offset=1, length=1)],
    ),
    "sparse": Datum(
        ModelInput.from_ints([1]),
        {
            "target_tokens": TensorData(
                data=[5],
                dtype="int64",
                shape=[1, 4],
                sparse_crow_indices=[0, 1],
                sparse_col_indices=[2],
            )
        },
    ),
}


def generated(data: list[Datum]) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=3, loss_fn="ppo", forward_only=True)
    message.loss_fn_config["clip"] = message.loss_fn_config_v2["clip"].number = 0.2
    for position, datum in enumerate(data):
        protobuf._write_datum(message.data.add(), datum, position)
    return message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", [*PLAIN, *OTHER])
def test_the_bytes_are_those_of_the_generated_code(name: str) -> None:
    data = [(PLAIN | OTHER)[name], PLAIN["one token"]]
    work = ForwardBackwardInput(data, "ppo", {"clip": 0.2})
    request = ForwardBackwardRequest(work, "m", 3)
    body = protobuf.encode_forward_backward_request(request, forward_only=True)
    assert body == generated(data)


def test_text_and_dense_tensors_need_no_message_and_the_rest_does() -> None:
    assert all(encode_datum(datum) is not None for datum in PLAIN.values())
    assert all(encode_datum(datum) is None for datum in OTHER.values())
