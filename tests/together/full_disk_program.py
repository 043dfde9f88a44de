"""
Trains with the official SDK and prints the result of each step.

    python full_disk_program.py BASE TOKENS STEPS
"""

import sys

import tinker
from tinker import types


def main(base: str, tokens: int, steps: int) -> None:
    client = tinker.ServiceClient().create_lora_training_client(base_model=base, rank=8)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5] * tokens),
        loss_fn_inputs={"target_tokens": [1] * tokens, "weights": [1.0] * tokens},
    )
    for _ in range(steps):
        passed = client.forward_backward([datum], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-3))
        passed.result()
        metrics = stepped.result().metrics
        print(int((metrics or {})["value:sum"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
