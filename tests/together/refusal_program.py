"""With the official SDK: a batch that is too large, then a valid one. Prints JSON."""

import json
import sys
import time

import tinker
from tinker import types

client = tinker.ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=4)
seen = []
for tokens in (int(sys.argv[2]), 10):
    inputs = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5] * tokens), loss_fn_inputs=inputs)
    began = time.monotonic()
    submitted = [
        client.forward_backward([datum], "cross_entropy"),
        client.optim_step(types.AdamParams(learning_rate=1e-4)),
    ]
    errors = []
    for future in submitted:
        try:
            future.result()
        except Exception as error:  # noqa: BLE001  the test checks the message
            errors.append(f"{type(error).__name__}: {error}")
    seen.append({"errors": errors, "seconds": time.monotonic() - began})
print(json.dumps(seen))
