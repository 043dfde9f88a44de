"""
One client program: trains, samples, lists, downloads and cancels, then ends cleanly or not.

    python client_program.py tinkex|tinker BASE SEED SECONDS

Runs with tinkex and with the official SDK, each in its own environment, with TINKER_BASE_URL and
TINKER_API_KEY set. Prints one line of JSON: the number of operations by name, and unexpected errors.
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
#: Training steps with each model.
STEPS = 6
#: Number of concurrent samples.
BURST = 24
#: The shortest TTL that the API allows; the program also deletes all but its newest checkpoints.
TTL_S = 3600
CHECKPOINTS = 6
#: A program that is this late prints the stacks of its threads and tasks.
OVERDUE_S = 120.0

rng = random.Random(SEED)
done: Counter[str] = Counter()


def tokens(count: int) -> list[int]:
    return [rng.randrange(20, VOCABULARY) for _ in range(count)]


def prompt() -> Any:
    return types.ModelInput.from_ints(tokens(rng.randrange(4, 60)))


def params(limit: int = 12) -> Any:
    return types.SamplingParams(max_tokens=rng.randrange(1, limit + 1), seed=rng.randrange(10**6))


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


class Program:
    """One session and its operations."""

    def __init__(self) -> None:
        self.service = tinker.ServiceClient()
        self.sampler = self.service.create_sampling_client(base_model=BASE)
        self.rest = self.service.create_rest_client()
        self.saved: str | None = None

    def train(self) -> None:
        """Trains two models in parallel, samples after each step, and saves checkpoints."""
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
        futures = [
            self.sampler.sample(prompt(), rng.randrange(1, 4), params()) for _ in range(BURST)
        ]
        for one in futures:
            one.result()
        done["samples"] += len(futures)

    def logprobs(self) -> None:
        self.sampler.compute_logprobs(prompt()).result()
        done["prompts scored"] += 1

    def cancel(self) -> None:
        """Starts long samples and cancels them."""
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

    def list_and_delete(self) -> None:
        self.rest.list_training_runs(limit=20).result()
        self.rest.list_sessions(limit=20).result()
        self.service.get_server_capabilities()
        kept = self.rest.list_user_checkpoints(limit=100).result().checkpoints
        for one in sorted(kept, key=lambda one: one.time)[:-CHECKPOINTS]:
            self.rest.delete_checkpoint_from_tinker_path(one.tinker_path).result()
            done["deleted"] += 1
        done["listings"] += 4

    def rejected(self) -> None:
        """Sends invalid requests, which must fail at once."""
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
            except Exception as error:  # the clients have different exception classes
                if "connect" in str(error).lower():
                    raise
                done["rejected"] += 1
            else:
                raise AssertionError("an invalid request succeeded")

    def stream(self) -> None:
        """Reads one stream to its end and leaves another early."""
        for limit in (None, 3):
            with self.sampler.sample_stream(prompt(), 2, params(40)) as stream:
                for number, _ in enumerate(stream):
                    if number == limit:
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
        """Ends the session, leaves it open, or leaves with work in progress."""
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


def print_stacks_when_overdue(overdue_s: float) -> None:
    """Prints the stacks of all threads and tasks to standard error when the program is overdue."""
    time.sleep(SECONDS + overdue_s)
    loops = [one for one in gc.get_objects() if isinstance(one, asyncio.AbstractEventLoop)]
    lines = [f"{name}: {_stack(frame)}" for name, frame in sys._current_frames().items()]
    tasks = [task for loop in loops for task in asyncio.all_tasks(loop)]
    lines += [f"{task.get_name()}: {_awaited(task.get_coro())}" for task in tasks]
    sys.stderr.write("\n".join([json.dumps(done), *lines]) + "\n")
    sys.stderr.flush()


def _stack(frame: Any) -> str:
    frames = []
    while frame is not None:
        frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(frames[:12])


def _awaited(coroutine: Any) -> str:
    """The chain of awaits of a coroutine, outermost first."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = coroutine.cr_await
    return " > ".join([*frames, repr(coroutine)[:200]])


def main() -> None:
    threading.Thread(target=print_stacks_when_overdue, args=(OVERDUE_S,), daemon=True).start()
    end_s = time.monotonic() + SECONDS
    errors: list[str] = []
    try:
        program = Program()
        actions = [
            program.train,
            program.burst,
            program.cancel,
            program.list_and_delete,
            program.rejected,
        ]
        actions += [program.logprobs, program.burst]
        if WHICH == "tinkex":
            actions += [program.stream, program.download]
        while time.monotonic() < end_s:
            rng.shuffle(actions)
            for act in actions:
                if time.monotonic() < end_s:
                    act()
        done[program.leave()] += 1
    except BaseException:  # noqa: BLE001  any error is a finding
        errors.append(" ".join(traceback.format_exc().split())[-500:])
    sys.stdout.write(json.dumps({"done": done, "errors": errors}) + "\n")
    sys.stdout.flush()
    # No cleanup at exit: a clean end was requested above.
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
