"""Reading GGUF files, including damaged ones."""

import numpy as np
import pytest

from tinkex.models.gguf import GgufError, hf_tensors, read_gguf, unpermuted

F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8


def test_metadata_of_every_kind_comes_back(write_gguf, tmp_path):
    metadata = {
        "a.word": "naïve 日本",
        "a.number": 7,
        "a.fraction": 0.5,
        "a.flag": True,
        "words": ["one", "two"],
        "numbers": [1, 2, 3],
        "nested": [["a"], ["b", "c"]],
        "none": [],
    }
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, {}))
    assert gguf.metadata == metadata
    assert len(gguf.tensors) == 0


@pytest.mark.parametrize("alignment", [32, 64])
def test_plain_tensors_come_back_in_numpy_order(write_gguf, tmp_path, alignment):
    table = np.arange(6, dtype="<f4").reshape(2, 3)
    tensors = {
        "single": ((2, 3), F32, table.tobytes()),
        "half": ((2, 3), F16, table.astype("<f2").tobytes()),
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, {"general.alignment": alignment}, tensors, alignment=alignment)
    gguf = read_gguf(path)
    assert list(gguf.tensors) == ["single", "half"]
    for array in gguf.tensors.values():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, table)


def test_q8_0_is_scale_times_value(write_gguf, tmp_path):
    values = np.arange(-16, 16, dtype=np.int8)
    block = np.float16(0.25).tobytes() + values.tobytes()
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": ((2, 32), Q8_0, block * 2)}))
    np.testing.assert_array_equal(gguf.tensors["w"], np.stack([values * 0.25] * 2))


def test_q4_1_has_low_halves_first_and_adds_a_minimum(write_gguf, tmp_path):
    low, high = np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)[::-1]
    block = np.float16(0.5).tobytes() + np.float16(-3.0).tobytes() + (low | high << 4).tobytes()
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"w": ((32,), Q4_1, block)}))
    np.testing.assert_array_equal(gguf.tensors["w"], np.concatenate([low, high]) * 0.5 - 3.0)


def test_an_unsupported_tensor_type_error_lists_the_supported_ones(write_gguf, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {}, {"w": ((32,), Q4_0, b"\0" * 18)})
    with pytest.raises(GgufError, match=r"'w' has type Q4_0.*F32, F16, Q4_1, Q8_0"):
        read_gguf(path)


def test_a_file_truncated_anywhere_is_refused(small_llama, tmp_path):
    whole = small_llama.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 23, *range(24, len(whole), 997), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"truncated|too few"):
            read_gguf(cut)


def test_a_file_of_another_kind_or_version_is_refused(tmp_path):
    other = tmp_path / "m.gguf"
    other.write_bytes(b"PK\x03\x04" + b"\0" * 40)
    with pytest.raises(GgufError, match="not a GGUF file"):
        read_gguf(other)
    other.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + b"\0" * 40)
    with pytest.raises(GgufError, match="version 9"):
        read_gguf(other)


def test_absurd_counts_raise_an_error_without_allocating(tmp_path):
    path = tmp_path / "m.gguf"
    huge = (2**60).to_bytes(8, "little")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + huge + huge)
    with pytest.raises(GgufError, match="truncated"):
        read_gguf(path)


def test_unpermuting_reverses_the_converter():
    heads, head_dim, columns = 3, 8, 5
    rows = np.random.default_rng(0).standard_normal((heads * head_dim, columns))
    # as in llama.cpp's converter
    converted = rows.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(rows.shape)
    np.testing.assert_array_equal(unpermuted(converted, heads), rows)


def test_tensors_appear_under_the_names_of_a_checkpoint(small_llama):
    tensors = dict(hf_tensors(read_gguf(small_llama)))
    assert tensors["model.embed_tokens.weight"].shape[1] == 32
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert tensors["model.layers.0.post_attention_layernorm.weight"].shape == (32,)
    assert len(tensors) == 11


@pytest.mark.parametrize(
    ("metadata", "tensor", "message"),
    [
        ({"general.architecture": "qwen2"}, "output.weight", "only 'llama'"),
        ({"general.architecture": "llama"}, "output.weight", "head_count"),
        (
            {"general.architecture": "llama", "llama.attention.head_count": 1},
            "blk.0.attn_q_norm.weight",
            "does not belong to a Llama model",
        ),
    ],
)
def test_what_is_not_a_llama_model_is_refused(write_gguf, tmp_path, metadata, tensor, message):
    path = write_gguf(tmp_path / "m.gguf", metadata, {tensor: ((1,), F32, b"\0" * 4)})
    with pytest.raises(GgufError, match=message):
        list(hf_tensors(read_gguf(path)))
