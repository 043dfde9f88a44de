"""With the official SDK: values that are NaN or infinite, then valid training and sampling. Prints JSON."""

import json
import math
import sys

import tinker
from tinker import types

service = tinker.ServiceClient()
training = service.create_lora_training_client(base_model=sys.argv[1], rank=4)
prompt = types.ModelInput.from_ints([1, 2, 3])
inputs = {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]}
datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
sampler = service.create_sampling_client(base_model=sys.argv[1])


def step(**params: float) -> object:
    training.forward_backward([datum], "cross_entropy").result()
    return training.optim_step(types.AdamParams(**params)).result()


def sample(**params: object) -> object:
    given = types.SamplingParams(max_tokens=2, **params)
    return sampler.sample(prompt, num_samples=1, sampling_params=given).result()


def outcome(work: object, **params: object) -> str:
    try:
        work(**params)
    except Exception as error:  # noqa: BLE001  the test checks the message
        return f"{type(error).__name__}: {error}"
    return ""


refused = {}
if "refused" in sys.argv:
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        for number in (math.nan, math.inf):
            refused[f"{name}={number}"] = outcome(step, **{name: number})
# SDKs before 0.18 send null for None.
usual = [
    outcome(step),
    outcome(step, learning_rate=1e-4),
    outcome(sample),
    outcome(sample, seed=None, stop=None, temperature=0.5),
]
print(json.dumps({"refused": refused, "usual": usual}))
