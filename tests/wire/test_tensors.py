"""T9, T10, T11: casts, shapes and immutability of tensors."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from tinkex.types import Datum, ModelInput, TensorData
from tinkex.wire import dtype_casts
from tinkex.wire.dtype_casts import TensorCastWarning
from tinkex.wire.tensors import tensor_from


@pytest.fixture(autouse=True)
def _nothing_warned_about_yet():
    dtype_casts._warned.clear()


# -- T9: no shape --------------------------------------------------------------------------------


def test_a_tensor_without_a_shape_is_flat_and_nothing_is_reshaped():
    tensor = TensorData(data=[1, 2, 3, 4], dtype="int64")

    assert tensor.shape is None
    assert tensor.to_numpy().shape == (4,)
    assert tensor.tolist() == [1, 2, 3, 4]
    assert len(tensor) == 4


def test_a_null_shape_in_json_is_the_same_as_none():
    tensor = TensorData.model_validate({"data": [1.5], "dtype": "float32", "shape": None})

    assert tensor.shape is None
    assert tensor.to_numpy().shape == (1,)


def test_a_shape_that_does_not_fit_the_data_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="6 elements, but `data` has 4"):
        TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 3])


def test_nested_lists_keep_their_shape():
    assert TensorData(data=[[1, 2], [3, 4]], dtype="int64").shape == [2, 2]


# -- T10: casts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float16, "float32"),
        (np.float32, "float32"),
        (np.float64, "float32"),
        (np.longdouble, "float32"),
        (np.int8, "int64"),
        (np.int16, "int64"),
        (np.int32, "int64"),
        (np.int64, "int64"),
    ],
)
def test_the_values_are_cast_not_only_the_label(given, dtype):
    array = np.array([1, 2, 3], dtype=given)

    tensor = TensorData.from_numpy(array)

    assert tensor.dtype == dtype
    assert tensor.to_numpy().dtype == np.dtype(dtype)
    assert tensor.values_np.nbytes == 3 * np.dtype(dtype).itemsize
    assert tensor.data == [1, 2, 3]


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, 2], dtype=np.uint8),
        np.array([2**63], dtype=np.uint64),
        np.array([True, False]),
        np.array([1j]),
        np.array([None]),
        np.array(["1"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_other_dtypes_are_refused_by_key_and_dtype(array):
    with pytest.raises(ValueError, match="weights") as refused:
        Datum(ModelInput.from_ints([1]), {"weights": array})

    assert str(array.dtype) in str(refused.value)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        (
            "advantages",
            np.array([1.0, 1e300]),
            "1e[+]300 is too large for float32 and became infinite",
        ),
        ("logprobs", np.array([-1e-300]), "too small for float32 and became 0"),
        ("weights", [2**24 + 1], "16777217 became 16777216"),
        ("weights", np.array([2.0**53]) + 2, "became 9007199254740992"),
    ],
)
def test_a_cast_that_loses_range_or_precision_warns_once_for_each_key(key, values, message):
    with pytest.warns(TensorCastWarning, match=f"{key}.*{message}"):
        Datum(ModelInput.from_ints([1]), {key: values})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Datum(ModelInput.from_ints([1]), {key: values})


def test_each_key_has_its_own_warning():
    huge = np.array([1e300])

    with pytest.warns(TensorCastWarning, match="advantages"):
        Datum(ModelInput.from_ints([1]), {"advantages": huge})
    with pytest.warns(TensorCastWarning, match="logprobs"):
        Datum(ModelInput.from_ints([1]), {"logprobs": huge})


def test_ordinary_rounding_is_silent():
    tensor = TensorData.from_numpy(np.array([0.1, 1 / 3, np.inf, np.nan, 2.0**100, 0.0]))

    assert tensor.dtype == "float32"


def test_an_overflow_on_the_wire_is_an_error_rather_than_a_warning():
    with pytest.raises(ValueError, match=r"data: 1e[+]300 is too large for float32"):
        TensorData.model_validate({"data": [1e300], "dtype": "float32"})


def test_a_fraction_is_not_a_token():
    with pytest.raises(ValueError, match=r"target_tokens: 1.5 is not an integer"):
        Datum(ModelInput.from_ints([1]), {"target_tokens": [1.5]})


def test_whole_floats_under_int64_are_cast():
    assert TensorData(data=[1.0, 2.0], dtype="int64").data == [1, 2]


def test_an_integer_that_does_not_fit_is_refused_rather_than_wrapped():
    with pytest.raises(ValueError, match="target_tokens"):
        Datum(ModelInput.from_ints([1]), {"target_tokens": [2**63]})


@pytest.mark.parametrize("data", [["1.5"], [None, 1.0], [[1.0]], "1.5", {"a": 1}, None])
def test_only_a_flat_list_of_numbers_is_data_on_the_wire(data):
    with pytest.raises(ValueError, match="data"):
        TensorData.model_validate({"data": data, "dtype": "float32"})


# -- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_tensor_is_a_copy_of_its_source(dtype):
    source = np.ones(3, dtype=dtype)
    tensors_made = [TensorData.from_numpy(source), TensorData(data=source, dtype="float32")]

    source[:] = 7

    assert [tensor.data for tensor in tensors_made] == [[1.0] * 3] * 2


def test_a_tensor_cannot_be_written_to_through_what_it_hands_out():
    tensor = TensorData(data=[1, 2, 3], dtype="int64")

    tensor.to_numpy()[:] = 9
    tensor.data.append(4)
    with pytest.raises(ValueError, match="read-only"):
        tensor.values_np[0] = 9

    assert tensor.data == [1, 2, 3]


def test_fields_cannot_be_set():
    with pytest.raises(AttributeError):
        TensorData(data=[1], dtype="int64").shape = [1]


def test_a_view_in_another_order_is_read_row_by_row():
    array = np.arange(6).reshape(2, 3).T

    tensor = TensorData.from_numpy(array)

    assert tensor.shape == [3, 2]
    assert tensor.data == [0, 3, 1, 4, 2, 5]


# -- torch ---------------------------------------------------------------------------------------


def test_tensors_with_gradients_and_of_narrow_types_are_taken():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3, dtype=torch.bfloat16, requires_grad=True) * 0.5

    assert TensorData.from_torch(tensor).data == [0.5, 0.5, 0.5]
    assert TensorData.from_torch(torch.arange(3, dtype=torch.int16)).dtype == "int64"


@pytest.mark.parametrize("name", ["bool", "uint8", "complex64"])
def test_unsupported_torch_dtypes_are_refused_by_key(name):
    torch = pytest.importorskip("torch")

    with pytest.raises(ValueError, match=f"weights.*{name}"):
        Datum(ModelInput.from_ints([1]), {"weights": torch.zeros(2, dtype=getattr(torch, name))})


def test_a_sparse_2d_torch_tensor_is_sent_as_csr_and_a_full_one_dense():
    torch = pytest.importorskip("torch")
    thin, full = torch.zeros(4, 9), torch.ones(4, 9)
    thin[1, 3], thin[3, 8] = -2.0, 0.5

    made = Datum(ModelInput.from_ints([1]), {"weights": thin, "target_tokens": full.long()})

    weights = made.loss_fn_inputs["weights"]
    assert weights.sparse_crow_indices == [0, 0, 1, 1, 2]
    assert weights.sparse_col_indices == [3, 8]
    assert weights.data == [-2.0, 0.5]
    assert weights.to_torch().equal(thin)
    assert not made.loss_fn_inputs["target_tokens"].is_sparse


def test_csr_appears_exactly_where_it_is_smaller():
    torch = pytest.importorskip("torch")
    # rows + 1 + 2 * nonzero < rows * columns: 2 + 1 + 2 * 3 = 9 < 10, and with 4 it is 11.
    three, four = torch.zeros(2, 5), torch.zeros(2, 5)
    three.view(-1)[:3] = 1
    four.view(-1)[:4] = 1

    assert TensorData.from_torch_sparse(three).is_sparse
    assert not TensorData.from_torch_sparse(four).is_sparse


def test_another_pad_value_is_left_out_and_filled_in_again():
    torch = pytest.importorskip("torch")
    table = torch.full((6, 4), -1)
    table[2, 1] = 0

    tensor = TensorData.from_torch_sparse(table, pad_value=-1)

    assert tensor.is_sparse
    assert tensor.data == [0]
    assert tensor.to_numpy(pad_value=-1).tolist() == table.tolist()


def test_a_sparse_tensor_becomes_dense_without_torch():
    code = (
        "import sys; from tinkex.types import TensorData\n"
        "t = TensorData(data=[1.0], dtype='float32', shape=[2, 2],"
        " sparse_crow_indices=[0, 0, 1], sparse_col_indices=[1])\n"
        "assert t.to_numpy(5).tolist() == [[5, 5], [5, 1]], t\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- CSR that does not hold together -------------------------------------------------------------

CSR = {
    "data": [1.0, 2.0],
    "dtype": "float32",
    "shape": [2, 3],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [0, 2],
}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sparse_col_indices": None}, "sparse_col_indices"),
        ({"sparse_crow_indices": None}, "sparse_crow_indices"),
        ({"shape": None}, "shape"),
        ({"shape": [6]}, "shape"),
        ({"shape": [2, -3]}, "shape"),
        ({"shape": [2, 2**40]}, "shape"),
        ({"shape": [2, True]}, "shape"),
        ({"sparse_crow_indices": [0, 2]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [1, 1, 2]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0, 3, 2]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0, 1, 3]}, "sparse_crow_indices"),
        ({"sparse_crow_indices": [0.5, 1, 2]}, "sparse_crow_indices"),
        ({"sparse_col_indices": [0]}, "sparse_col_indices"),
        ({"sparse_col_indices": [0, 3]}, "sparse_col_indices"),
        ({"sparse_col_indices": [-1, 0]}, "sparse_col_indices"),
    ],
)
def test_inconsistent_csr_is_refused_by_field(change, where):
    assert TensorData.model_validate(CSR).to_numpy().tolist() == [[1, 0, 0], [0, 0, 2]]
    with pytest.raises(ValueError, match=where):
        TensorData.model_validate({**CSR, **change})


def test_values_decide_the_dtype_of_a_list_under_an_unknown_name():
    assert tensor_from([1, 2], key="mine").dtype == "int64"
    assert tensor_from([1, 2.5], key="mine").dtype == "float32"
    assert tensor_from([], key="mine").dtype == "float32"


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_a_whole_number_that_is_too_large_is_named(number):
    inputs = {"target_tokens": [number]}
    with pytest.raises(ValueError, match=f"^target_tokens: {number} is too large: .*2\\*\\*63"):
        Datum(model_input=ModelInput.from_ints([1]), loss_fn_inputs=inputs)
    with pytest.raises(ValueError, match=f"^token {number} does not fit in 32 bits"):
        ModelInput.from_ints([number])
