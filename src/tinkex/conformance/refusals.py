"""Checks that invalid requests are refused early, with a reason."""

from tinkex.conformance.raw_client import TEXTS, Answer, Failure, Remote, batch, max_difference
from tinkex.conformance.registry import check, expect
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.tensors import TensorData


def refused(remote: Remote, answer: Answer) -> str:
    """The reason of a 4xx, or of a future that failed with category `user`; empty if neither."""
    if 400 <= answer.status < 500:
        return f"HTTP {answer.status}: {answer.body[:300].decode(errors='replace')}"
    if answer.status != 200:
        return ""
    outcome = remote.wait_for(remote.request_id(answer), "application/x-protobuf, application/json")
    if outcome.is_protobuf or "error" not in outcome.json:
        return ""
    if outcome.json.get("category") != "user":
        return ""
    return f"user: {str(outcome.json['error'])[:300]}"


@check("S4", "S6")
def an_unknown_loss_is_the_users_failure(remote: Remote) -> str:
    """An unknown loss fails with category `user`; it is not replaced by another loss."""
    model = remote.model()
    reason = refused(remote, model.submit_pass(batch(), "no_such_loss"))
    expect(reason, "an unknown loss ran, or failed with another category than `user`")
    expect("no_such_loss" in reason, f"the reason does not name it: {reason}")
    return reason


@check("S4")
def an_unknown_sampling_parameter_is_refused(remote: Remote) -> str:
    """An unknown sampling parameter is refused, not ignored."""
    sampler = remote.sampler(base_model=remote.base_model)
    body = sampler.body(TEXTS[0], max_tokens=2)
    body["sampling_params"]["frequency_penalty"] = 1.5
    reason = refused(remote, remote.post("asample", body))
    expect(reason, "frequency_penalty was accepted and ignored")
    return reason


@check("S4", "needs: training")
def targets_of_two_dimensions_are_not_cut(remote: Remote) -> str:
    """Targets [N, K] give logprobs [N, K] or are refused; they are never reduced to one column."""
    text = TEXTS[0]
    width = 2
    targets = [[token, token + 1] for token in text[1:]]
    flat = [token for row in targets for token in row]
    shape = [len(targets), width]
    datum = Datum(
        model_input=ModelInput.from_ints(text[:-1]),
        loss_fn_inputs={
            "target_tokens": TensorData(data=flat, dtype="int64", shape=shape),
            "weights": TensorData(data=[0.5] * len(flat), dtype="float32", shape=shape),
        },
    )
    model = remote.model()
    answer = model.submit_pass([datum], forward_only=True)
    found = remote.pass_result(remote.request_id(answer)) if answer.status == 200 else None
    if found is None or isinstance(found, Failure):
        reason = refused(remote, answer)
        expect(reason, f"returned {found or answer}")
        return f"refused: {reason}"
    logprobs = found.loss_fn_outputs[0]["logprobs"].to_numpy()
    expect(list(logprobs.shape) == shape, f"shape {list(logprobs.shape)}, not {shape}")
    difference = max_difference(logprobs[:, 0], model.logprobs([text]))
    expect(difference < 1e-3, f"the first column differs by {difference:.3g} from plain targets")
    return f"logprobs of shape {shape}"


@check("S4", "needs: sampling")
def what_exceeds_the_context_is_refused(remote: Remote) -> str:
    """Prompt and max_tokens beyond the context length are refused with a reason."""
    sampler = remote.sampler(base_model=remote.base_model)
    answer = remote.post("asample", sampler.body(TEXTS[0], max_tokens=50_000_000))
    reason = refused(remote, answer)
    expect(reason, "fifty million tokens were accepted")
    return reason


@check("S5")
def an_unknown_base_model_is_refused_at_creation(remote: Remote) -> str:
    """create_model refuses a base model that is not served, and names those that are."""
    body = {**remote.model_body(), "base_model": "no-such/model"}
    reason = refused(remote, remote.post("create_model", body))
    expect(reason, "create_model accepted a base model that is not served")
    expect(remote.base_model in reason, f"the reason names no served model: {reason}")
    return reason


@check("S6")
def malformed_requests_name_the_field(remote: Remote) -> str:
    """A malformed body is a 4xx whose detail names the field; an invalid encoding is a 4xx too."""
    wrong = remote.post("create_model", {**remote.model_body(), "model_seq_id": "seven"})
    expect(400 <= wrong.status < 500, f"model_seq_id 'seven': {wrong}")
    expect(b"model_seq_id" in wrong.body, f"the answer does not name model_seq_id: {wrong}")
    for what, route, body, kind in (
        ("no JSON", "create_model", b"{", "application/json"),
        ("no object", "asample", b"[]", "application/json"),
        ("no protobuf", "forward_backward", b"\xff\xff\xff", "application/x-protobuf"),
    ):
        answer = remote.post(route, body, Content_Type=kind)
        expect(400 <= answer.status < 500, f"{what} to {route}: {answer}")
        expect(answer.body, f"{what} to {route}: clients attribute an empty response to a proxy")
    return f"HTTP {wrong.status}, naming model_seq_id"


@check("S6")
def unknown_things_are_not_found(remote: Remote) -> str:
    """Unknown ids are a 404: models, samplers, checkpoints, futures, routes."""
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    cases = {
        "model": remote.post("get_info", {"model_id": "unknown:train:0"}),
        "sampler": remote.post("asample", {**sample, "sampling_session_id": "no:sample:0"}),
        "future": remote.post("retrieve_future", {"request_id": "nothing"}),
        "checkpoint": remote.post("weights_info", {"tinker_path": "tinker://a:train:0/weights/b"}),
        "route": remote.post("no_such_route", {}),
    }
    wrong = {what: str(answer) for what, answer in cases.items() if answer.status != 404}
    expect(not wrong, f"not a 404: {wrong}")
    return ", ".join(cases)


@check("S4")
def a_refused_pass_changes_nothing(remote: Remote) -> str:
    """A batch with one invalid datum is refused as a whole; the others leave no gradient."""
    model = remote.model()
    before = model.logprobs()
    bad = Datum(
        model_input=ModelInput.from_ints(TEXTS[0][:-1]),
        loss_fn_inputs={"target_tokens": TEXTS[0][1:-2], "weights": [1.0] * (len(TEXTS[0]) - 3)},
    )
    taken = model.next
    answer = model.submit_pass([*batch(), bad])
    reason = refused(remote, answer)
    expect(reason, "targets shorter than the input were accepted")
    if answer.status != 200:
        model.next = taken
    remote.result(remote.request_id(model.submit_step()))
    difference = max_difference(model.logprobs(), before)
    expect(difference < 1e-4, f"the next step changed logprobs by {difference:.3g}")
    return reason
