"""
A training program for the official SDK, from 0.4.1 to 0.36.0.

    python capabilities_program.py BASE_MODEL VOCABULARY FOLDER_WITH_TORCH

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
It memorizes four sequences, samples them, saves, loads the state into other clients, lists and deletes
checkpoints, and trains with a custom loss.
"""

import json
import random
import sys
import warnings

# Newer SDKs do not install torch, look for it at import, and need it for custom losses. Its folder goes
# to the end of the path, so that all other packages are those of the SDK's environment.
sys.path.extend(sys.argv[3:4])

import tinker
from tinker import types

STEPS = 60
PROMPT_TOKENS = 4


def sequences(vocabulary: int) -> list[list[int]]:
    """Four different, fixed sequences of 24 tokens."""
    draw = random.Random(24)
    return [[10 + n, *(draw.randrange(20, vocabulary) for _ in range(23))] for n in range(4)]


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def logprobs(training: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    output = training.forward(data, "cross_entropy").result()
    return [value for out in output.loss_fn_outputs for value in out["logprobs"].data]


def checkpoints(service: tinker.ServiceClient, path: str) -> dict[str, object]:
    """Lists of the checkpoints of a run, before and after one is deleted."""
    rest = service.create_rest_client()
    run = path.removeprefix("tinker://").partition("/")[0]

    def listed() -> list[list[object]]:
        found = rest.list_checkpoints(run).result().checkpoints
        return sorted([c.tinker_path, c.checkpoint_type, c.public] for c in found)

    def published() -> bool:
        return next(public for listed_path, _, public in listed() if listed_path == path)

    before = listed()
    mine = [c.tinker_path for c in rest.list_user_checkpoints(limit=100).result().checkpoints]
    runs = rest.list_training_runs(limit=100).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    public = published()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    private = not published()
    rest.delete_checkpoint_from_tinker_path(path).result()
    gone = ""
    try:
        service.create_training_client_from_state(path)
    except tinker.TinkerError as error:
        gone = str(error)
    return {
        "before": before,
        "mine": mine,
        "runs": [r.training_run_id for r in runs.training_runs],
        "run": rest.get_training_run(run).result().training_run_id,
        "published": public,
        "unpublished": private,
        "after": listed(),
        "loading_what_was_deleted": gone,
    }


def custom_loss(
    service: tinker.ServiceClient, base_model: str, data: list[types.Datum]
) -> dict[str, object]:
    """Logprobs after a step with a custom loss, and after one with the equal built-in loss."""

    def by_hand(batch, logprobs_list):
        loss = 0.0
        for datum, values in zip(batch, logprobs_list, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_torch()
            loss = loss - (weights * values).sum()
        return loss, {"by_hand": float(loss.detach())}

    found = {}
    for name in ("custom", "built_in"):
        client = service.create_lora_training_client(base_model=base_model, rank=8, seed=3)
        if name == "custom":
            output = client.forward_backward_custom(data, by_hand).result()
        else:
            output = client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        found[name] = logprobs(client, data)
        found[f"{name}_metrics"] = output.metrics
    return found


def main(base_model: str, vocabulary: int) -> dict[str, object]:
    texts = sequences(vocabulary)
    data = [datum(tokens) for tokens in texts]
    tokens_in_all = sum(len(tokens) - 1 for tokens in texts)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)

    losses = []
    for _ in range(STEPS):
        # Submits both before waiting for the first, as the documentation recommends.
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result().metrics["loss:sum"] / tokens_in_all)
        step_metrics = stepped.result().metrics

    saved = training.save_state("memorised").result()
    sampler = training.save_weights_and_get_sampling_client("memorised")
    greedy = types.SamplingParams(max_tokens=24 - PROMPT_TOKENS, temperature=0.0, stop=[])
    sampled = []
    sampled_logprobs = []
    for tokens in texts:
        prompt = types.ModelInput.from_ints(tokens[:PROMPT_TOKENS])
        answer = sampler.sample(prompt, num_samples=2, sampling_params=greedy).result()
        sampled.append([list(sequence.tokens) for sequence in answer.sequences])
        sampled_logprobs.append(list(answer.sequences[0].logprobs))
    prompt_logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(texts[0])).result()

    before = logprobs(training, data)
    second = service.create_lora_training_client(base_model=base_model, rank=8, seed=2)
    untrained = logprobs(second, data)
    second.load_state(saved.path).result()
    after = logprobs(second, data)
    third = service.create_training_client_from_state(saved.path)
    from_state = logprobs(third, data)
    return {
        "version": tinker.__version__,
        "texts": texts,
        "losses": losses,
        "step_metrics": step_metrics,
        "path": saved.path,
        "sampled": sampled,
        "sampled_logprobs": sampled_logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logprobs": before,
        "untrained_logprobs": untrained,
        "loaded_logprobs": after,
        "from_state_logprobs": from_state,
        "custom_loss": custom_loss(service, base_model, data),
        "checkpoints": checkpoints(service, saved.path),
        "model_name": training.get_info().model_data.model_name,
        "served": [m.model_name for m in service.get_server_capabilities().supported_models],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
    sys.stdout.flush()
