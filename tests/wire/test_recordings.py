"""
Recorded requests of four releases of the official client (`qa/recordings/record.py`).

Every recorded request decodes into our types; our types make the same bodies from the same
arguments; and a decoded request encodes to the bytes that were recorded.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qa.recordings import basic_program as build
from tinkex import types
from tinkex.wire.codec import decode_forward_json, decode_json, encode_json
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.protobuf import decode_forward_backward_request, encode_forward_backward_request
from tinkex.wire.sdk_versions import SdkVersion

DATA = Path(__file__).parents[1] / "data" / "wire"
VERSIONS = ["0.4.1", "0.18.2", "0.22.3", "0.36.0"]

TYPES = {
    "asample": types.SampleRequest,
    "client_config": types.ClientConfigRequest,
    "client_dynamic_config": types.ClientConfigRequest,
    "create_model": types.CreateModelRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "create_session": types.CreateSessionRequest,
    "get_info": types.GetInfoRequest,
    "load_weights": types.LoadWeightsRequest,
    "optim_step": types.OptimStepRequest,
    "retrieve_future": types.FutureRetrieveRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "sessions_ID_finish": types.FinishSessionRequest,
    "telemetry": types.TelemetrySendRequest,
}
PASSES = {"forward", "forward_backward"}


def requests(version: str, endpoint: str) -> list[dict[str, Any]]:
    path = DATA / version / f"{endpoint}.json"
    return json.loads(path.read_text()) if path.exists() else []


def small_requests() -> Iterator[Any]:
    for version in VERSIONS:
        for path in sorted((DATA / version).glob("*.json")):
            if path.stem in PASSES or path.stem == "get_server_capabilities":
                continue
            for number, request in enumerate(json.loads(path.read_text())):
                yield pytest.param(path.stem, request["body"], id=f"{version}-{path.stem}-{number}")


def passes(version: str) -> list[tuple[types.ForwardBackwardRequest, bool]]:
    """Every pass of a recording, by its step number."""
    found = []
    for endpoint in sorted(PASSES):
        for request in requests(version, endpoint):
            if "body_base64" in request:
                body = base64.b64decode(request["body_base64"])
                found.append(decode_forward_backward_request(body))
            else:
                found.append(decode_forward_json(request["body"].encode()))
    return sorted(found, key=lambda item: item[0].seq_id)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def contains(whole: Any, part: Any) -> bool:
    """Whether everything in `part` is in `whole` with the same value."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and contains(whole[key], item) for key, item in part.items()
        )
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part


def test_there_is_a_recording_of_each_release():
    assert sorted(p.name for p in DATA.iterdir() if p.name[0].isdigit()) == sorted(VERSIONS)
    for version in VERSIONS:
        assert len(passes(version)) >= 6


@pytest.mark.parametrize(("endpoint", "body"), list(small_requests()))
def test_a_recorded_request_decodes_and_encodes_to_what_was_sent(endpoint, body):
    request = decode_json(TYPES[endpoint], body.encode())

    again = json.loads(encode_json(request))

    # Old clients omit defaults and send nulls; all other values are unchanged.
    assert contains(again, without_nulls(json.loads(body)))


@pytest.mark.parametrize(("endpoint", "body"), list(small_requests()))
def test_a_recorded_request_has_no_field_we_do_not_know(endpoint, body):
    known = TYPES[endpoint].wire_names()

    assert set(json.loads(body)) <= known


@pytest.mark.parametrize("endpoint", sorted(set(TYPES) - {"retrieve_future", "telemetry"}))
def test_what_we_send_is_exactly_what_the_newest_client_sends(endpoint):
    for request in requests("0.36.0", endpoint):
        ours = encode_json(decode_json(TYPES[endpoint], request["body"].encode()))

        assert json.loads(ours) == without_nulls(json.loads(request["body"]))


@pytest.mark.parametrize("version", ["0.22.3", "0.36.0"])
def test_a_recorded_pass_encodes_to_the_same_message(version):
    for request in requests(version, "forward_backward"):
        body = base64.b64decode(request["body_base64"])
        ours = encode_forward_backward_request(
            decode_forward_backward_request(body)[0],
            forward_only=decode_forward_backward_request(body)[1],
        )

        theirs = pb.ForwardBackwardRequest.FromString(body)
        if version == "0.22.3":  # numbers are only in the older map
            for name, number in theirs.loss_fn_config.items():
                theirs.loss_fn_config_v2[name].number = number
        assert pb.ForwardBackwardRequest.FromString(ours) == theirs


@pytest.mark.parametrize("version", ["0.4.1", "0.18.2"])
def test_a_recorded_json_pass_encodes_to_the_same_values(version):
    for endpoint in PASSES:
        for request in requests(version, endpoint):
            sent = json.loads(request["body"])
            made, forward_only = decode_forward_json(request["body"].encode())

            key = "forward_input" if forward_only else "forward_backward_input"
            ours = json.loads(encode_json(made.forward_backward_input))
            assert forward_only == (endpoint == "forward")
            for mine, theirs in zip(ours["data"], sent[key]["data"], strict=True):
                for chunk in theirs["model_input"]["chunks"]:
                    if "width" in chunk:  # before 0.6: sizes, and tokens under another name
                        del chunk["width"], chunk["height"]
                        chunk["expected_tokens"] = chunk.pop("tokens")
                assert contains(mine, without_nulls(theirs))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_arguments_make_the_same_examples_as_the_official_types(version):
    """Our `Datum`, built from the recorded program's arguments, equals what its `Datum` sent."""
    recorded = [request.forward_backward_input for request, _ in passes(version)]
    expected = [
        build.cross_entropy(types),
        build.cross_entropy(types),
        build.arrays(types),
        build.arrays(types),
        build.images(types),
        build.sparse(types),
    ]

    for ours, theirs in zip(expected, recorded, strict=False):
        if ours is expected[5] and version == "0.4.1":
            ours = [dense(datum) for datum in ours]  # no CSR before 0.18
        assert ours == theirs.data


def dense(datum: types.Datum) -> types.Datum:
    return datum.model_copy(
        update={
            "loss_fn_inputs": {
                name: types.TensorData.from_numpy(tensor.to_numpy())
                for name, tensor in datum.loss_fn_inputs.items()
            }
        }
    )


def test_provenance_and_parts_of_a_batch_are_those_of_the_newest_client():
    recorded = passes("0.36.0")

    assert any(r.forward_backward_input.data == build.provenance(types) for r, _ in recorded)
    parts = [
        r.forward_backward_input.data
        for r, _ in recorded
        if r.forward_backward_input.data[0] in build.many(types, 5)
    ]
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [datum for part in parts for datum in part] == build.many(types, 5)


@pytest.mark.parametrize(
    ("version", "endpoint", "binary"),
    [
        ("0.4.1", "forward", False),
        ("0.18.2", "forward", False),
        ("0.22.3", "forward_backward", True),
        ("0.36.0", "forward_backward", True),
    ],
)
def test_our_flags_made_each_client_send_a_forward_the_best_way_it_can(version, endpoint, binary):
    (forward,) = [r for r, forward_only in passes(version)[:1] if forward_only]

    first = next(r for r in requests(version, endpoint) if ("body_base64" in r) == binary)
    assert first["headers"]["content-type"] == (
        "application/x-protobuf" if binary else "application/json"
    )
    assert forward.seq_id == 1
    assert ("fwd_via_fwdbwd" in SdkVersion.of(version).client_config()) == (version == "0.22.3")


def test_negative_weights_arrive():
    request, _ = passes("0.4.1")[1]

    assert request.forward_backward_input.data[0].loss_fn_inputs["weights"].data[2] == -2.5
