"""
Thousands of random operations of several clients under kills, engine crashes and network faults.

The server computes with integers, so a sequential reference model gives the expected answer of each
operation. The seed alone decides the operations of each client.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinkex
from qa.chaos.history import Event, Recorder, Violation, check
from qa.chaos.reference_models import IntegerModel
from qa.faults.proxy import fault_proxy
from server.echo import BASE
from tinkex import types

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 4
#: Number of operations of a client that are pending at the same time.
MAX_PENDING = 12
ADAM = types.AdamParams(learning_rate=1e-2)
TIMEOUT_S = 240.0


class RestartingServer:
    """A server process that is restarted whenever it exits; its socket stays open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._stopping = False
        self.starts = 0
        self._log = (folder.parent / f"{folder.name}.log").open("ab")
        self._process = self._start()
        self._restarter = threading.Thread(target=self._restart_forever, daemon=True)
        self._restarter.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        descriptor = self._socket.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "qa.chaos.echo_server", str(descriptor), str(self._folder)],
            cwd=ROOT,
            pass_fds=(descriptor,),
            stdout=self._log,
            stderr=self._log,
        )

    def _restart_forever(self) -> None:
        while True:
            self._process.wait()
            if self._stopping:
                return
            self._process = self._start()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._stopping = True
        self._process.kill()
        self._restarter.join(20)
        self._socket.close()
        self._log.close()


@contextmanager
def restarting_server(folder: Path) -> Iterator[RestartingServer]:
    folder.mkdir(parents=True, exist_ok=True)
    server = RestartingServer(folder)
    try:
        yield server
    finally:
        server.close()


@dataclass
class Shared:
    """The history, and checkpoints that all clients may use."""

    history: list[Event] = field(default_factory=list)
    #: Paths of completed saves, by kind.
    saved: dict[str, list[str]] = field(default_factory=lambda: {"save": [], "sampler": []})

    def add(self, event: Event) -> None:
        self.history.append(event)

    @property
    def answers(self) -> int:
        return len(self.history) // 2


class Trainer:
    """One client with one model, in its own thread."""

    def __init__(self, number: int, seed: int, url: str, shared: Shared, operations: int) -> None:
        self._number, self._url, self._shared = number, url, shared
        self._operations = operations
        self._rng = random.Random(f"{seed} {number}")
        self._recorder = Recorder(f"client-{number}", shared.add)
        self._model = f"model-{number}"
        self._pending: list[tuple[int, Any, Any]] = []
        self._samplers: dict[str, tinkex.SamplingClient] = {}
        self._saves = 0

    def run(self) -> None:
        with tinkex.ServiceClient(base_url=self._url) as service:
            self._service = service
            self._training = service.create_lora_training_client(BASE, rank=4, seed=self._number)
            self._rest = tinkex.RestClient(base_url=self._url)
            self._recorder.answer(self._recorder.submit("create", self._model))
            actions = {
                self._pass: 30,
                self._step: 20,
                self._forward: 10,
                self._sample: 30,
                self._save: 2,
                self._save_for_sampler: 2,
                self._load: 2,
                self._list: 1,
            }
            # Some actions submit nothing, such as a load before the first save.
            while self._recorder.submitted < self._operations:
                self._rng.choices([*actions], [*actions.values()])[0]()
                self._wait(left=MAX_PENDING)
            self._wait()

    def _submit(self, kind: str, target: str, argument: Any, submit: Any, read: Any) -> None:
        number = self._recorder.submit(kind, target, argument)
        self._pending.append((number, submit(), read))

    def _wait(self, left: int = 0) -> None:
        while len(self._pending) > left:
            number, future, read = self._pending.pop(0)
            try:
                answer = read(future.result(TIMEOUT_S))
            except Exception as error:
                self._recorder.answer(number, error=repr(error))
                raise
            self._recorder.answer(number, answer)

    def _pass(self) -> None:
        tokens = self._rng.randrange(1, 9)
        data = [_datum(tokens)]
        self._submit(
            "pass",
            self._model,
            tokens,
            lambda: self._training.forward_backward(data, "cross_entropy"),
            _value_and_gradient,
        )

    def _forward(self) -> None:
        data = [_datum(3)]
        self._submit(
            "forward",
            self._model,
            None,
            lambda: self._training.forward(data, "cross_entropy"),
            _value_and_gradient,
        )

    def _step(self) -> None:
        self._submit(
            "step",
            self._model,
            None,
            lambda: self._training.optim_step(ADAM),
            lambda answer: int(answer.metrics["value:sum"]),
        )

    def _save(self) -> None:
        self._saves += 1
        self._submit(
            "save",
            self._model,
            None,
            lambda: self._training.save_state(f"state-{self._saves}"),
            lambda answer: self._share("save", answer.path),
        )

    def _save_for_sampler(self) -> None:
        self._saves += 1
        self._submit(
            "save_for_sampler",
            self._model,
            None,
            lambda: self._training.save_weights_for_sampler(f"sampler-{self._saves}"),
            lambda answer: self._share("sampler", answer.path),
        )

    def _share(self, kind: str, path: str) -> str:
        self._shared.saved[kind].append(path)
        return path

    def _load(self) -> None:
        """Loads a checkpoint that this or another client saved."""
        if paths := self._shared.saved["save"]:
            path = self._rng.choice(paths)
            self._submit(
                "load", self._model, path, lambda: self._training.load_state(path), lambda _: None
            )

    def _sample(self) -> None:
        paths = self._shared.saved["sampler"]
        if not paths:
            return
        path = self._rng.choice(paths)
        if path not in self._samplers:
            self._samplers[path] = self._service.create_sampling_client(model_path=path)
        sampling = self._samplers[path]
        # Few different requests, so that the same request is repeated much later.
        prompt, seed, count = self._rng.randrange(3), self._rng.randrange(3), 4
        params = types.SamplingParams(max_tokens=count, seed=seed)
        given = types.ModelInput.from_ints([prompt])
        self._submit(
            "sample",
            path,
            [prompt, seed, count],
            lambda: sampling.sample(given, 1, params),
            lambda answer: list(answer.sequences[0].tokens),
        )

    def _list(self) -> None:
        run = self._training.model_id
        self._submit(
            "list",
            self._model,
            None,
            lambda: self._rest.list_checkpoints(run),
            lambda answer: [each.tinker_path for each in answer.checkpoints],
        )


def _datum(tokens: int) -> types.Datum:
    inputs = {"target_tokens": [1] * tokens, "weights": [1.0] * tokens}
    return types.Datum(model_input=types.ModelInput.from_ints([5] * tokens), loss_fn_inputs=inputs)


def _value_and_gradient(output: types.ForwardBackwardOutput) -> list[int]:
    return [int(output.metrics["loss:sum"]), int(output.metrics["gradient:sum"])]


@dataclass(frozen=True, kw_only=True)
class Report:
    operations: int
    violations: list[Violation]
    #: Numbers of web kills, engine crashes and network faults.
    faults: Counter[str]
    errors: list[str]
    wall_s: float

    def lines(self) -> list[str]:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return [
            f"operations: {self.operations}",
            f"faults: {faults}",
            f"violations: {len(self.violations)}",
            *self.errors,
            f"wall time: {self.wall_s:.0f} s",
        ]


def run(
    *,
    folder: Path,
    seed: int,
    operations: int,
    web_kills: int,
    engine_crashes: int,
    fault_rate: float = 0.02,
) -> Report:
    """Runs the operations, with kills and crashes at random moments."""
    began_s = time.monotonic()
    shared = Shared()
    faults: Counter[str] = Counter()
    errors: list[str] = []
    rng = random.Random(seed)
    last = int(operations * 0.9)
    kills = sorted(
        [(rng.randrange(last), signal.SIGKILL) for _ in range(web_kills)]
        + [(rng.randrange(last), signal.SIGUSR1) for _ in range(engine_crashes)]
    )
    with (
        restarting_server(folder) as server,
        fault_proxy(server.url, seed=seed, rate=fault_rate) as proxy,
    ):
        trainers = [
            Trainer(number, seed, proxy.url, shared, -(-operations // CLIENTS))
            for number in range(CLIENTS)
        ]

        def guarded(trainer: Trainer) -> None:
            try:
                trainer.run()
            except Exception as error:  # noqa: BLE001  part of the report
                errors.append(repr(error))

        threads = [threading.Thread(target=guarded, args=(trainer,)) for trainer in trainers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.002)
            while kills and shared.answers >= kills[0][0]:
                _, number = kills.pop(0)
                server.send(number)
                faults["web kills" if number is signal.SIGKILL else "engine crashes"] += 1
        faults["network faults"] = sum(proxy.faults.values())
    return Report(
        operations=sum(event.answered for event in shared.history),
        violations=check(shared.history, IntegerModel()),
        faults=faults,
        errors=errors,
        wall_s=time.monotonic() - began_s,
    )
