"""Mutations of request bodies: of any bytes, and of valid protobuf messages."""

import random
import struct

from tinkex.wire.proto import tinkex_wire_pb2 as pb


def mutate_bytes(body: bytes, draw: random.Random) -> bytes:
    """Changes, deletes, repeats or inserts a few bytes."""
    changed = bytearray(body)
    for _ in range(draw.choice([1, 1, 1, 2, 4, 16])):
        position = draw.randrange(len(changed) + 1)
        length = draw.choice([1, 1, 2, 4, 8, 64])
        match draw.randrange(5):
            case 0:
                changed[position : position + length] = draw.randbytes(
                    len(changed[position : position + length])
                )
            case 1:
                del changed[position : position + length]
            case 2:
                changed[position:position] = changed[position : position + length]
            case 3:
                changed[position:position] = draw.randbytes(length)
            case _:
                changed[position : position + 1] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF])])
        if not changed:
            break
    return bytes(changed)


def with_odd_values(message: pb.ForwardBackwardRequest, draw: random.Random) -> bytes:
    """A valid message with odd names, shapes, types, tokens or numbers."""
    for datum in draw.sample(list(message.data), k=min(2, len(message.data))):
        inputs = datum.loss_fn_inputs
        name = draw.choice(sorted(inputs) or ["weights"])
        tensor = inputs[name]
        match draw.randrange(9):
            case 0:
                del inputs[name]
            case 1:
                inputs[draw.choice(["weights", "logprobs", "unknown-input"])].CopyFrom(tensor)
            case 2:
                tensor.dtype = draw.choice([0, 1, 2, 3, 4])
            case 3:
                tensor.shape[:] = draw.choice([[], [0], [-1], [2**62, 4], [1, 1, 1], [3, -5]])
            case 4:
                tensor.dense = tensor.dense[: draw.randrange(len(tensor.dense) + 1)]
            case 5:
                odd = draw.choice([float("nan"), float("inf"), 1e38, -1e38, 1e-45])
                tensor.dense = struct.pack("<f", odd) * (len(tensor.dense) // 4)
            case 6:
                tokens = [draw.choice([-1, 0, 2**31 - 1, -(2**31), 5]) for _ in range(5)]
                datum.model_input.add().encoded_text.tokens = struct.pack("<5i", *tokens)
            case 7:
                del datum.model_input[:]
            case _:
                csr = tensor.sparse_csr
                csr.values, csr.crow_indices = draw.randbytes(8), draw.randbytes(16)
                csr.col_indices = draw.randbytes(16)
    if draw.random() < 0.3:
        message.loss_fn = draw.choice(["ppo", "cispo", "dro", "gspo", "custom", "", "x" * 3000])
    if draw.random() < 0.3:
        key = draw.choice(["clip_low_threshold", "beta", "loss_id", ""])
        message.loss_fn_config[key] = draw.choice([float("nan"), -1.0, 1e308, 0.0])
    return message.SerializeToString()
