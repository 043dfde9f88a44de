"""Checks the content of responses, in JSON and in protobuf."""

import numpy as np

from tinkex.conformance.raw_client import (
    JSON_VERSION,
    TEXTS,
    Failure,
    Remote,
    all_logprobs,
    batch,
    max_difference,
)
from tinkex.conformance.registry import Skipped, check, expect
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.tensors import TensorData


@check("wire 2.2")
def client_configuration_is_answered(remote: Remote) -> str:
    """`client/config` returns an object for every version, `client/dynamic_config` one or 404."""
    for version in ("0.18.2", "0.25.0", "0.36.0", "99.0.0"):
        answer = remote.post("client/config", {"sdk_version": version})
        expect(
            answer.status == 200 and isinstance(answer.json, dict), f"version {version}: {answer}"
        )
    dynamic = remote.post("client/dynamic_config", {"sdk_version": "0.36.0"})
    fine = dynamic.status == 404 or (dynamic.status == 200 and isinstance(dynamic.json, dict))
    expect(fine, f"dynamic_config: {dynamic}")
    return f"config for 4 versions; dynamic_config HTTP {dynamic.status}"


@check("wire 2.3")
def sessions_begin_and_beat(remote: Remote) -> str:
    """`create_session` returns an id; its heartbeat is 200, that of an unknown session 4xx."""
    session = remote.new_session()
    expect(
        "/" not in session, f"session_id {session!r} has a slash, which is not possible in paths"
    )
    beat = remote.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    expect(beat.status == 200, f"heartbeat: {beat}")
    unknown = remote.post("session_heartbeat", {"session_id": "no-such-session"})
    expect(400 <= unknown.status < 500, f"heartbeat of an unknown session: {unknown}")
    return f"heartbeat 200, unknown session {unknown.status}"


@check("wire 2.9")
def telemetry_is_accepted(remote: Remote) -> str:
    """`telemetry` returns `{"status": "accepted"}`; clients repeat anything else every second."""
    body = {
        "events": [],
        "platform": "Linux",
        "sdk_version": "0.36.0",
        "session_id": remote.session,
    }
    answer = remote.post("telemetry", body)
    fine = answer.status == 200 and answer.json.get("status") == "accepted"
    expect(fine, str(answer))
    return "accepted"


@check("wire 7", "S11")
def models_have_the_ids_clients_compute(remote: Remote) -> str:
    """A model id is `<session>:train:<n>`; `get_info` has its base model, tokenizer and rank."""
    session = remote.new_session()
    body = {**remote.model_body(session, rank=8), "model_seq_id": 0}
    model = remote.created_model(remote.post("create_model", body))
    expect(model.model_id == f"{session}:train:0", f"model_id {model.model_id!r}")
    info = remote.expect_ok(
        remote.post("get_info", {"model_id": model.model_id, "type": "get_info"})
    )
    data = info.get("model_data", {})
    expect(info.get("model_id") == model.model_id, f"get_info is about {info.get('model_id')!r}")
    expect(data.get("model_name"), f"get_info has model_data {data!r}, without a model_name")
    expect(info.get("lora_rank") == 8, f"rank 8 was requested, get_info returns {info!r}")
    return f"{model.model_id.removeprefix(session)}, rank 8, {data.get('model_name')}"


@check("S16")
def metrics_have_names_clients_can_merge(remote: Remote) -> str:
    """Every metric has exactly one colon, `loss:sum` exists, and each datum has an output."""
    output = remote.model().backward(batch())
    odd = [name for name in output.metrics if name.count(":") != 1]
    expect(not odd, f"metrics {odd} cannot be merged by the client")
    expect("loss:sum" in output.metrics, f"no loss:sum among {sorted(output.metrics)}")
    expect(
        len(output.loss_fn_outputs) == len(TEXTS),
        f"{len(output.loss_fn_outputs)} outputs for {len(TEXTS)} datums",
    )
    shapes = [out["logprobs"].to_numpy().shape for out in output.loss_fn_outputs]
    expect(shapes == [(len(text) - 1,) for text in TEXTS], f"logprobs have the shapes {shapes}")
    return ", ".join(sorted(output.metrics))


@check("wire 4.1")
def json_and_protobuf_say_the_same(remote: Remote) -> str:
    """A pass as JSON (old clients) gives the same result as protobuf (new clients)."""
    new = all_logprobs(remote.model().forward(batch()))
    session = remote.new_session(JSON_VERSION)
    old = remote.model(session)
    data = [
        {
            # Old clients omit every `type`.
            "model_input": {"chunks": [{"tokens": text[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {
                    "data": text[1:],
                    "dtype": "int64",
                    "shape": [len(text) - 1],
                },
                "weights": {
                    "data": [1.0] * (len(text) - 1),
                    "dtype": "float32",
                    "shape": [len(text) - 1],
                },
            },
        }
        for text in TEXTS
    ]
    found = []
    for route, key in (
        ("forward", "forward_input"),
        ("forward_backward", "forward_backward_input"),
    ):
        body = {
            key: {"data": data, "loss_fn": "cross_entropy", "loss_fn_config": None},
            "model_id": old.model_id,
            "seq_id": old.number(),
        }
        answer = remote.wait_for(remote.request_id(remote.post(route, body)))
        expect(not answer.is_protobuf, f"JSON was requested, but the response is protobuf: {route}")
        result = answer.json
        missing = {"loss_fn_output_type", "loss_fn_outputs", "metrics"} - set(result)
        expect(not missing, f"{route} lacks {sorted(missing)}: {answer}")
        for out in result["loss_fn_outputs"]:
            extra = set(out["logprobs"]) - {"data", "dtype", "shape"}
            expect(not extra, f"tensors have {sorted(extra)}, which old clients reject")
            found.append(TensorData(**out["logprobs"]).to_numpy().ravel())
    difference = max_difference(
        np.concatenate(found).astype(np.float32), np.concatenate([new, new])
    )
    expect(difference < 1e-4, f"logprobs differ by {difference:.3g}")
    return f"largest difference {difference:.2g}"


@check("wire 3.8")
def samples_come_in_both_forms(remote: Remote) -> str:
    """`asample` returns a sequence id for each sample; JSON and protobuf results are the same."""
    sampler = remote.sampler(base_model=remote.base_model)
    body = sampler.body(TEXTS[0], samples=3, seed=5, max_tokens=4, stop=[])
    accepted = remote.post("asample", body)
    request_id = remote.request_id(accepted)
    ids = accepted.json.get("sample_sequence_ids")
    expect(
        isinstance(ids, list) and len(set(ids)) == 3,
        f"sample_sequence_ids is {ids!r} for 3 samples: clients from 0.26.0 on crash",
    )
    new = remote.sample_result(request_id)
    expect(not isinstance(new, Failure), f"the sample failed: {new}")
    assert not isinstance(new, Failure)
    answer = remote.wait_for(request_id)
    expect(not answer.is_protobuf, "JSON was requested, but the response is protobuf")
    old = answer.json.get("sequences", [])
    tokens = [list(sequence.tokens) for sequence in new.sequences]
    expect([sequence.get("tokens") for sequence in old] == tokens, f"JSON {old!r}, not {tokens}")
    return f"3 sequence ids; {sum(map(len, tokens))} tokens the same in both"


@check("S9")
def a_result_can_be_fetched_again(remote: Remote) -> str:
    """A result can be fetched again, such as after a lost connection."""
    model = remote.model()
    request_id = remote.request_id(model.submit_pass(batch(), forward_only=True))
    first = remote.wait_for(request_id, PROTOBUF_TYPE)
    second = remote.wait_for(request_id, PROTOBUF_TYPE)
    expect(first.body == second.body, f"the second fetch returned {second}")
    return f"{len(first.body)} bytes twice"


@check("wire 2.1", "needs: training")
def checkpoints_are_listed_and_deleted(remote: Remote) -> str:
    """A saved state is listed with its path; once deleted it is not listed and is a 404."""
    model = remote.model()
    path = model.save_state("conformance")
    expect(path == f"tinker://{model.model_id}/weights/conformance", f"path {path!r}")

    def listed() -> list[str]:
        found = remote.expect_ok(remote.get(f"training_runs/{model.model_id}/checkpoints"))
        return [checkpoint.get("tinker_path") for checkpoint in found.get("checkpoints", [])]

    expect(path in listed(), f"{path} is not among {listed()}")
    route = f"training_runs/{model.model_id}/checkpoints/weights/conformance"
    deleted = remote.request("DELETE", route, None, {"Content-Type": "application/json"})
    expect(200 <= deleted.status < 300, f"DELETE: {deleted}")
    expect(path not in listed(), "it is still listed after deletion")
    info = remote.post("weights_info", {"tinker_path": path})
    expect(info.status == 404, f"weights_info of a deleted checkpoint: {info}")
    return "listed, deleted, 404"


@check("S15")
def keys_keep_owners_apart(remote: Remote) -> str:
    """A model of one owner is a 404 for another owner."""
    if remote.other_key is None:
        raise Skipped("needs a second key: --other-key")
    model = remote.model()
    other = Remote(remote.url, key=remote.other_key, base_model=remote.base_model)
    found = other.post("get_info", {"model_id": model.model_id, "type": "get_info"})
    expect(found.status == 404, f"a model of another owner: {found}")
    return "a model of another owner is a 404"
