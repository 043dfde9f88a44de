"""
A training program for the official SDK or for tinkex that records its operations and their results.

    python client_program.py tinker|tinkex BASE_MODEL NAME STEPS

Runs one round for each line on standard input. Writes events as lines of JSON (`history.Event`) to
standard output, then `{"round": N}`. Every round does the same work on a new model, so every round
must have the same results. Imports nothing of this repository, because the official SDK has its own
environment.
"""

import importlib
import json
import random
import sys
import threading
import warnings

#: Number of steps that are pending before the program waits for the oldest.
MAX_PENDING = 2
#: The initial state of the second model of a round, whose answers are recorded separately.
SECOND = 1000


class EventLog:
    """Writes events to standard output, from several threads."""

    def __init__(self, client):
        self._client = client
        self._lock = threading.Lock()
        self._next = 0

    def submit(self, kind, target, argument=None):
        with self._lock:
            number = self._next
            self._next += 1
            self.write(
                operation=number, answered=False, kind=kind, target=target, argument=argument
            )
        return number

    def answer(self, number, answer=None, error=None):
        with self._lock:
            self.write(operation=number, answered=True, answer=answer, error=error)

    def write(self, **event):
        print(json.dumps({"client": self._client, **event}), flush=True)


class Submitter:
    """Submits operations and waits for their futures in the same order."""

    def __init__(self, log):
        self._log = log
        self._pending = []

    def submit(self, kind, target, argument, submit, read):
        number = self._log.submit(kind, target, argument)
        try:
            self._pending.append((number, submit(), read))
        except Exception as error:
            self._log.answer(number, error=repr(error))
            raise

    def wait(self, left=0):
        while len(self._pending) > left:
            number, future, read = self._pending.pop(0)
            try:
                answer = read(future.result())
            except Exception as error:
                self._log.answer(number, error=repr(error))
                raise
            self._log.answer(number, answer)

    def do(self, kind, target, argument, action):
        """Runs a blocking operation; `action` returns its result and the answer to record."""
        number = self._log.submit(kind, target, argument)
        try:
            result, answer = action()
        except Exception as error:
            self._log.answer(number, error=repr(error))
            raise
        self._log.answer(number, answer)
        return result


def batch(types, step, part):
    """Two sequences that depend on the step and the part alone."""
    draw = random.Random(f"{step} {part}")
    data = []
    for _ in range(2):
        tokens = [draw.randrange(10, 60) for _ in range(9)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return data


def pass_content(output):
    logprobs = [list(map(float, each["logprobs"].data)) for each in output.loss_fn_outputs]
    return {"loss": float(output.metrics["loss:sum"]), "logprobs": logprobs}


def sampled(answer):
    return {"tokens": [list(map(int, each.tokens)) for each in answer.sequences]}


def run_round(tinker, log, base_model, name, number, steps):
    types = tinker.types
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    model = f"{name}/{number}"
    steps_of, samples_of = Submitter(log), Submitter(log)
    log.answer(log.submit("create", model, 0))
    adam = types.AdamParams(learning_rate=1e-2)
    samplers = []
    for step in range(steps):
        # Every third step has two passes, so that a kill can hit an accumulated gradient.
        for part in range(2 if step % 3 == 0 else 1):
            data = batch(types, step, part)
            steps_of.submit(
                "pass",
                model,
                [step, part],
                lambda data=data: training.forward_backward(data, "cross_entropy"),
                pass_content,
            )
        steps_of.submit("step", model, step, lambda: training.optim_step(adam), lambda _: None)
        steps_of.wait(left=2 * MAX_PENDING)
        if step % 4 == 3:
            steps_of.wait()
            label = f"{model}#{step}"
            sampling = steps_of.do(
                "save_for_sampler",
                model,
                label,
                lambda label=label: (training.save_weights_and_get_sampling_client(), label),
            )
            samplers.append((label, sampling))
            submit_samples(types, samples_of, label, sampling)
            samples_of.wait(left=4)
    steps_of.wait()
    path = steps_of.do(
        "save", model, "final", lambda: 2 * [training.save_state("final").result().path]
    )
    run = path.removeprefix("tinker://").partition("/")[0]
    rest = service.create_rest_client()

    def listed():
        found = [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]
        return found, [each for each in found if "/weights/" in each]

    steps_of.do("list", model, None, listed)
    # Older samplers must still return the same samples.
    for label, sampling in samplers:
        submit_samples(types, samples_of, label, sampling)
    second = f"{model}/second"
    log.answer(log.submit("create", second, SECOND))
    loaded = steps_of.do(
        "load", second, path, lambda: (service.create_training_client_from_state(path), None)
    )
    data = batch(types, 0, 0)
    for target, client in ((model, training), (second, loaded)):
        steps_of.submit(
            "forward",
            target,
            None,
            lambda client=client: client.forward(data, "cross_entropy"),
            pass_content,
        )
    steps_of.wait()
    samples_of.wait()


def submit_samples(types, submitter, label, sampling):
    for seed in range(2):
        prompt = types.ModelInput.from_ints([11 + seed, 12, 13])
        params = types.SamplingParams(max_tokens=6, seed=seed, temperature=1.0)
        submitter.submit(
            "sample",
            label,
            seed,
            lambda prompt=prompt, params=params: sampling.sample(prompt, 2, params),
            sampled,
        )


def main():
    module, base_model, name, steps = sys.argv[1:]
    warnings.simplefilter("ignore")
    tinker = importlib.import_module(module)
    log = EventLog(name)
    for number, _ in enumerate(sys.stdin):
        run_round(tinker, log, base_model, name, number, int(steps))
        print(json.dumps({"round": number}), flush=True)


if __name__ == "__main__":
    main()
