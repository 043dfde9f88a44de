"""
Samples and trains with the official SDK and an API key, with a pause in which a JWT expires.

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
    futures = [client.sample(prompt, num_samples=1, sampling_params=params) for _ in range(count)]
    return sum(len(one.result().sequences) for one in futures)


service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model=BASE)
first = sample(sampler, 12)
time.sleep(PAUSE_S)
second = sample(sampler, 2)
trainer = service.create_lora_training_client(base_model=BASE, rank=8)
trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
result = {"first": first, "second": second}
try:
    result["whoami"] = tinker.RestClient().whoami().result().model_dump()
except Exception as error:  # noqa: BLE001  the test checks the message
    result["whoami_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(result, default=str), flush=True)
# Threads of the SDK sometimes abort the interpreter while it exits.
os._exit(0)
