"""
Trains until its stdin ends, and prints the number of each step. Waits of 0.4 s are mentioned.

    python waiting_program.py URL BASE [LOG FILE]
"""

import logging
import os
import sys
import threading

import aiohttp  # noqa: F401 (loaded with the first request, which would take longer than 0.4 s)

import tinkex
from tinkex import types
from tinkex.client.http import typed_requests

typed_requests.CONNECTION_QUIET_S = 0.0  # the test stops its server twice within seconds


def main(url: str, base: str, log: str | None) -> None:
    if log is not None:
        logging.basicConfig(filename=log, format="%(levelname)s %(name)s %(message)s")
    ended = threading.Event()
    threading.Thread(target=lambda: (os.read(0, 1), ended.set()), daemon=True).start()
    settings = tinkex.Settings.resolve(base_url=url, telemetry=False, wait_notice_s=0.4)
    service = tinkex.ServiceClient(settings=settings)
    training = service.create_lora_training_client(base, rank=8)
    tokens = 20_000  # large enough that the payload is stored as a file
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5] * tokens),
        loss_fn_inputs={"target_tokens": [1] * tokens, "weights": [1.0] * tokens},
    )
    step = 0
    while not ended.wait(0.05):
        training.forward_backward([datum], "cross_entropy").result()
        step += 1
        print(f"step {step}", flush=True)
    service.close("success").result(10)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
