"""Samples and trains through the official SDK with a key, slowly enough that a token expires.

Runs in the SDK's own environment, with TINKER_BASE_URL and TINKER_API_KEY set; prints one line of JSON.
"""

import json
import os
import sys
import time

import tinker
from tinker import types

BASE, PAUSE_S = sys.argv[1], float(sys.argv[2])


def sample(client: tinker.SamplingClient, count: int) -> int:
    prompt = types.ModelInput.from_ints([1, 2, 3])
    params = types.SamplingParams(max_tokens=1)
    asked = [client.sample(prompt, num_samples=1, sampling_params=params) for _ in range(count)]
    return sum(len(one.result().sequences) for one in asked)


service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model=BASE)
first = sample(sampler, 12)
time.sleep(PAUSE_S)
second = sample(sampler, 2)
trainer = service.create_lora_training_client(base_model=BASE, rank=8)
trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
told = {"first": first, "second": second}
try:
    told["whoami"] = tinker.RestClient().whoami().result().model_dump()
except Exception as error:  # noqa: BLE001  the test looks at what it says
    told["whoami_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(told, default=str), flush=True)
# The SDK's own threads sometimes abort the interpreter while it ends; everything is done here.
os._exit(0)
