"""
How a caller's values become int64 or float32, the two types that travel.

The values are cast, not only the label; what cannot be cast is refused by name, and a cast that
changes a value by more than ordinary rounding is reported.
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

#: float32 holds every whole number up to here.
EXACT_IN_FLOAT32: Final = 2**24


class TensorCastWarning(UserWarning):
    """
    A value changed on its way into a tensor by more than ordinary float32 rounding.

    Only int64 and float32 travel. Rounding 0.1 to the nearest float32 is silent; a number that
    became infinite or zero, or a whole number above 2**24 that became another one, is not.
    Raised once per input name in a process.
    """


_warned: set[str] = set()


def warn_once(key: str, loss: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"{key}: {loss} (only int64 and float32 travel). Further casts of this input "
            "are not reported.",
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
        tensor = tensor.float()  # bfloat16 and the float8 kinds are unknown to NumPy
    array: npt.NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    return array


def cast(value: Any, dtype: TensorDtype | None, *, key: str) -> tuple[npt.NDArray[Any], str]:
    """A new C-ordered array of a type that travels, and what got lost beyond float32 rounding."""
    import numpy as np

    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        text = str(error)
        if "inhomogeneous" in text:
            text = "the nested lists differ in length."
        raise ValueError(f"{key}: {text}") from None
    if dtype not in (None, "int64", "float32"):
        raise ValueError(f"{key}: dtype must be 'int64' or 'float32', not {dtype!r}.")
    if array.dtype.name == "bfloat16":  # ml_dtypes
        array = array.astype(np.float32)
    kind = array.dtype.kind
    if array.size == 0 and not hasattr(value, "dtype"):
        kind = "f" if dtype != "int64" else "i"
    listed = not hasattr(value, "dtype")  # so its type was NumPy's choice
    if listed and kind in "uO" and (beyond := _beyond_int64(array)) is not None:
        raise ValueError(
            f"{key}: {beyond} is too large: whole numbers travel in 64 bits, from -2**63 to "
            "2**63 - 1."
        )
    if kind not in "fi":
        cure = (
            "Write numbers." if listed else "Cast first: .astype(np.int64) or .astype(np.float32)."
        )
        raise ValueError(
            f"{key}: values of type {array.dtype} do not travel, only floats and signed integers. "
            f"{cure}"
        )
    target = dtype or ("float32" if kind == "f" else "int64")
    if target == "int64":
        return _to_int64(array, key), ""
    return _to_float32(array)


def _beyond_int64(array: npt.NDArray[Any]) -> int | None:
    """A whole number for which NumPy had to take another type than int64."""
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
            raise ValueError(f"{key}: {bad} is not a whole number that fits int64.")
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
            return cast, f"{array[overflowed].flat[0]} is beyond float32 and became infinite"
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
            return cast, f"{was} became {int(now)}: float32 holds whole numbers up to 2**24"
    return cast, ""
