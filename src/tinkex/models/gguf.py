"""Reads GGUF model files: metadata as plain values, tensors as NumPy arrays on demand.

The file is memory-mapped. Every length in it is checked against the file size, so that a truncated
or damaged file gives an error message and not a segmentation fault.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1, with 32-bit counts, is obsolete

# Metadata value types: code -> struct format. 8 (string) and 9 (array) are read separately.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

# Names for error messages. _DEQUANTIZE has the types that can be read.
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 39: "MXFP4",
}  # fmt: skip

#: Tensor type -> (values per block, bytes per block).
_BLOCKS = {0: (1, 4), 1: (1, 2), 3: (32, 20), 8: (32, 34)}

_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4


class GgufError(ValueError):
    """The file is damaged or truncated, or has a type that this reader does not support."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Position and encoding of one tensor in the file."""

    name: str
    #: In NumPy's order: slowest axis first (the file has the reverse order).
    shape: tuple[int, ...]
    #: Key of `_BLOCKS`.
    type: int
    #: From the start of the file.
    offset: int
    size_bytes: int


class Tensors(Mapping[str, "Array"]):
    """Name -> float32 array. Every lookup dequantizes the tensor again."""

    def __init__(self, data: mmap.mmap, infos: Mapping[str, TensorInfo]) -> None:
        self._data = data
        self._infos = infos

    def __getitem__(self, name: str) -> Array:
        info = self._infos[name]
        values = _DEQUANTIZE[info.type](self._data, info)
        return values.reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def info(self, name: str) -> TensorInfo:
        return self._infos[name]


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    path: Path
    #: Key -> str, number, bool or list of these.
    metadata: dict[str, Any]
    tensors: Tensors

    def need(self, key: str) -> Any:
        """A required metadata value."""
        if key not in self.metadata:
            raise GgufError(f"{self.path}: lacks the metadata {key!r}, which a model needs.")
        return self.metadata[key]


def read_gguf(path: str | Path) -> GgufFile:
    """Reads the metadata and the tensor table. Raises `GgufError` if the file is not complete."""
    path = Path(path)
    if path.stat().st_size < 24:
        raise GgufError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file.")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, data)
    if (magic := cursor.take(4)) != MAGIC:
        raise GgufError(f"{path}: begins with {magic!r}, not {MAGIC!r}: not a GGUF file.")
    if (version := cursor.scalar("I")) not in VERSIONS:
        raise GgufError(f"{path}: GGUF version {version}; supported are {VERSIONS}.")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(value_count)}
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    start = _aligned(cursor.position, metadata.get("general.alignment", 32), path)
    placed = {info.name: _placed(info, start, len(data), path) for info in infos}
    if len(placed) != len(infos):
        raise GgufError(f"{path}: {len(infos) - len(placed)} tensor names appear twice.")
    return GgufFile(path=path, metadata=metadata, tensors=Tensors(data, placed))


class _Cursor:
    """Reads little-endian values sequentially, never beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.position = path, 0
        self._data, self._size = data, len(data)

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self._size:
            raise GgufError(
                f"{self.path}: truncated: byte {end} is needed, but the file has {self._size}. "
                "Download it again."
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # Vocabularies are UTF-8; a damaged byte must not make the other metadata unreadable.
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self._array(depth)
        raise GgufError(
            f"{self.path}: metadata value of unknown type {kind}; the file may be damaged."
        )

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if code := _SCALARS.get(kind):
            width = struct.calcsize("<" + code)
            return list(struct.unpack(f"<{count}{code}", self.take(count * width)))
        return [self.value(kind, depth + 1) for _ in range(count)]


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """One entry of the tensor table. Its offset is relative to the end of the table."""
    name, dimensions = cursor.string(), cursor.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise GgufError(
            f"{cursor.path}: tensor {name!r} has {dimensions} dimensions; it may be damaged."
        )
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in _BLOCKS:
        known = ", ".join(_TENSOR_TYPES[kind] for kind in _BLOCKS)
        raise GgufError(
            f"{cursor.path}: tensor {name!r} has type {_TENSOR_TYPES.get(kind, kind)}; supported "
            f"are {known}. Use a file with these types, or safetensors."
        )
    count = 1
    for length in shape:
        count *= length
    values, width = _BLOCKS[kind]
    row = shape[-1] if shape else 1
    if row % values:
        raise GgufError(
            f"{cursor.path}: tensor {name!r}: rows of {row} values are not whole blocks."
        )
    size = count // values * width
    return TensorInfo(name=name, shape=shape, type=kind, offset=offset, size_bytes=size)


def _aligned(position: int, alignment: object, path: Path) -> int:
    if not isinstance(alignment, int) or alignment <= 0:
        raise GgufError(f"{path}: the alignment is {alignment!r}; it must be a positive integer.")
    return -(-position // alignment) * alignment


def _placed(info: TensorInfo, start: int, size: int, path: Path) -> TensorInfo:
    offset = start + info.offset
    if offset + info.size_bytes > size:
        raise GgufError(
            f"{path}: truncated: tensor {info.name!r} ends at byte {offset + info.size_bytes}, "
            f"but the file has {size}. Download it again."
        )
    return TensorInfo(
        name=info.name, shape=info.shape, type=info.type, offset=offset, size_bytes=info.size_bytes
    )


# Dequantization. B blocks of 32 values: a scale (and a minimum) in half precision, then the values.


def _f32(data: mmap.mmap, info: TensorInfo) -> Array:
    import numpy as np

    count = info.size_bytes // 4
    # Copy, so that the array is writable and does not keep the file mapped.
    return np.frombuffer(data, dtype="<f4", count=count, offset=info.offset).astype(np.float32)


def _f16(data: mmap.mmap, info: TensorInfo) -> Array:
    import numpy as np

    count = info.size_bytes // 2
    return np.frombuffer(data, dtype="<f2", count=count, offset=info.offset).astype(np.float32)


def _q4_1(data: mmap.mmap, info: TensorInfo) -> Array:
    import numpy as np

    block = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", (16,))])
    blocks_B = np.frombuffer(data, block, count=info.size_bytes // 20, offset=info.offset)
    values_B32 = np.empty((len(blocks_B), 32), dtype=np.float32)
    # The low nibbles are values 0 to 15, the high nibbles 16 to 31.
    values_B32[:, :16] = blocks_B["nibbles"] & 0x0F
    values_B32[:, 16:] = blocks_B["nibbles"] >> 4
    values_B32 *= blocks_B["scale"].astype(np.float32)[:, None]
    values_B32 += blocks_B["minimum"].astype(np.float32)[:, None]
    return values_B32.reshape(-1)


def _q8_0(data: mmap.mmap, info: TensorInfo) -> Array:
    import numpy as np

    block = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])
    blocks_B = np.frombuffer(data, block, count=info.size_bytes // 34, offset=info.offset)
    values_B32 = blocks_B["values"].astype(np.float32)
    values_B32 *= blocks_B["scale"].astype(np.float32)[:, None]
    return values_B32.reshape(-1)


_DEQUANTIZE: dict[int, Callable[[mmap.mmap, TensorInfo], Array]] = {
    0: _f32,
    1: _f16,
    3: _q4_1,
    8: _q8_0,
}

# Tensor names: GGUF -> Llama checkpoint.
_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ONE_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hf_name(gguf_name: str) -> str | None:
    """The name of a tensor in a Llama checkpoint; None if there is no such tensor."""
    if gguf_name in _WHOLE_MODEL:
        return _WHOLE_MODEL[gguf_name]
    match gguf_name.split(".", 2):
        case ["blk", layer, part] if layer.isdecimal() and part in _ONE_LAYER:
            return f"model.layers.{layer}.{_ONE_LAYER[part]}"
    return None


def unpermuted(rows: Array, heads: int) -> Array:
    """
    Reorders the rows of a q or k projection as in a Llama checkpoint.

    llama.cpp rotates adjacent pairs, the checkpoint rotates the two halves of a head. The converter
    interleaved the halves; this separates them again.
    """
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def hf_tensors(gguf: GgufFile) -> Iterator[tuple[str, Array]]:
    """The tensors with the names and row order of a Llama checkpoint, one at a time."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(
            f"{gguf.path}: architecture {architecture!r}; only 'llama' can be read from GGUF. "
            "Use a folder with safetensors for other models."
        )
    heads = int(gguf.need("llama.attention.head_count"))
    kv_heads = int(gguf.metadata.get("llama.attention.head_count_kv", heads))
    for name in gguf.tensors:
        if name == "rope_freqs.weight":  # derived from the config
            continue
        if (new_name := hf_name(name)) is None:
            raise GgufError(f"{gguf.path}: tensor {name!r} does not belong to a Llama model.")
        array = gguf.tensors[name]
        if name.endswith("attn_q.weight"):
            array = unpermuted(array, heads)
        elif name.endswith("attn_k.weight"):
            array = unpermuted(array, kv_heads)
        yield new_name, array
