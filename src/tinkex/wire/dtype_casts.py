"""
Casts of a caller's values to int64 or float32, the two dtypes of the protocol.

Values that cannot be cast are an error that names the input. A cast that changes a value by more
than ordinary rounding is a warning.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Final, Literal

from tinkex.extras import needs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["TensorCastWarning", "TensorDtype", "cast", "torch_to_numpy", "warn_once"]

TensorDtype = Literal["int64", "float32"]

#: float32 represents every integer up to this one exactly.
EXACT_IN_FLOAT32: Final = 2**24


class TensorCastWarning(UserWarning):
    """
    The cast of an input to float32 changed a value by more than ordinary rounding.

    Tensors are sent as int64 or float32 only. Rounding 0.1 to the nearest float32 is silent; a
    number that becomes infinite or zero, or an integer above 2**24 that changes, is reported.
    Issued once for each input name in a process.
    """


_warned: set[str] = set()


def warn_once(key: str, change: str) -> None:
    """Warn that a cast changed a value of the input `key`; `change` says how."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"{key}: {change} (tensors are sent as int64 or float32 only). Further casts of this "
            "input are not reported.",
            TensorCastWarning,
            stacklevel=4,
        )


def torch_to_numpy(tensor: Any, *, key: str) -> npt.NDArray[Any]:
    with needs("A tensor of torch"):
        import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    if tensor.dtype.is_floating_point and tensor.dtype != torch.float64:
        tensor = tensor.float()  # NumPy has no bfloat16 and no float8
    array: npt.NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    return array


def cast(value: Any, dtype: TensorDtype | None, *, key: str) -> tuple[npt.NDArray[Any], str]:
    """
    A new C-ordered int64 or float32 array, and a text that describes a change of a value.

    The text is empty if the cast changed no value by more than ordinary rounding.
    """
    import numpy as np

    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        text = str(error)
        if "inhomogeneous" in text:
            text = "the nested lists have different lengths."
        raise ValueError(f"{key}: {text}") from None
    if dtype not in (None, "int64", "float32"):
        raise ValueError(f"{key}: dtype must be 'int64' or 'float32', not {dtype!r}.")
    if array.dtype.name == "bfloat16":  # ml_dtypes
        array = array.astype(np.float32)
    kind = array.dtype.kind
    if array.size == 0 and not hasattr(value, "dtype"):
        kind = "f" if dtype != "int64" else "i"
    listed = not hasattr(value, "dtype")  # then NumPy chose the dtype
    if listed and kind in "uO" and (beyond := _beyond_int64(array)) is not None:
        raise ValueError(
            f"{key}: {beyond} is too large: integers have 64 bits, from -2**63 to 2**63 - 1."
        )
    if kind not in "fi":
        advice = (
            "Use numbers." if listed else "Cast first: .astype(np.int64) or .astype(np.float32)."
        )
        raise ValueError(
            f"{key}: values of type {array.dtype} cannot be sent, only floats and signed integers. "
            f"{advice}"
        )
    target = dtype or ("float32" if kind == "f" else "int64")
    if target == "int64":
        return _to_int64(array, key), ""
    return _to_float32(array)


def _beyond_int64(array: npt.NDArray[Any]) -> int | None:
    """The first integer in `array` that does not fit in int64."""
    import numpy as np

    for one in array.flat:
        if isinstance(one, int | np.integer) and not -(2**63) <= int(one) < 2**63:
            return int(one)
    return None


def _to_int64(array: npt.NDArray[Any], key: str) -> npt.NDArray[np.int64]:
    import numpy as np

    if array.dtype.kind == "f" and array.size:
        whole = (array == np.trunc(array)) & (np.abs(array) < 2**63)
        if not whole.all():
            bad = array.reshape(-1)[np.flatnonzero(~whole)[0]]
            raise ValueError(f"{key}: {bad} is not an integer that fits in int64.")
    return np.array(array, dtype=np.int64, order="C")


def _to_float32(array: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], str]:
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cast = np.array(array, dtype=np.float32, order="C")
    if array.dtype.itemsize <= 4 and array.dtype.kind == "f":
        return cast, ""
    if array.dtype.kind == "f":
        overflowed = np.isinf(cast) & ~np.isinf(array)
        if overflowed.any():
            return cast, f"{array[overflowed].flat[0]} is too large for float32 and became infinite"
        vanished = (cast == 0) & (array != 0)
        if vanished.any():
            return cast, f"{array[vanished].flat[0]} is too small for float32 and became 0"
    large = np.abs(array) > EXACT_IN_FLOAT32
    if large.any():
        before = array[large]
        after = cast[large].astype(np.longdouble)
        changed = (before == np.trunc(before)) & (after != before.astype(np.longdouble))
        if changed.any():
            was, now = before[changed].flat[0], cast[large][changed].flat[0]
            return cast, f"{was} became {int(now)}: float32 represents integers exactly up to 2**24"
    return cast, ""
