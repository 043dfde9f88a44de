"""A GGUF writer for the tests."""

import struct

import numpy as np
import pytest

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
BLOCK_BYTES = {F32: 4, F16: 2}


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    """Type code and bytes of a metadata value."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case list():
            items = [_value(item) for item in value]
            kind = items[0][0] if items else 4
            body = b"".join(data for _, data in items)
            return 9, struct.pack("<IQ", kind, len(items)) + body
    raise TypeError(value)


@pytest.fixture(scope="session")
def write_gguf():
    """write_gguf(path, metadata, tensors): tensors are name -> (shape, type code, packed bytes)."""

    def write(path, metadata, tensors, *, alignment=32):
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
        for key, value in metadata.items():
            kind, data = _value(value)
            head += _string(key) + struct.pack("<I", kind) + data
        body = b""
        for name, (shape, kind, data) in tensors.items():
            body += b"\0" * (-len(body) % alignment)
            head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
            head += struct.pack("<IQ", kind, len(body))
            body += data
        head += b"\0" * (-len(head) % alignment)
        path.write_bytes(head + body)
        return path

    return write


@pytest.fixture
def small_llama(write_gguf, tmp_path):
    """A complete Llama GGUF file of a few kilobytes, with tokenizer and chat template."""
    alphabet = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "he", "ll", "hell", "hello"]
    hidden, heads, kv_heads, mlp = 32, 4, 2, 64
    random = np.random.default_rng(0)

    def f32(*shape):
        return shape, F32, random.standard_normal(shape).astype("<f4").tobytes()

    tensors = {"token_embd.weight": f32(len(tokens), hidden), "output_norm.weight": f32(hidden)}
    for name, shape in {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (hidden // heads * kv_heads, hidden),
        "attn_v": (hidden // heads * kv_heads, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }.items():
        tensors[f"blk.0.{name}.weight"] = f32(*shape)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": mlp,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": (
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    }
    return write_gguf(tmp_path / "small.gguf", metadata, tensors)
