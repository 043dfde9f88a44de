"""
`TensorData`, the tensor type of the protocol: int64 or float32, dense or CSR.

Values are copied in and immutable. NumPy is imported with the first tensor, not with this module;
torch only by methods with `torch` in their name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from tinkex.extras import needs
from tinkex.wire.base import Payload, json_kind
from tinkex.wire.dtype_casts import TensorCastWarning, TensorDtype, cast, torch_to_numpy, warn_once
from tinkex.wire.errors import WireError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = ["TensorCastWarning", "TensorData", "TensorDtype"]

#: A CSR tensor of a few bytes may claim any shape. Larger ones (512 MiB as int64) are rejected, so
#: that converting to dense is always safe.
MAX_DENSE_CELLS: Final = 2**26


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class TensorData(Payload):
    """
    An immutable tensor.

        TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
        TensorData.from_numpy(np.zeros((2, 2)))

    `data` may be a (nested) list or an array; it is copied. A sparse tensor has both index lists,
    and `data` holds the stored values of a 2-D tensor of `shape`, row by row.
    """

    #: Dtype in memory and on the wire.
    dtype: TensorDtype
    #: Dense shape. None: one-dimensional.
    shape: list[int] | None = None
    #: CSR: offset of each row in `data`, rows + 1 numbers. None for a dense tensor.
    sparse_crow_indices: list[int] | None = None
    #: CSR: the column of each value in `data`.
    sparse_col_indices: list[int] | None = None

    #: The values, flat and read-only.
    _values: npt.NDArray[Any] = field(default=None, repr=False)  # type: ignore[arg-type]
    _crow: npt.NDArray[np.int64] | None = field(default=None, repr=False)
    _col: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    def __init__(
        self,
        data: Sequence[Any] | npt.NDArray[Any] | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | npt.NDArray[Any] | None = None,
        sparse_col_indices: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> None:
        if dtype is None or data is None:
            raise TypeError("TensorData needs `data` and `dtype` ('int64' or 'float32').")
        values, change = cast(data, dtype, key="TensorData")
        if change:
            warn_once("TensorData", change)
        if shape is None and values.ndim != 1:
            shape = values.shape
        _fill(self, values.reshape(-1), dtype, shape, sparse_crow_indices, sparse_col_indices)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Index lists are made on first access: the engine uses the arrays.
            if name == "sparse_crow_indices" and self._crow is not None:
                value = self._crow.tolist()
            elif name == "sparse_col_indices" and self._col is not None:
                value = self._col.tolist()
            elif name in ("sparse_crow_indices", "sparse_col_indices"):
                value = None
            else:
                raise AttributeError(f"TensorData has no attribute {name!r}")
            object.__setattr__(self, name, value)
            return value

    # -- constructors ----------------------------------------------------------------------------

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> TensorData:
        """Floats of any width become float32, signed integers int64; other dtypes are an error."""
        return tensor_from(array, key="TensorData")

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        """From any device, with or without gradients; bfloat16 becomes float32."""
        return cls.from_numpy(torch_to_numpy(tensor, key="TensorData"))

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: float = 0) -> TensorData:
        """
        A 2-D tensor as CSR if that is smaller, else dense. Values equal to `pad_value` are not
        stored; the reader must pass the same `pad_value`.
        """
        return _compact(torch_to_numpy(tensor, key="TensorData"), pad_value, key="TensorData")

    @classmethod
    def _of(
        cls,
        values: npt.NDArray[Any],
        shape: Sequence[int] | None,
        crow: npt.NDArray[Any] | None = None,
        col: npt.NDArray[Any] | None = None,
    ) -> Self:
        """From int64 or float32 arrays that the caller no longer writes to; not copied."""
        self = cls.__new__(cls)
        dtype: TensorDtype = "int64" if values.dtype.kind == "i" else "float32"
        _fill(self, values.reshape(-1), dtype, shape, crow, col)
        return self

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        import numpy as np

        dtype = value.get("dtype")
        if dtype not in ("int64", "float32"):
            raise WireError.at(("dtype",), f"must be 'int64' or 'float32', not {dtype!r}.", "enum")
        data = value.get("data")
        if not isinstance(data, (list, tuple, np.ndarray)):
            raise WireError.at(("data",), f"expected a list of numbers, not {json_kind(data)}.")
        try:
            values, change = cast(data, dtype, key="data")
        except (TypeError, ValueError) as error:
            raise WireError.at(("data",), str(error)) from None
        if change:
            # The sender would not see a warning, and the values would be wrong.
            raise WireError.at(("data",), f"{change}.")
        if values.ndim != 1 and not isinstance(data, np.ndarray):
            raise WireError.at(("data",), "expected a flat list; put the shape into `shape`.")
        self = cls.__new__(cls)
        shape = value.get("shape")
        if shape is None and values.ndim != 1:
            shape = values.shape
        _fill(
            self,
            values.reshape(-1),
            dtype,
            shape,
            value.get("sparse_crow_indices"),
            value.get("sparse_col_indices"),
        )
        return self

    # -- access ----------------------------------------------------------------------------------

    @property
    def data(self) -> list[int] | list[float]:
        """The values as a flat list, new on each access; for a sparse tensor the stored values."""
        values: list[int] | list[float] = self._values.tolist()
        return values

    @property
    def values_np(self) -> npt.NDArray[Any]:
        """The values without a copy, flat and read-only; for a sparse tensor the stored values."""
        return self._values

    @property
    def is_sparse(self) -> bool:
        return self._crow is not None

    @property
    def size(self) -> int:
        """Number of elements of the dense tensor."""
        return self._values.size if self.shape is None else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values and, for a sparse tensor, of the indices."""
        indices = 0
        if self._crow is not None and self._col is not None:
            indices = self._crow.nbytes + self._col.nbytes
        return int(self._values.nbytes) + int(indices)

    def to_numpy(self, pad_value: float = 0) -> npt.NDArray[Any]:
        """A new dense array of `shape`; elements missing from a sparse tensor are `pad_value`."""
        import numpy as np

        if self._crow is None or self._col is None or self.shape is None:
            dense = self._values.copy()
            return dense if self.shape is None else dense.reshape(self.shape)
        dense = np.full(self.shape, pad_value, dtype=self._values.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self._crow))
        dense[rows, self._col] = self._values
        return dense

    def to_torch(self, pad_value: float = 0) -> torch.Tensor:
        with needs("TensorData.to_torch()"):
            import torch

        return torch.from_numpy(self.to_numpy(pad_value))

    def tolist(self, pad_value: float = 0) -> list[Any]:
        """The dense tensor as nested lists."""
        nested: list[Any] = self.to_numpy(pad_value).tolist()
        return nested

    def __len__(self) -> int:
        """Size of the first dimension."""
        if self.shape is None:
            return int(self._values.size)
        if not self.shape:
            raise TypeError("a tensor of shape [] has no length.")
        return self.shape[0]

    def __repr__(self) -> str:
        form = f", nonzero={self._values.size}" if self.is_sparse else ""
        some = self._values[:6].tolist()
        dots = ", ..." if self._values.size > 6 else ""
        text = ", ".join(map(repr, some))
        return f"TensorData(dtype={self.dtype!r}, shape={self.shape}{form}, data=[{text}{dots}])"

    def _dump(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self.sparse_crow_indices,
            "sparse_col_indices": self.sparse_col_indices,
        }

    def _constructor_arguments(self) -> dict[str, Any]:
        return {
            "data": self._values,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self._crow,
            "sparse_col_indices": self._col,
        }

    def _key(self) -> Any:
        shape = (self._values.size,) if self.shape is None else tuple(self.shape)
        indices: tuple[bytes, ...] = ()
        if self._crow is not None and self._col is not None:
            indices = (self._crow.tobytes(), self._col.tobytes())
        # Compare bytes, so that NaN equals itself.
        return self.dtype, shape, self._values.tobytes(), *indices


def _fill(
    self: TensorData,
    values: npt.NDArray[Any],
    dtype: TensorDtype,
    shape: Any,
    crow: Any,
    col: Any,
) -> None:
    """Check that all parts are consistent, then set the fields of a new tensor."""
    shape = _checked_shape(shape)
    if (crow is None) != (col is None):
        missing = "sparse_crow_indices" if crow is None else "sparse_col_indices"
        raise WireError.at(
            (missing,), "a CSR tensor needs both index lists, a dense tensor neither."
        )
    if crow is not None:
        crow = _indices(crow, "sparse_crow_indices")
        col = _indices(col, "sparse_col_indices")
        _check_csr(values, shape, crow, col)
    elif shape is not None and math.prod(shape) != values.size:
        raise WireError.at(
            ("shape",), f"{shape} has {math.prod(shape)} elements, but `data` has {values.size}."
        )
    values.flags.writeable = False
    put = object.__setattr__
    put(self, "dtype", dtype)
    put(self, "shape", shape)
    put(self, "_values", values)
    put(self, "_crow", crow)
    put(self, "_col", col)


def _checked_shape(shape: Any) -> list[int] | None:
    if shape is None:
        return None
    if not isinstance(shape, (list, tuple)) or len(shape) > 16:
        raise WireError.at(("shape",), f"expected a list of at most 16 sizes, not {shape!r}.")
    for size in shape:
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 0 <= size < 2**31:
            raise WireError.at(("shape",), f"sizes must be integers of 0 or greater, not {size!r}.")
    if 0 in shape and math.prod(max(1, int(size)) for size in shape) > MAX_DENSE_CELLS:
        # The tensor is empty, but NumPy still rejects such sizes.
        raise WireError.at(
            ("shape",),
            f"{list(shape)} is too large: without its zeros it has more than {MAX_DENSE_CELLS} "
            "elements.",
        )
    return [int(size) for size in shape]


def _indices(value: Any, name: str) -> npt.NDArray[np.int64]:
    import numpy as np

    try:
        array = np.array(value)
    except ValueError:
        array = np.zeros((0, 0))  # lists of different lengths
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise WireError.at((name,), "expected a flat list of integers.")
    array = array.astype(np.int64, copy=False)
    array.flags.writeable = False
    return array


def _check_csr(
    values: npt.NDArray[Any],
    shape: list[int] | None,
    crow: npt.NDArray[np.int64],
    col: npt.NDArray[np.int64],
) -> None:
    if shape is None or len(shape) != 2:
        raise WireError.at(("shape",), f"a CSR tensor needs a 2-D shape, not {shape}.")
    rows, columns = shape
    if rows * columns > MAX_DENSE_CELLS:
        raise WireError.at(
            ("shape",), f"{shape} has more than {MAX_DENSE_CELLS} elements; send it in parts."
        )
    where = "sparse_crow_indices"
    if crow.size != rows + 1:
        raise WireError.at((where,), f"{rows} rows need {rows + 1} offsets, not {crow.size}.")
    if crow[0] != 0 or crow[-1] != values.size or (crow[1:] < crow[:-1]).any():
        raise WireError.at(
            (where,),
            f"must increase from 0 to the number of values, {values.size}; got {crow[:8]}.",
        )
    where = "sparse_col_indices"
    if col.size != values.size:
        raise WireError.at(
            (where,), f"{values.size} values need {values.size} columns, not {col.size}."
        )
    if col.size and (col.min() < 0 or col.max() >= columns):
        raise WireError.at((where,), f"columns must be between 0 and {columns - 1}.")


# -- casts ---------------------------------------------------------------------------------------


def tensor_from(value: Any, *, key: str, list_dtype: TensorDtype | None = None) -> TensorData:
    """
    Convert a TensorData, torch tensor, NumPy array or list of numbers; errors name it by `key`.

    Arrays of floats become float32, of integers int64. Lists become `list_dtype`; without it, their
    values decide.
    """
    if isinstance(value, TensorData):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        return TensorData._of(*_cast_and_warn(torch_to_numpy(value, key=key), None, key))
    if hasattr(value, "__array__"):
        return TensorData._of(*_cast_and_warn(value, None, key))
    if isinstance(value, (list, tuple, range)):
        return TensorData._of(*_cast_and_warn(value, list_dtype, key))
    raise TypeError(
        f"{key}: expected a TensorData, torch tensor, NumPy array or list of numbers, "
        f"not {type(value).__name__}."
    )


def compact_from_torch(value: Any, *, key: str) -> TensorData:
    """A 2-D torch tensor as CSR if that is smaller, as the official client does."""
    return _compact(torch_to_numpy(value, key=key), 0, key=key)


def _cast_and_warn(
    value: Any, dtype: TensorDtype | None, key: str
) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    values, change = cast(value, dtype, key=key)
    if change:
        warn_once(key, change)
    return values, values.shape


def _compact(array: npt.NDArray[Any], pad_value: float, *, key: str) -> TensorData:
    import numpy as np

    if array.ndim != 2:
        raise ValueError(f"{key}: CSR needs a 2-D tensor, not shape {array.shape}.")
    values, shape = _cast_and_warn(array, None, key)
    stored = values != pad_value
    nonzero = int(stored.sum())
    if shape[0] + 1 + 2 * nonzero >= values.size:
        return TensorData._of(values, shape)
    crow = np.concatenate(([0], np.cumsum(stored.sum(axis=1))))
    return TensorData._of(values[stored], shape, crow, np.nonzero(stored)[1])
