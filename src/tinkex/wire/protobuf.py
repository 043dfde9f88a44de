"""
Protobuf encoding and decoding of passes and samples.

Decoders do not trust their input: lengths, offsets, shapes and dtypes are checked before anything
is built from them, an invalid field is a `WireError` with its path, and no small body causes a
large allocation. Decoded arrays are views into the body; nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from tinkex.wire import protobuf_datums
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.inputs import (
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
)
from tinkex.wire.limits import (
    MAX_CHUNKS,
    MAX_DATUMS,
    MAX_NAME_CHARS,
    MAX_SPANS,
    MAX_TENSORS,
    check_count,
    check_protobuf,
    check_text,
)
from tinkex.wire.prompt_chunks import Chunk, DmelChunk, EncodedTextChunk, ImageChunk
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.sampling import PromptAltTokens, SampledSequence, SampleResponse, TopkLogprobs
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LossFnOutput,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from google.protobuf.message import Message

__all__ = [
    "count_sample_tokens",
    "decode_forward_backward_output",
    "decode_forward_backward_request",
    "decode_sample_response",
    "encode_forward_backward_output",
    "encode_forward_backward_request",
    "encode_sample_response",
    "read_pass_metrics",
]

#: A record without tensors may still claim any number of examples; at most this many are accepted.
#: A batch of the official client has at most 1024.
MAX_EMPTY_DATUMS: Final = 2**16

MessageT = TypeVar("MessageT", bound="Message")

#: Path in the message, for errors.
Loc = tuple[str | int, ...]


# -- requests ------------------------------------------------------------------------------------


def encode_forward_backward_request(
    request: ForwardBackwardRequest, *, forward_only: bool = False
) -> bytes:
    """Encode a pass. Equal requests give equal bytes."""
    work = request.forward_backward_input
    # In the order of the field numbers: `data` goes between these two messages.
    before = pb.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id or 0)
    after = pb.ForwardBackwardRequest(loss_fn=work.loss_fn, forward_only=forward_only)
    for name, value in (work.loss_fn_config or {}).items():
        if isinstance(value, str):
            after.loss_fn_config_v2[name].text = value
        else:
            after.loss_fn_config[name] = value
            after.loss_fn_config_v2[name].number = value
    parts: list[Any] = [_bytes(before)]
    for position, datum in enumerate(work.data):
        parts += protobuf_datums.encode_datum(datum) or _encode_other_datum(datum, position)
    parts.append(_bytes(after))
    return b"".join(parts)


def _encode_other_datum(datum: Datum, position: int) -> Sequence[Any]:
    message = pb.Datum()
    _write_datum(message, datum, position)
    return protobuf_datums.as_request_entry(_bytes(message))


def decode_forward_backward_request(body: bytes) -> tuple[ForwardBackwardRequest, bool]:
    """Decode a pass, and whether it is forward only."""
    check_protobuf(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    message = _parse(pb.ForwardBackwardRequest, body)
    if not message.model_id:
        raise WireError.at(("model_id",), "Field required", "missing")
    if message.seq_id < 0:
        raise WireError.at(("seq_id",), f"must be 1 or greater, not {message.seq_id}.")
    if not message.loss_fn:
        raise WireError.at(("loss_fn",), "Field required", "missing")
    check_count(("data",), len(message.data), MAX_DATUMS, "examples")
    data = [_read_datum(datum, ("data", i)) for i, datum in enumerate(message.data)]
    work = ForwardBackwardInput._of(data, message.loss_fn, _read_loss_config(message))
    work.check_sizes()
    request = ForwardBackwardRequest(work, message.model_id, message.seq_id or None)
    return request, message.forward_only


def _read_loss_config(message: pb.ForwardBackwardRequest) -> Mapping[str, float | str] | None:
    settings = max(len(message.loss_fn_config), len(message.loss_fn_config_v2))
    check_count(("loss_fn_config",), settings, MAX_TENSORS, "settings")
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config) or None
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise WireError.at(
                ("loss_fn_config", name), "expected a number or a string.", "missing"
            )
        config[name] = value.text if kind == "text" else value.number
    return config


def _write_datum(message: pb.Datum, datum: Datum, position: int) -> None:
    for chunk in datum.model_input.chunks:
        _write_chunk(message.model_input.add(), chunk, position)
    for name, tensor in datum.loss_fn_inputs.items():
        _write_tensor(message.loss_fn_inputs[name], tensor)
    _write_spans(message.model_input_spans, datum.model_input_spans)
    _write_spans(message.loss_fn_input_spans, datum.loss_fn_input_spans)


def _read_datum(message: pb.Datum, loc: Loc) -> Datum:
    check_count((*loc, "model_input"), len(message.model_input), MAX_CHUNKS, "chunks")
    check_count((*loc, "loss_fn_inputs"), len(message.loss_fn_inputs), MAX_TENSORS, "tensors")
    for name in message.loss_fn_inputs:
        check_text((*loc, "loss_fn_inputs", name), name, MAX_NAME_CHARS)
    chunks = [
        _read_chunk(chunk, (*loc, "model_input", i)) for i, chunk in enumerate(message.model_input)
    ]
    tensors = {
        name: _read_tensor(tensor, (*loc, "loss_fn_inputs", name))
        for name, tensor in message.loss_fn_inputs.items()
    }
    spans = _read_spans(message.model_input_spans, (*loc, "model_input_spans"))
    target_spans = _read_spans(message.loss_fn_input_spans, (*loc, "loss_fn_input_spans"))
    with _under(loc):
        return Datum(ModelInput(chunks), tensors, spans, target_spans)


def _write_chunk(message: pb.Chunk, chunk: Chunk, position: int) -> None:
    if isinstance(chunk, EncodedTextChunk):
        message.encoded_text.tokens = chunk.tokens_np.astype("<i4", copy=False).tobytes()
    elif isinstance(chunk, ImageChunk):
        message.image.data = chunk.data
        message.image.format = chunk.format
        if chunk.expected_tokens is not None:
            message.image.expected_tokens = chunk.expected_tokens
    elif isinstance(chunk, DmelChunk):
        message.dmel.dmel = chunk.dmel
    else:
        raise UserFailure(
            f"data[{position}]: an image_asset_pointer cannot be used in a training pass. "
            "Send the image itself as an ImageChunk."
        )


def _read_chunk(message: pb.Chunk, loc: Loc) -> Chunk:
    kind = message.WhichOneof("chunk")
    if kind == "encoded_text":
        tokens = _array(message.encoded_text.tokens, "<i4", (*loc, "tokens"))
        return EncodedTextChunk._of(tokens)
    if kind == "image":
        image = message.image
        if image.format not in ("png", "jpeg"):
            raise WireError.at((*loc, "format"), f"must be png or jpeg, not {image.format!r}.")
        if image.HasField("override_dimensions"):
            raise WireError.at(
                (*loc, "override_dimensions"),
                "is not supported; no client of this protocol sends it. Scale the image itself.",
                "unsupported",
            )
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        if expected is not None and expected < 0:
            raise WireError.at((*loc, "expected_tokens"), f"must be 0 or greater, not {expected}.")
        return ImageChunk(data=image.data, format=image.format, expected_tokens=expected)
    if kind == "dmel":
        return DmelChunk(dmel=message.dmel.dmel)
    raise WireError.at(loc, "a chunk must have encoded_text, image or dmel.", "missing")


def _write_spans(message: Any, spans: ProvenanceSpans | None) -> None:
    for span in spans or ():
        added = message.add()
        kind = (
            added.prompt_tokens if isinstance(span, PromptProvenanceSpan) else added.sampled_tokens
        )
        kind.sequence_id, kind.offset, kind.length = span.sequence_id, span.offset, span.length
        kind.SetInParent()


def _read_spans(message: Sequence[pb.ProvenanceSpan], loc: Loc) -> ProvenanceSpans | None:
    check_count(loc, len(message), MAX_SPANS, "spans")
    spans: ProvenanceSpans = []
    for position, item in enumerate(message):
        kind = item.WhichOneof("span")
        if kind is None:
            raise WireError.at(
                (*loc, position), "a span must have prompt_tokens or sampled_tokens."
            )
        span = item.prompt_tokens if kind == "prompt_tokens" else item.sampled_tokens
        if span.offset < 0 or span.length < 0:
            raise WireError.at((*loc, position), "offset and length must be 0 or greater.")
        check_text((*loc, position, "sequence_id"), span.sequence_id, MAX_NAME_CHARS)
        span_type = PromptProvenanceSpan if kind == "prompt_tokens" else SampledProvenanceSpan
        spans.append(
            span_type(sequence_id=span.sequence_id, offset=span.offset, length=span.length)
        )
    return spans or None


# -- results of passes ---------------------------------------------------------------------------


def encode_forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Encode a result; adjacent examples of the same layout share one record."""
    message = pb.ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics
    )
    for run in output.runs():
        record = message.loss_fn_outputs.add(
            type_tag=output.loss_fn_output_type, num_datums=len(run)
        )
        for name in run[0]:
            _write_batched(record.fields[name], [datum[name] for datum in run])
    return _bytes(message)


def decode_forward_backward_output(body: bytes) -> ForwardBackwardOutput:
    message = _parse(pb.ForwardBackwardOutput, body)
    outputs: list[LossFnOutput] = []
    empty = 0
    for position, record in enumerate(message.loss_fn_outputs):
        loc = ("loss_fn_outputs", position)
        empty += 0 if record.fields else record.num_datums
        if empty > MAX_EMPTY_DATUMS:
            raise WireError.at(
                (*loc, "num_datums"),
                f"{empty} examples without tensors; at most {MAX_EMPTY_DATUMS} are allowed.",
            )
        outputs += _read_record(record, loc)
    # The hosted service prefixes the name with a module.
    output_type = message.loss_fn_output_type.rpartition(":")[2]
    if not output_type and not outputs:
        output_type = "ArrayRecord"
    return ForwardBackwardOutput(output_type, outputs, dict(message.metrics))


def read_pass_metrics(body: bytes) -> tuple[Mapping[str, float], int]:
    """The metrics of an encoded result and its number of examples, without building arrays."""
    message = _parse(pb.ForwardBackwardOutput, body)
    return message.metrics, sum(record.num_datums for record in message.loss_fn_outputs)


def _write_batched(message: pb.BatchedTensor, tensors: Sequence[TensorData]) -> None:
    import numpy as np

    parts = [_raw(t.to_numpy() if t.is_sparse else t.values_np) for t in tensors]
    offsets = np.zeros(len(parts) + 1, dtype="<i8")
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    message.data = b"".join(parts)
    message.offsets = offsets.tobytes()
    message.dtype = _pb_dtype(tensors[0])
    message.trailing_shape.extend((tensors[0].shape or [0])[1:])


def _read_record(record: pb.ArrayRecord, loc: Loc) -> list[LossFnOutput]:
    if record.num_datums < 0:
        raise WireError.at((*loc, "num_datums"), f"must be 0 or greater, not {record.num_datums}.")
    columns = {
        name: _read_batched(batched, (*loc, "fields", name))
        for name, batched in record.fields.items()
    }
    count = record.num_datums
    if not count and columns:
        count = len(next(iter(columns.values())))
    for name, column in columns.items():
        if len(column) != count:
            raise WireError.at(
                (*loc, "fields", name),
                f"has {len(column)} examples, but the record declares {count}.",
            )
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _read_batched(message: pb.BatchedTensor, loc: Loc) -> list[TensorData]:
    offsets = _array(message.offsets, "<i8", (*loc, "offsets")).tolist()
    if not offsets or offsets[0] != 0 or offsets[-1] != len(message.data):
        raise WireError.at((*loc, "offsets"), f"must run from 0 to {len(message.data)}.")
    if any(size < 0 for size in message.trailing_shape) or len(message.trailing_shape) > 15:
        raise WireError.at((*loc, "trailing_shape"), "must have at most 15 sizes of 0 or greater.")
    trailing = list(message.trailing_shape)
    width = math.prod(trailing)
    stored, _ = _dtype(message.dtype, loc)
    row_bytes = width * stored.itemsize
    for start, end in pairwise(offsets):
        if end < start or (end - start) % (row_bytes or 1) or (end > start and not row_bytes):
            raise WireError.at(
                (*loc, "offsets"),
                f"{start} to {end} is not a whole number of rows of {row_bytes} bytes.",
            )
    values = _widened(message.data, message.dtype, loc)
    per_value = stored.itemsize
    tensors = []
    for start, end in pairwise(offsets):
        part = values[start // per_value : end // per_value]
        rows = part.size // width if width else 0
        with _under(loc):
            tensors.append(TensorData._of(part, [rows, *trailing]))
    return tensors


# -- samples -------------------------------------------------------------------------------------


def encode_sample_response(response: SampleResponse) -> bytes:
    """Encode a sample without its sequence ids: they are in the response to its submission."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP
            if sequence.stop_reason == "stop"
            else pb.STOP_REASON_LENGTH
        )
        if sequence.tokens_np is not None:
            added.tokens = sequence.tokens_np.astype("<i4", copy=False).tobytes()
        if sequence.logprobs_np is not None:
            added.logprobs = sequence.logprobs_np.astype("<f4", copy=False).tobytes()
        if sequence.topk_logprobs_np is not None:
            _write_topk(added.topk_sampled_logprobs, sequence.topk_logprobs_np)
    if response.prompt_logprobs_np is not None:
        message.prompt_logprobs = response.prompt_logprobs_np.astype("<f4", copy=False).tobytes()
    if response.topk_prompt_logprobs_np is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs_np)
    if response.target_prompt_logprobs is not None:
        _write_tensor(message.target_prompt_logprobs, response.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, response.prompt_alt_tokens.tokens)
        _write_tensor(message.prompt_alt_tokens.logprobs, response.prompt_alt_tokens.logprobs)
    return _bytes(message)


def count_sample_tokens(body: bytes) -> tuple[int, int]:
    """Cached prompt tokens and sampled tokens of an encoded sample, without building arrays."""
    message = _parse(pb.SampleResponse, body)
    # A token has 4 bytes.
    sampled = sum(len(sequence.tokens) for sequence in message.sequences) // 4
    return message.prompt_cache_hit_tokens, sampled


def decode_sample_response(
    body: bytes, sequence_ids: Sequence[str] | None = None
) -> SampleResponse:
    """Decode a sample; `sequence_ids` are from the response to its submission."""
    message = _parse(pb.SampleResponse, body)
    if sequence_ids is not None and len(sequence_ids) != len(message.sequences):
        raise WireError.at(
            ("sequences",),
            f"has {len(message.sequences)} sequences, but {len(sequence_ids)} sequence ids.",
        )
    ids = sequence_ids or [""] * len(message.sequences)
    sequences = [
        _read_sequence(sequence, name, ("sequences", i))
        for i, (sequence, name) in enumerate(zip(message.sequences, ids, strict=True))
    ]
    logprobs = _array(message.prompt_logprobs, "<f4", ("prompt_logprobs",))
    if message.prompt_cache_hit_tokens < 0:
        raise WireError.at(("prompt_cache_hit_tokens",), "must be 0 or greater.")
    target, alt = None, None
    if message.HasField("target_prompt_logprobs"):
        target = _read_tensor(message.target_prompt_logprobs, ("target_prompt_logprobs",))
    if message.HasField("prompt_alt_tokens"):
        alt = PromptAltTokens(
            _read_tensor(message.prompt_alt_tokens.tokens, ("prompt_alt_tokens", "tokens")),
            _read_tensor(message.prompt_alt_tokens.logprobs, ("prompt_alt_tokens", "logprobs")),
        )
    return SampleResponse(
        sequences,
        logprobs if logprobs.size else None,
        _read_topk(message.topk_prompt_logprobs, ("topk_prompt_logprobs",)),
        target,
        message.prompt_cache_hit_tokens,
        alt,
    )


def _read_sequence(message: pb.SampledSequence, sequence_id: str, loc: Loc) -> SampledSequence:
    if message.stop_reason not in (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH):
        raise WireError.at(
            (*loc, "stop_reason"), f"{message.stop_reason} is not a known stop reason.", "enum"
        )
    logprobs = _array(message.logprobs, "<f4", (*loc, "logprobs"))
    return SampledSequence(
        "stop" if message.stop_reason == pb.STOP_REASON_STOP else "length",
        sequence_id,
        _array(message.tokens, "<i4", (*loc, "tokens")),
        logprobs if logprobs.size else None,
        _read_topk(message.topk_sampled_logprobs, (*loc, "topk_sampled_logprobs")),
    )


def _write_topk(message: pb.TopkLogprobs, topk: TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = topk.token_ids.astype("<i4", copy=False).tobytes()
    message.logprobs = topk.logprobs.astype("<f4", copy=False).tobytes()


def _read_topk(message: pb.TopkLogprobs, loc: Loc) -> TopkLogprobs | None:
    if not message.k or not message.length:
        return None
    shape = (message.length, message.k)
    ids = _array(message.token_ids, "<i4", (*loc, "token_ids"))
    logprobs = _array(message.logprobs, "<f4", (*loc, "logprobs"))
    for name, array in (("token_ids", ids), ("logprobs", logprobs)):
        if array.size != math.prod(shape):
            raise WireError.at(
                (*loc, name), f"has {array.size} values for a table of shape {shape}."
            )
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))


# -- tensors -------------------------------------------------------------------------------------


def _write_tensor(message: pb.Tensor, tensor: TensorData) -> None:
    if tensor._crow is not None and tensor._col is not None:
        message.sparse_csr.values = _raw(tensor.values_np)
        message.sparse_csr.crow_indices = _raw(tensor._crow)
        message.sparse_csr.col_indices = _raw(tensor._col)
    else:
        message.dense = _raw(tensor.values_np)
    message.dtype = _pb_dtype(tensor)
    message.shape.extend(tensor.shape or ())


def _read_tensor(message: pb.Tensor, loc: Loc) -> TensorData:
    kind = message.WhichOneof("encoding")
    # Without a shape the tensor is flat: protobuf cannot distinguish this from a scalar.
    shape = list(message.shape) or None
    if kind == "dense":
        values = _widened(message.dense, message.dtype, (*loc, "dense"))
        with _under(loc):
            return TensorData._of(values, shape)
    if kind == "sparse_csr":
        csr = message.sparse_csr
        inner = (*loc, "sparse_csr")
        values = _widened(csr.values, message.dtype, (*inner, "values"))
        crow = _array(csr.crow_indices, "<i8", (*inner, "crow_indices"))
        col = _array(csr.col_indices, "<i8", (*inner, "col_indices"))
        with _under(loc):
            return TensorData._of(values, shape, crow, col)
    raise WireError.at(loc, "a tensor must be dense or sparse_csr.", "missing")


def _raw(array: npt.NDArray[Any]) -> bytes:
    """Little-endian bytes in row-major order."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _pb_dtype(tensor: TensorData) -> pb.DType.ValueType:
    return pb.DTYPE_INT64 if tensor.dtype == "int64" else pb.DTYPE_FLOAT32


def _dtype(number: int, loc: Loc) -> tuple[Any, Callable[[Any], Any]]:
    """The stored dtype, and a function that converts it to int64 or float32."""
    import numpy as np

    def from_bfloat16(raw: Any) -> Any:
        # A bfloat16 is the upper half of a float32.
        return (raw.astype(np.uint32) << 16).view(np.float32)

    table: dict[int, tuple[str, Callable[[Any], Any]]] = {
        pb.DTYPE_FLOAT32: ("<f4", lambda raw: raw.astype(np.float32, copy=False)),
        pb.DTYPE_INT64: ("<i8", lambda raw: raw.astype(np.int64, copy=False)),
        pb.DTYPE_INT32: ("<i4", lambda raw: raw.astype(np.int64)),
        pb.DTYPE_BFLOAT16: ("<u2", from_bfloat16),
    }
    if number not in table:
        raise WireError.at((*loc, "dtype"), f"{number} is not a known dtype.", "enum")
    name, widen = table[number]
    return np.dtype(name), widen


def _widened(raw: bytes, dtype: int, loc: Loc) -> npt.NDArray[Any]:
    stored, widen = _dtype(dtype, loc)
    array: npt.NDArray[Any] = widen(_array(raw, stored, loc))
    return array


def _array(raw: bytes, dtype: Any, loc: Loc) -> npt.NDArray[Any]:
    """A read-only array over the bytes."""
    import numpy as np

    stored = np.dtype(dtype)
    if len(raw) % stored.itemsize:
        raise WireError.at(
            loc, f"{len(raw)} bytes are not a whole number of {stored.itemsize}-byte values."
        )
    return np.frombuffer(raw, dtype=stored)


# -- messages ------------------------------------------------------------------------------------


def _parse(message_type: type[MessageT], body: bytes) -> MessageT:
    message = message_type()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise WireError(f"not a valid {message_type.__name__}: {error}.") from None
    return message


def _bytes(message: Message) -> bytes:
    try:
        # Deterministic map order, so that a repeated request has the same bytes.
        return message.SerializeToString(deterministic=True)
    except EncodeError as error:
        raise ValueError(f"this {type(message).__name__} cannot be encoded: {error}.") from None


@contextmanager
def _under(loc: Loc) -> Iterator[None]:
    """Prepend `loc` to the path of errors raised inside."""
    try:
        yield
    except WireError as error:
        raise error.under(*loc) from None
