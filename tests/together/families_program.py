"""
Trains and samples base models of several families with the official SDK.

    python families_program.py BASE_MODEL ...

Prints one line of JSON: for each base model what `families.py` checks.
"""

import json
import sys
import warnings

import tinker
from tinker import types

STEPS = 16
#: Longer than the windows of the models.
TOKENS = 20
PROMPT_TOKENS = 12
#: More data than the SDK sends in one request.
MANY = 1100

ADAM = types.AdamParams(learning_rate=2e-2)


def datum(tokens: list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def one_family(service: tinker.ServiceClient, base_model: str) -> dict[str, object]:
    texts = [[(7 * n + 31 * row + n * n) % 390 + 5 for n in range(TOKENS)] for row in range(2)]
    data = [datum(tokens) for tokens in texts]
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    losses = train(training, data, STEPS)
    saved = training.save_state("half").result().path
    later = train(training, data, 3)
    again = train(service.create_training_client_from_state_with_optimizer(saved), data, 3)

    sampler = training.save_weights_and_get_sampling_client("trained")
    greedy = types.SamplingParams(max_tokens=TOKENS - PROMPT_TOKENS, temperature=0.0, stop=[])
    sampled = []
    for tokens in texts:
        prompt = types.ModelInput.from_ints(tokens[:PROMPT_TOKENS])
        answer = sampler.sample(prompt, num_samples=2, sampling_params=greedy).result()
        sampled.append([[list(each.tokens), list(each.logprobs)] for each in answer.sequences])
    # The prompts with their samples, as a forward pass sees them.
    rows = [
        tokens[:PROMPT_TOKENS] + samples[0][0]
        for tokens, samples in zip(texts, sampled, strict=True)
    ]
    output = training.forward([datum(row) for row in rows], "cross_entropy").result()
    prompt_logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(rows[0])).result()
    return {
        "losses": losses,
        "later": later,
        "again": again,
        "metrics": output.metrics,
        "logprobs": [list(out["logprobs"].data) for out in output.loss_fn_outputs],
        "sampled": sampled,
        "prompt_logprobs": prompt_logprobs,
    }


def many(service: tinker.ServiceClient, base_model: str) -> dict[str, object]:
    """The metrics of a batch that the SDK sends in several requests, and of its parts."""
    training = service.create_lora_training_client(base_model=base_model, rank=1, seed=1)
    data = [datum([n % 390 + 5, n * 7 % 390 + 5]) for n in range(MANY)]
    return {
        "merged": training.forward(data, "cross_entropy").result().metrics,
        "parts": [
            training.forward(part, "cross_entropy").result().metrics
            for part in (data[:1024], data[1024:])
        ],
    }


def main(base_models: list[str]) -> dict[str, object]:
    service = tinker.ServiceClient()
    found = {base_model: one_family(service, base_model) for base_model in base_models}
    return {"families": found, "many": many(service, base_models[0])}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1:])))
    sys.stdout.flush()
