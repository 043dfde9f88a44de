"""The flags and result formats for each release of the official client."""

import numpy as np
import pytest

from tinkex.types import (
    ForwardBackwardOutput,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.sdk_versions import NEWEST, SdkVersion, wants_protobuf

PROTOBUF = {"proto_write_fwdbwd": True}
BOTH = {**PROTOBUF, "fwd_via_fwdbwd": True}

#: The first and last release that knows each flag of `client/config`.
KNOWN = {
    "proto_write_fwdbwd": ((0, 19, 0), (0, 24, 1)),
    "fwd_via_fwdbwd": ((0, 22, 3), (0, 24, 1)),
    "custom_loss_server_side": ((0, 36, 0), (0, 36, 0)),
    "create_model_via_load_weights": ((0, 24, 1), (0, 36, 0)),
    "sample_use_retrieve_futures": ((0, 26, 2), (0, 36, 0)),
    "sample_join_sampling_session": ((0, 32, 0), (0, 36, 0)),
}
#: Endpoints that this server does not have, or has only with a setting.
NEEDS_AN_ENDPOINT = {"pjwt_auth_enabled", "grpc_target", "enable_grpc_retrieve_future"}
VIA_LOAD = {"create_model_via_load_weights": True}
POLLER = {**VIA_LOAD, "sample_use_retrieve_futures": True}
JOINING = {**POLLER, "sample_join_sampling_session": True}
RELEASES = [
    "0.4.1", "0.5.0", "0.6.0", "0.7.0", "0.10.0", "0.14.0", "0.16.1", "0.18.0", "0.18.1", "0.18.2",
    "0.19.0", "0.20.0", "0.21.0", "0.22.0", "0.22.1", "0.22.2", "0.22.3", "0.22.4", "0.23.0", "0.24.0",
    "0.24.1", "0.25.0", "0.26.0", "0.27.2", "0.28.0", "0.29.1", "0.30.3", "0.33.0", "0.36.0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.4.1", {}),
        ("0.18.0", {}),
        ("0.18.2", {}),
        ("0.19.0", PROTOBUF),
        ("0.22.2", PROTOBUF),
        ("0.22.3", BOTH),
        ("0.24.1", {**BOTH, **VIA_LOAD}),
        ("0.25.0", VIA_LOAD),
        ("0.26.1", VIA_LOAD),
        ("0.26.2", POLLER),
        ("0.31.0", POLLER),
        ("0.32.0", JOINING),
        ("0.36.0", {**JOINING, "custom_loss_server_side": True}),
        ("0.37.0", {}),
        ("1.0.0", {}),
        ("99.99.99", {}),
        (None, {}),
        ("", {}),
        ("tinkex/0.1.0", {}),
        ("0.1.0", {}),
        ("0.22.3.dev1+local", BOTH),
    ],
)
def test_each_release_gets_its_flags_and_an_unknown_one_none(version, flags):
    assert SdkVersion.of(version).client_config() == flags


@pytest.mark.parametrize(
    ("version", "cancels"),
    [("0.4.1", False), ("0.25.0", False), ("0.26.0", True), ("0.36.0", True), (None, True)],
)
def test_cancellation_is_enabled_for_releases_that_support_it(version, cancels):
    expected = {"sample_cancel_enabled": True} if cancels else {}
    assert SdkVersion.of(version).dynamic_config() == expected


@pytest.mark.parametrize("version", RELEASES)
def test_no_release_is_sent_a_flag_it_does_not_know_or_an_endpoint_it_would_miss(version):
    sdk = SdkVersion.of(version)

    for flag in sdk.client_config():
        first, last = KNOWN[flag]
        assert first <= sdk.version <= last
        assert flag not in NEEDS_AN_ENDPOINT
    if "fwd_via_fwdbwd" in sdk.client_config():
        # JSON would lose `forward_only` and run a backward pass.
        assert sdk.client_config()["proto_write_fwdbwd"] is True


@pytest.mark.parametrize(
    ("version", "has_path"),
    [("0.4.1", False), ("0.19.0", False), ("0.20.0", True), ("0.36.0", True), (None, True)],
)
def test_an_unnamed_sampler_save_has_no_path_for_clients_that_crash_on_it(version, has_path):
    assert SdkVersion.of(version).unnamed_sampler_save_has_path is has_path


def test_an_unknown_version_is_treated_as_the_newest():
    assert SdkVersion.of("nonsense").version == NEWEST
    assert SdkVersion.of("0.36.0").version == NEWEST


@pytest.mark.parametrize(
    ("accept", "binary"),
    [
        ("application/x-protobuf", True),
        ("application/x-protobuf, application/json", True),
        ("Application/X-Protobuf", True),
        ("application/json", False),
        ("*/*", False),
        (None, False),
    ],
)
def test_the_accept_header_decides_about_protobuf(accept, binary):
    assert wants_protobuf(accept) is binary


@pytest.mark.parametrize(
    ("version", "alike", "mixed"),
    [
        ("0.19.0", True, False),
        ("0.22.3", True, False),
        ("0.24.0", True, False),  # recorded: "cannot reshape array of size 10 into shape (1,8)"
        ("0.24.1", True, True),
        ("0.36.0", True, True),
    ],
)
def test_results_of_different_shapes_go_as_json_to_clients_that_misread_them(version, alike, mixed):
    def output(*shapes: tuple[int, int]) -> ForwardBackwardOutput:
        tensors = [TensorData.from_numpy(np.zeros(shape)) for shape in shapes]
        return ForwardBackwardOutput("ArrayRecord", [{"logprobs": t} for t in tensors])

    assert SdkVersion.of(version).reads_as_protobuf(output((5, 8), (3, 8))) is alike
    assert SdkVersion.of(version).reads_as_protobuf(output((5, 8), (5, 2))) is mixed
    assert SdkVersion.of(version).reads_as_protobuf(output()) is True


# -- JSON for old clients ------------------------------------------------------------------------

SPARSE = TensorData(
    data=[1.5],
    dtype="float32",
    shape=[2, 2],
    sparse_crow_indices=[0, 1, 1],
    sparse_col_indices=[1],
)


def test_tensors_for_old_clients_are_dense_with_three_keys_only():
    output = ForwardBackwardOutput("ArrayRecord", [{"logprobs": SPARSE}], {"loss:sum": 2.0})

    answer = SdkVersion.of("0.4.1").forward_backward_json(output)

    assert answer == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [
            {"logprobs": {"data": [0.0, 1.5, 0.0, 0.0], "dtype": "float32", "shape": [2, 2]}}
        ],
        "metrics": {"loss:sum": 2.0},
    }
    encode_json(answer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_result_json_cannot_hold_fails_loudly_and_says_where(bad):
    tensor = TensorData.from_numpy(np.array([0.0, bad]))
    sdk = SdkVersion.of("0.18.2")

    with pytest.raises(UserFailure, match="logprobs of datum 1"):
        sdk.forward_backward_json(
            ForwardBackwardOutput("ArrayRecord", [{}, {"logprobs": tensor}], {})
        )
    with pytest.raises(UserFailure, match="loss:sum"):
        sdk.forward_backward_json(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": bad}))
    with pytest.raises(UserFailure, match="sampled logprob"):
        sdk.sample_json(SampleResponse([SampledSequence("stop", "q", [1], [bad])]))


def test_prompt_logprobs_that_do_not_exist_are_null():
    response = SampleResponse(
        [SampledSequence("length", "q", [1, 2], [-0.5, -1.0])],
        [float("nan"), -1.0],
        TopkLogprobs.from_rows([None, [(1, -0.5), (2, -1.0)]]),
        prompt_cache_hit_tokens=3,
    )

    old = SdkVersion.of("0.4.1").sample_json(response)
    newer = SdkVersion.of("0.24.1").sample_json(response)

    assert encode_json(old) == (
        b'{"type":"sample","sequences":[{"stop_reason":"length","tokens":[1,2],'
        b'"logprobs":[-0.5,-1.0]}],"prompt_logprobs":[null,-1.0],'
        b'"topk_prompt_logprobs":[null,[[1,-0.5],[2,-1.0]]]}'
    )
    assert newer == {**old, "prompt_cache_hit_tokens": 3}
