"""A training program written for the official SDK, from 0.4.1 to 0.36.0.

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
It memorises four sequences, saves, samples them back, and loads the state into a second client.
"""

import json
import random
import sys
import warnings

import tinker
from tinker import types

STEPS = 60
PROMPT_TOKENS = 4


def sequences(vocabulary: int) -> list[list[int]]:
    """Four different sequences of 24 tokens, the same ones every time."""
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


def main(base_model: str, vocabulary: int) -> dict[str, object]:
    texts = sequences(vocabulary)
    data = [datum(tokens) for tokens in texts]
    tokens_in_all = sum(len(tokens) - 1 for tokens in texts)

    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)

    losses = []
    for _ in range(STEPS):
        # Both are sent before the first is waited for, as the documentation advises.
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
        "model_name": training.get_info().model_data.model_name,
        "served": [m.model_name for m in service.get_server_capabilities().supported_models],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
    sys.stdout.flush()
