"""
A training program for the official SDK or for tinkex, that writes down what it asked and was told.

    python client_program.py tinker|tinkex BASE_MODEL NAME STEPS

Runs one round for each line on standard input, and writes events as lines of JSON (`history.Event`)
on standard output, then `{"round": N}`. Every round is the same work on a new model, so every round
must come to the same results. Needs nothing of this repository: the official SDK has an
environment of its own.
"""

import importlib
import json
import random
import sys
import threading
import warnings

#: Steps that are submitted before the oldest is waited for.
AHEAD = 2
#: Numbers of steps of the second model of a round begin here.
SECOND = 1000


class Told:
    """Standard output, for several threads."""

    def __init__(self, client):
        self._client = client
        self._lock = threading.Lock()
        self._next = 0

    def submit(self, kind, target, asked=None):
        with self._lock:
            number = self._next
            self._next += 1
            self.say(operation=number, answered=False, kind=kind, target=target, asked=asked)
        return number

    def answer(self, number, answer=None, error=None):
        with self._lock:
            self.say(operation=number, answered=True, answer=answer, error=error)

    def say(self, **event):
        print(json.dumps({"client": self._client, **event}), flush=True)


class Asking:
    """Futures by what was asked, waited for in that order."""

    def __init__(self, told):
        self._told = told
        self._waiting = []

    def ask(self, kind, target, asked, submit, read):
        number = self._told.submit(kind, target, asked)
        try:
            self._waiting.append((number, submit(), read))
        except Exception as error:
            self._told.answer(number, error=repr(error))
            raise

    def settle(self, left=0):
        while len(self._waiting) > left:
            number, future, read = self._waiting.pop(0)
            try:
                answer = read(future.result())
            except Exception as error:
                self._told.answer(number, error=repr(error))
                raise
            self._told.answer(number, answer)

    def do(self, kind, target, asked, act):
        """Something that is over when it returns; what it returns, and what was told of it."""
        number = self._told.submit(kind, target, asked)
        try:
            result, answer = act()
        except Exception as error:
            self._told.answer(number, error=repr(error))
            raise
        self._told.answer(number, answer)
        return result


def batch(types, step, part):
    """Two sequences that depend on nothing but their place."""
    draw = random.Random(f"{step} {part}")
    data = []
    for _ in range(2):
        tokens = [draw.randrange(10, 60) for _ in range(9)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 8}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return data


def passed(output):
    logprobs = [list(map(float, each["logprobs"].data)) for each in output.loss_fn_outputs]
    return {"loss": float(output.metrics["loss:sum"]), "logprobs": logprobs}


def drawn(answer):
    return {"tokens": [list(map(int, each.tokens)) for each in answer.sequences]}


def run_round(tinker, told, base_model, name, number, steps):
    types = tinker.types
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    model = f"{name}/{number}"
    steps_of, samples_of = Asking(told), Asking(told)
    told.answer(told.submit("create", model, 0))
    adam = types.AdamParams(learning_rate=1e-2)
    samplers = []
    for step in range(steps):
        # Every third step has two passes: a kill may come with a gradient that was not stepped.
        for part in range(2 if step % 3 == 0 else 1):
            data = batch(types, step, part)
            steps_of.ask(
                "pass",
                model,
                [step, part],
                lambda data=data: training.forward_backward(data, "cross_entropy"),
                passed,
            )
        steps_of.ask("step", model, step, lambda: training.optim_step(adam), lambda _: None)
        steps_of.settle(left=2 * AHEAD)
        if step % 4 == 3:
            steps_of.settle()
            label = f"{model}#{step}"
            sampling = steps_of.do(
                "save_for_sampler",
                model,
                label,
                lambda label=label: (training.save_weights_and_get_sampling_client(), label),
            )
            samplers.append((label, sampling))
            ask_samples(types, samples_of, label, sampling)
            samples_of.settle(left=4)
    steps_of.settle()
    path = steps_of.do(
        "save", model, "final", lambda: 2 * [training.save_state("final").result().path]
    )
    run = path.removeprefix("tinker://").partition("/")[0]
    rest = service.create_rest_client()

    def listed():
        found = [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]
        return found, [each for each in found if "/weights/" in each]

    steps_of.do("list", model, None, listed)
    # Samplers of long ago answer as they did.
    for label, sampling in samplers:
        ask_samples(types, samples_of, label, sampling)
    second = f"{model}/second"
    told.answer(told.submit("create", second, SECOND))
    loaded = steps_of.do(
        "load", second, path, lambda: (service.create_training_client_from_state(path), None)
    )
    data = batch(types, 0, 0)
    for target, client in ((model, training), (second, loaded)):
        steps_of.ask(
            "forward",
            target,
            None,
            lambda client=client: client.forward(data, "cross_entropy"),
            passed,
        )
    steps_of.settle()
    samples_of.settle()


def ask_samples(types, asking, label, sampling):
    for seed in range(2):
        prompt = types.ModelInput.from_ints([11 + seed, 12, 13])
        params = types.SamplingParams(max_tokens=6, seed=seed, temperature=1.0)
        asking.ask(
            "sample",
            label,
            seed,
            lambda prompt=prompt, params=params: sampling.sample(prompt, 2, params),
            drawn,
        )


def main():
    module, base_model, name, steps = sys.argv[1:]
    warnings.simplefilter("ignore")
    tinker = importlib.import_module(module)
    told = Told(name)
    for number, _ in enumerate(sys.stdin):
        run_round(tinker, told, base_model, name, number, int(steps))
        print(json.dumps({"round": number}), flush=True)


if __name__ == "__main__":
    main()
