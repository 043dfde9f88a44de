"""
Trains a model to name the color of pictures, with the official SDK or with tinkex.

    python images_program.py MODULE BASE_MODEL PICTURES [ENGINE]

MODULE is `tinker` or `tinkex`. PICTURES is a JSON file of `images.py`. With ENGINE, a process id, the
engine is killed during a step. Prints one line of JSON that `images.py` checks.
"""

import base64
import importlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

tinker: Any = importlib.import_module(sys.argv[1])
types: Any = tinker.types

STEPS = 22
BLIND_STEPS = 8
KILLED_AT = 5
ADAM = types.AdamParams(learning_rate=1e-2)
BEFORE, AFTER = [11, 12, 13], [14, 15]


def prompt_of(picture: dict[str, Any], *, seen: bool = True, **changed: Any) -> Any:
    """A prompt; not `seen`: with text tokens in place of the picture."""
    count = picture["tokens"]
    chunk = types.EncodedTextChunk(tokens=[16] * count)
    if seen:
        # Of every other picture, only the server knows the number of tokens.
        known = {"expected_tokens": count} if picture["format"] == "png" else {}
        settings = {"format": picture["format"], **known, **changed}
        chunk = types.ImageChunk(data=base64.b64decode(picture["data"]), **settings)
    text = [types.EncodedTextChunk(tokens=tokens) for tokens in (BEFORE, AFTER)]
    return types.ModelInput(chunks=[text[0], chunk, text[1]])


def datum(picture: dict[str, Any], *, seen: bool = True) -> Any:
    """The token of the color follows the prompt; nothing else counts."""
    others = len(BEFORE) + picture["tokens"] + len(AFTER) - 1
    return types.Datum(
        model_input=prompt_of(picture, seen=seen),
        loss_fn_inputs={
            "target_tokens": [0] * others + [picture["token"]],
            "weights": [0.0] * others + [1.0],
        },
    )


def train(client: Any, data: list[Any], steps: int, engine: int | None = None) -> list[float]:
    losses = []
    for step in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(ADAM)
        if engine is not None and step == KILLED_AT:
            os.kill(engine, signal.SIGKILL)
        losses.append(passed.result().metrics["loss:sum"] / len(data))
        stepped.result()
    return losses


def refusals(client: Any, sampler: Any, picture: dict[str, Any]) -> list[str]:
    """What a wrong number of tokens and a damaged file are answered with."""
    once = types.SamplingParams(max_tokens=1)
    found = []
    damaged = {**picture, "data": base64.b64encode(base64.b64decode(picture["data"])[:60]).decode()}
    for prompt in (prompt_of(picture, expected_tokens=99), prompt_of(damaged)):
        try:
            sampler.sample(prompt, num_samples=1, sampling_params=once).result()
        except Exception as error:  # noqa: BLE001  each SDK has its own
            found.append(str(error))
    try:
        client.forward([datum(damaged)], "cross_entropy").result()
    except Exception as error:  # noqa: BLE001
        found.append(str(error))
    return found


def main(base_model: str, pictures: list[dict[str, Any]], engine: int | None) -> dict[str, Any]:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    data = [datum(picture) for picture in pictures]
    losses = train(training, data, STEPS, engine)
    saved = training.save_state("half").result().path
    later = train(training, data, 2)
    again = train(service.create_training_client_from_state_with_optimizer(saved), data, 2)
    blind = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)

    sampler = training.save_weights_and_get_sampling_client("trained")
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])
    answers = []
    for _ in range(2):
        waiting = [
            sampler.sample(prompt_of(picture), num_samples=2, sampling_params=greedy)
            for picture in pictures
        ]
        answers += [one.result() for one in waiting]
    output = training.forward(data, "cross_entropy").result()
    (first, *_) = pictures
    return {
        "losses": losses,
        "later": later,
        "again": again,
        "blind": train(blind, [datum(picture, seen=False) for picture in pictures], BLIND_STEPS),
        "sampled": [
            [(list(one.tokens), list(one.logprobs)) for one in answer.sequences]
            for answer in answers
        ],
        "logprobs": [out["logprobs"].data[-1] for out in output.loss_fn_outputs],
        "refusals": refusals(training, sampler, first),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _, _, name, file, *engine = sys.argv
    found = main(name, json.loads(Path(file).read_text()), int(engine[0]) if engine else None)
    print(json.dumps(found))
    sys.stdout.flush()
