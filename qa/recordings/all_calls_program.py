"""
All client calls that `basic_program.py` does not make, with all arguments.

    python all_calls_program.py URL [FOLDER_WITH_TORCH]                     under the official client 0.36.0
    python -m tinkex.as_tinker all_calls_program.py URL                     under ours

`record.py` records the requests of the first; a test runs the second against the same recorder and
compares them field by field.
"""

from __future__ import annotations

import datetime
import json
import pickle
import sys
import time
import urllib.request
import warnings
from typing import Any

BASE_MODEL = "tiny/model"
TOKENS = [1, 17, 99, 4, 2]
RUN = "session-1:train:0"
#: A prompt whose sample never finishes.
NEVER = [6, 6, 6]


def main(base_url: str) -> None:
    import tinker
    from tinker import types

    warnings.simplefilter("ignore")  # experimental and deprecated calls are intended
    service = tinker.ServiceClient(
        {"purpose": "golden"}, "project-1", display_name="every call", base_url=base_url
    )
    training = service.create_lora_training_client(BASE_MODEL)
    service.create_lora_training_client(
        BASE_MODEL,
        rank=4,
        seed=3,
        train_mlp=False,
        train_attn=False,
        user_metadata={"run": "two"},
        optimizer=types.DimuonOptimizerConfig(),
    )
    train(training, types)
    checkpoints(service, training, types)
    custom_losses(service, training, types)
    sampling(base_url, service, types)
    service.close("errored", "on purpose").result()

    # Without a flag of the server, the client restores a state with several requests.
    other = tinker.ServiceClient(base_url=f"{base_url}/plain")
    path = f"tinker://{RUN}/weights/first"
    other.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig())
    other.create_training_client_from_state_with_optimizer(path, BASE_MODEL, {"run": "three"})
    other.close("interrupted").result()
    rest(base_url, tinker, types)
    print("done", tinker.__version__)


def train(training: Any, types: Any) -> None:
    example = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={"target_tokens": [17, 99, 4, 2, 0], "weights": [1.0] * 5},
    )
    training.forward_backward([example], "cispo", {"clip_low_threshold": 0.5}).result()
    training.optim_step(
        types.AdamParams(
            learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.01, grad_clip_norm=2
        )
    ).result()
    training.optim_step(types.DimuonParams(learning_rate=0.5, grad_clip_norm=1, beta1=0.8)).result()


def checkpoints(service: Any, training: Any, types: Any) -> None:
    training.save_state("first").result()
    training.save_state("second", 3600, True, {"kept": "yes"}).result()
    training.save_weights_for_sampler("third", 3600, {"kept": "no"}).result()
    training.save_weights_external("fourth", 3600, ["age1qqqq"]).result()
    path = f"tinker://{RUN}/weights/first"
    training.load_state(path, "tml-other").result()
    training.load_state_with_optimizer(path, "tml-other").result()
    service.create_training_client_from_state(
        path, BASE_MODEL, {"run": "five"}, "tml-other", types.AdamOptimizerConfig()
    )
    service.create_training_client_from_state_with_optimizer(path, None, {"run": "six"}, "tml-x")
    service.copy_weights(path, ttl_seconds=60, weights_access_token="tml-other").result()


def custom_losses(service: Any, training: Any, types: Any) -> None:
    import torch

    def weighted(logprobs: Any, advantages: Any) -> Any:
        loss = -(torch.exp(logprobs) * advantages).sum()
        return loss, {"custom/seen:sum": advantages.sum()}

    handle = service.create_custom_loss(weighted, {"logprobs": 1, "advantages": 1}).result()
    example = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={
            "target_tokens": [17, 99, 4, 2, 0],
            "advantages": [1.0, 0.0, 2.0, 1.0, 1.0],
        },
    )
    training.forward_backward_custom([example], handle).result()
    training.forward_backward_custom([example], lambda _, given: (2 * given[0].sum(), {})).result()


def sampling(base_url: str, service: Any, types: Any) -> None:
    prompt = types.ModelInput.from_ints(TOKENS)
    plain = types.SamplingParams()
    client = service.create_sampling_client(
        model_path=f"tinker://{RUN}/sampler_weights/third", record_stability_info=True
    )
    client.sample(prompt, 1, plain).result()
    client.sample(prompt, 3, types.SamplingParams(stop=[])).result()
    client.sample(prompt, 1, types.SamplingParams(stop="\n")).result()
    client.sample(prompt, 1, types.SamplingParams(stop=[3, 4])).result()
    client.sample(prompt, 1, plain, include_prompt_logprobs=True, prompt_logprobs_last_n=2).result()
    client.sample(prompt, 1, plain, topk_sample_logprobs=3).result()
    client.sample(prompt, 1, plain, topk_prompt_logprobs=2).result()
    client.sample(prompt, 1, plain, prompt_alt_tokens_k=2).result()
    chunks = [
        types.EncodedTextChunk(tokens=[5]),
        types.ImageChunk(data=b"\x89PNG not really", format="png", expected_tokens=2),
        types.ImageAssetPointerChunk(location="tinker://asset", format="jpeg", expected_tokens=2),
    ]
    client.sample(types.ModelInput(chunks=chunks), 1, plain).result()
    client.compute_logprobs(prompt).result()
    client.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
    clone = pickle.loads(pickle.dumps(client))
    clone.sample(prompt, 1, plain).result()
    waiting = client.sample(types.ModelInput.from_ints(NEVER), 1, plain)
    wait_until_seen(base_url, "unanswered%20polls", 3)  # the client is now waiting for this sample
    waiting.cancel()
    wait_until_seen(base_url, "cancel_future", 1)
    assert client.get_base_model() == BASE_MODEL


def wait_until_seen(base_url: str, what: str, count: int) -> None:
    """Waits until a counter of the recorder has reached the value."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{base_url}/seen/{what}") as answer:
            if json.load(answer)["count"] >= count:
                return
        time.sleep(0.02)
    raise TimeoutError(what)


def rest(base_url: str, tinker: Any, types: Any) -> None:
    client = tinker.RestClient(base_url=base_url)
    path = f"tinker://{RUN}/weights/first"
    client.get_training_run(RUN).result()
    client.get_training_run(RUN, access_scope="accessible").result()
    client.get_training_run_by_tinker_path(path).result()
    client.get_weights_info_by_tinker_path(path).result()
    client.list_training_runs().result()
    client.list_training_runs(5, 10, "accessible", "project-1").result()
    client.list_checkpoints(RUN).result()
    client.get_external_weights_urls(f"tinker://{RUN}/external_weights/fourth").result()
    client.delete_checkpoint(RUN, "weights/first").result()
    client.delete_checkpoint_from_tinker_path(path).result()
    client.publish_checkpoint_from_tinker_path(path).result()
    client.unpublish_checkpoint_from_tinker_path(path).result()
    client.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    client.set_checkpoint_ttl_from_tinker_path(path, None).result()
    client.list_user_checkpoints().result()
    client.list_user_checkpoints(5, 10).result()
    client.copy_weights(path, "project-2", ttl_seconds=60, weights_access_token="tml-x").result()
    client.get_session("session-1").result()
    client.list_sessions(5, 10, "accessible").result()
    client.assign_session_project("session-1", "project-2").result()
    client.export_session_trace("session-1").result()
    client.get_sampler("session-1:sample:0").result()
    client.search_sessions(types.SessionSearchRequest()).result()
    client.search_sessions(
        types.SessionSearchRequest(
            session_id="session-1",
            project_ids=["project-1"],
            user_metadata={"run": "one"},
            display_name="a name",
            owner=types.UserSearchOwner(owner_urns=["urn:user-1"]),
            statuses=[types.ActiveSessionStatusQuery(), types.FailedSessionStatusQuery()],
            limit=5,
        )
    ).result()
    admin = tinker.AdminClient(base_url=base_url)
    admin.get_audit_log().result()
    admin.get_audit_log("checkpoints", datetime.date(2026, 1, 2)).result()
    start, end = (datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 2))
    admin.get_billing_usage(start, end).result()
    admin.get_current_checkpoint_storage_usage().result()
    admin.get_current_checkpoint_storage_usage("project-1").result()


if __name__ == "__main__":
    if len(sys.argv) > 2:  # at the end of the path, so that only torch comes from there
        sys.path.append(sys.argv[2])
    main(sys.argv[1])
