"""One case of a defect: the program that either client runs, and the judges of its output."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from qa.defects.services import bodies_of, requests_of
from tinkex.testing import FakeService

KEY = "tml-defect-test-key-0123456789"

Judge = Callable[[Any, FakeService], str | None]


@dataclass(frozen=True, kw_only=True)
class Case:
    #: Number in the list of defects, with a letter if it has several cases.
    number: str
    title: str
    program: str
    judge: Judge
    service: Callable[[], FakeService] = FakeService
    #: A program that takes longer counts as hanging.
    limit_s: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)
    needs_torch: bool = False


PRELUDE = """
import asyncio, json, os, sys, threading, time
import {package} as tinker
from {package} import types

def report(value):
    sys.stdout.write(json.dumps(value, default=str) + "\\n")
    sys.stdout.flush()
    os._exit(0)  # exit handlers are not part of the test

def datum(tokens=(1, 2, 3)):
    targets = [token + 1 for token in tokens]
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)},
    )

def trainer(**settings):
    service = tinker.ServiceClient(**settings)
    return service, service.create_lora_training_client("fake/model", rank=4)

def outcome(work):
    started = time.monotonic()
    try:
        work()
        kind, text = "ok", ""
    except BaseException as error:
        kind, text = type(error).__mro__[0].__name__, str(error)[:300]
        bases = [base.__name__ for base in type(error).__mro__]
        return {"kind": kind, "text": text, "bases": bases, "s": time.monotonic() - started}
    return {"kind": kind, "text": text, "bases": [], "s": time.monotonic() - started}

ADAM = types.AdamParams(learning_rate=1e-3)
PARAMS = types.SamplingParams(max_tokens=2)
PROMPT = types.ModelInput.from_ints([1, 2, 3])
"""


def program(case: Case, package: str) -> str:
    text = textwrap.dedent(PRELUDE) + textwrap.dedent(case.program)
    return text.replace("{package}", package)


def read(stdout: str) -> Any:
    """The JSON value in the last line that a program printed."""
    lines = stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


# -- judges ------------------------------------------------------------------------------------------


def finished(value: Any, fake: FakeService) -> str | None:
    return None if value == "finished" else f"the program printed {value!r}"


def in_order(value: Any, fake: FakeService) -> str | None:
    saves = {body["path"]: body["seq_id"] for body in bodies_of(fake, "save_weights_for_sampler")}
    steps = {
        body["adam_params"]["learning_rate"]: body["seq_id"]
        for body in bodies_of(fake, "optim_step")
    }
    wrong = sum(saves[f"n{i}"] > steps[i / 1000 + 0.001] for i in range(len(saves)))
    return (
        f"{wrong} of {len(saves)} saves came after the step that followed them" if wrong else None
    )


def no_key_in_telemetry(value: Any, fake: FakeService) -> str | None:
    if any(KEY.encode() in seen.body for seen in requests_of(fake, "telemetry")):
        return "the API key is in a telemetry event"
    return None


def fails_within(limit_s: float) -> Judge:
    def judge(value: Any, fake: FakeService) -> str | None:
        if value["kind"] == "ok":
            return "no error"
        return f"the error came after {value['s']:.1f} s" if value["s"] > limit_s else None

    return judge


def few_polls(value: Any, fake: FakeService) -> str | None:
    count = len(requests_of(fake, "retrieve_future"))
    return f"{count} polls in two seconds" if count > 60 else None


def raises(*bases: str) -> Judge:
    def judge(value: Any, fake: FakeService) -> str | None:
        if not set(bases) & set(value["bases"]):
            return f"it raised {value['kind']}"
        return None

    return judge


def is_true(otherwise: str) -> Judge:
    def judge(value: Any, fake: FakeService) -> str | None:
        if value is True:
            return None
        return otherwise if value is False else f"{otherwise}: {value}"

    return judge


def no_gap(value: Any, fake: FakeService) -> str | None:
    numbers = sorted(body["seq_id"] for body in bodies_of(fake, "optim_step"))
    expected = list(range(1, len(numbers) + 1))
    return None if numbers == expected else f"numbers {numbers}, so one was skipped"


def one_sampler_number(value: Any, fake: FakeService) -> str | None:
    numbers = {
        body["sampling_session_seq_id"] for body in bodies_of(fake, "save_weights_for_sampler")
    }
    return None if len(numbers) == 1 else f"one save used the numbers {sorted(numbers)}"


def real_round_trip(value: Any, fake: FakeService) -> str | None:
    times = [
        float(seen.headers["x-tinker-create-promise-roundtrip-time"])
        for seen in requests_of(fake, "retrieve_future")
        if "x-tinker-create-promise-roundtrip-time" in seen.headers
        and seen.headers.get("x-tinker-request-type") in ("Sample", "asample", "AsyncSample")
    ] or [
        float(seen.headers["x-tinker-create-promise-roundtrip-time"])
        for seen in requests_of(fake, "retrieve_future")
        if "x-tinker-create-promise-roundtrip-time" in seen.headers
    ]
    return (
        None
        if max(times, default=0) >= 0.2
        else f"it reported {max(times, default=0):.3f} s instead of 0.3"
    )


def few_sockets(value: Any, fake: FakeService) -> str | None:
    return None if value <= 3 else f"{value} sockets stayed open after ten closed clients"
