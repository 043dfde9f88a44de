"""With the official SDK: more checkpoints and runs than allowed. Prints JSON."""

import json
import sys
import time

import tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=sys.argv[1], rank=4)
client.save_state("first").result()

seen = {}
for what, act in {
    "save": lambda: client.save_state("second").result(),
    "save for sampler": lambda: client.save_weights_for_sampler("second").result(),
    "create": lambda: service.create_lora_training_client(base_model=sys.argv[1], rank=4),
    "create from state": lambda: service.create_training_client_from_state(sys.argv[2]),
    "step": lambda: client.optim_step(types.AdamParams(learning_rate=1e-4)).result(),
}.items():
    began = time.monotonic()
    error = ""
    try:
        act()
    except Exception as failed:  # noqa: BLE001  the test checks the message
        error = f"{type(failed).__name__}: {failed}"
    seen[what] = {"error": error, "seconds": time.monotonic() - began}
print(json.dumps(seen))
