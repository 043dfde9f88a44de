"""
One visit of a client to a server: some of everything a user does, then it leaves, in order or not.

    python client_program.py tinkex|tinker BASE SEED SECONDS

Runs unmodified with our client and with the official SDK, each in its own environment, with
TINKER_BASE_URL and TINKER_API_KEY set. Prints one line of JSON: what it did how often, and what
went wrong that should not have.
"""

import asyncio
import gc
import importlib
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

WHICH, BASE, SEED, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

tinker: Any = importlib.import_module(WHICH)
types: Any = importlib.import_module(f"{WHICH}.types")

VOCABULARY = 400
#: Steps of training with each model before it is left.
STEPS = 6
#: Samples that are asked for at once.
BURST = 24
#: The least the API knows; so visitors delete checkpoints of theirs, all but the newest.
TTL_S = 3600
CHECKPOINTS = 6
#: Who is so late says what it waits for.
OVERDUE_S = 120.0

rng = random.Random(SEED)
done: Counter[str] = Counter()


def tokens(count: int) -> list[int]:
    return [rng.randrange(20, VOCABULARY) for _ in range(count)]


def prompt() -> Any:
    return types.ModelInput.from_ints(tokens(rng.randrange(4, 60)))


def params(most: int = 12) -> Any:
    return types.SamplingParams(max_tokens=rng.randrange(1, most + 1), seed=rng.randrange(10**6))


def batch() -> list[Any]:
    data = []
    for _ in range(rng.randrange(1, 5)):
        text = tokens(rng.randrange(8, 48))
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(text[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData(data=text[1:], dtype="int64"),
                    "weights": types.TensorData(data=[1.0] * (len(text) - 1), dtype="float32"),
                },
            )
        )
    return data


class Visit:
    """One session, and what is done in it."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.sampler = self.service.create_sampling_client(base_model=BASE)
        self.rest = self.service.create_rest_client()
        self.saved: str | None = None

    def train(self) -> None:
        """Two models side by side, a sampler of each step, checkpoints that are kept for a while."""
        rank = rng.choice((4, 8))
        models = [
            self.service.create_lora_training_client(base_model=BASE, rank=rank) for _ in range(2)
        ]
        step = types.AdamParams(learning_rate=1e-3)
        for number in range(STEPS):
            passed = [model.forward_backward(batch(), "cross_entropy") for model in models]
            stepped = [model.optim_step(step) for model in models]
            for one in (*passed, *stepped):
                one.result()
            done["steps"] += len(models)
            model = models[number % 2]
            now = model.save_weights_and_get_sampling_client()
            for one in [now.sample(prompt(), 2, params()) for _ in range(4)]:
                one.result()
            done["ephemeral samplers"] += 1
        path = models[0].save_state("kept", ttl_seconds=TTL_S).result().path
        models[1].save_weights_for_sampler("shown", ttl_seconds=TTL_S).result()
        models[1].load_state(path).result()
        self.saved = path
        done["saves"] += 2

    def burst(self) -> None:
        asked = [self.sampler.sample(prompt(), rng.randrange(1, 4), params()) for _ in range(BURST)]
        for one in asked:
            one.result()
        done["samples"] += len(asked)

    def logprobs(self) -> None:
        self.sampler.compute_logprobs(prompt()).result()
        done["prompts scored"] += 1

    def give_up(self) -> None:
        """A long sample that its caller does not want any more."""
        long = types.SamplingParams(max_tokens=1500, seed=1, stop=[])

        async def begin() -> None:
            waiting = [
                asyncio.ensure_future(self.sampler.sample_async(prompt(), 4, long))
                for _ in range(3)
            ]
            await asyncio.sleep(rng.uniform(0.05, 0.5))
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

        asyncio.run(begin())
        done["cancelled"] += 3

    def look_through(self) -> None:
        self.rest.list_training_runs(limit=20).result()
        self.rest.list_sessions(limit=20).result()
        self.service.get_server_capabilities()
        kept = self.rest.list_user_checkpoints(limit=100).result().checkpoints
        for one in sorted(kept, key=lambda one: one.time)[:-CHECKPOINTS]:
            self.rest.delete_checkpoint_from_tinker_path(one.tinker_path).result()
            done["deleted"] += 1
        done["listings"] += 4

    def refused(self) -> None:
        """Things that cannot be done, and must be told so at once."""
        model = self.service.create_lora_training_client(base_model=BASE, rank=4)
        for attempt in (
            lambda: self.service.create_lora_training_client(base_model="no/such", rank=4),
            lambda: self.service.create_sampling_client(model_path="tinker://no:train:0/weights/x"),
            lambda: model.load_state("tinker://no:train:0/weights/x").result(),
            lambda: model.forward_backward(batch(), "no_such_loss").result(),
            lambda: self.sampler.sample(types.ModelInput.from_ints([10**6]), 1, params()).result(),
        ):
            try:
                attempt()
            except Exception as error:  # each client has its own kinds
                if "connect" in str(error).lower():
                    raise
                done["refused"] += 1
            else:
                raise AssertionError("something impossible was done")

    def stream(self) -> None:
        """Read to the end, and left half-way."""
        for most in (None, 3):
            with self.sampler.sample_stream(prompt(), 2, params(40)) as stream:
                for number, _ in enumerate(stream):
                    if number == most:
                        break
        done["streams"] += 2

    def download(self) -> None:
        if self.saved is None:
            return
        from tinkex.client.files.checkpoint_download import download_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            try:
                download_checkpoint(self.saved, Path(folder) / "it", rest=self.rest)
            except tinker.NotFoundError:
                done["downloads too late"] += 1
            else:
                done["downloads"] += 1

    def leave(self) -> str:
        """In order, without a word, or in the middle of things."""
        how = rng.choice(("closed", "left", "vanished"))
        if how == "closed" and WHICH == "tinkex":
            self.service.close("success").result()
        if how == "vanished":
            model = self.service.create_lora_training_client(base_model=BASE, rank=4)
            model.forward_backward(batch(), "cross_entropy")
            long = types.SamplingParams(max_tokens=100, seed=1, stop=[])
            self.begun = [self.sampler.sample(prompt(), 2, long) for _ in range(10)]
            time.sleep(rng.uniform(0.0, 0.5))
        return how


def tell_where(overdue_s: float) -> None:
    """Where everything stands in a visit that should have ended so long ago, on standard error."""
    time.sleep(SECONDS + overdue_s)
    loops = [one for one in gc.get_objects() if isinstance(one, asyncio.AbstractEventLoop)]
    lines = [f"{name}: {_where(frame)}" for name, frame in sys._current_frames().items()]
    tasks = [task for loop in loops for task in asyncio.all_tasks(loop)]
    lines += [f"{task.get_name()}: {_waits(task.get_coro())}" for task in tasks]
    sys.stderr.write("\n".join([json.dumps(done), *lines]) + "\n")
    sys.stderr.flush()


def _where(frame: Any) -> str:
    places = []
    while frame is not None:
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places[:12])


def _waits(coroutine: Any) -> str:
    """What a coroutine awaits, from outside to inside."""
    places = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join([*places, repr(coroutine)[:200]])


def main() -> None:
    threading.Thread(target=tell_where, args=(OVERDUE_S,), daemon=True).start()
    until_s = time.monotonic() + SECONDS
    errors: list[str] = []
    try:
        visit = Visit()
        actions = [visit.train, visit.burst, visit.give_up, visit.look_through, visit.refused]
        actions += [visit.logprobs, visit.burst]
        if WHICH == "tinkex":
            actions += [visit.stream, visit.download]
        while time.monotonic() < until_s:
            rng.shuffle(actions)
            for act in actions:
                if time.monotonic() < until_s:
                    act()
        done[visit.leave()] += 1
    except BaseException:  # noqa: BLE001  whatever it is, it is what the soak looks for
        errors.append(" ".join(traceback.format_exc().split())[-500:])
    sys.stdout.write(json.dumps({"done": done, "errors": errors}) + "\n")
    sys.stdout.flush()
    # Nothing is tidied up: who leaves in order has said so.
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
