"""
Strange requests, many of them: no answer may be a 5xx, none may hang, no work fail as the server's.

    python tests/fuzz/fuzzing.py [CASES_FOR_EACH_ROUTE] [PROTOBUF_BODIES]       (`make fuzz`)

JSON is made by schemathesis from the server's own OpenAPI page; protobuf by mutating what the official
client really sent (tests/data/wire).
"""

# ruff: noqa: T201

import base64
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from google.protobuf.message import DecodeError

from serving import TINY, serving
from tinkex.conformance.remote import Remote, Trainee, Unexpected
from tinkex.testing import write_tiny_model
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.proto import tinkex_wire_pb2 as pb

RECORDED = HERE.parent / "data" / "wire"
#: An answer that takes longer hangs. Polls are held longer; the servers here hold them shortly.
SLOWEST_S = 20


def schemathesis(url: str, *, cases: int, seed: int = 1, within_s: float = 600) -> str:
    """What schemathesis printed; raises AssertionError when it found something."""
    remote = Remote(url)
    model = remote.model()
    sampler = remote.sampler(base_model=remote.base_model)
    path = model.save_state("fuzz")
    future = remote.submitted(model.submit_step())
    ids = {
        "session_id": [remote.session],
        "model_id": [model.model_id],
        "training_run_id": [model.model_id],
        "run_id": [model.model_id],
        "base_model": [remote.base_model],
        "sampling_session_id": [sampler.sampling_session_id],
        "request_id": [future],
        "model_path": [path],
        "tinker_path": [path],
        "path": [path, "named"],
        "source_path": [path],
    }
    options = [
        *("--checks", "not_a_server_error", "--phases", "fuzzing", "--mode", "all"),
        *("--max-examples", str(cases), "--seed", str(seed), "--no-shrink", "--no-color"),
        *("--request-timeout", str(SLOWEST_S), "--continue-on-failure", "--warnings", "off"),
        *("--generation-database", ":memory:", "--suppress-health-check", "all"),
        # Deletes its own key, and would lock the rest out.
        *("--exclude-path", "/api/v1/auth/apikey/me", "-H", "X-API-Key: tml-fuzz"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options],
        env={
            **os.environ,
            "FUZZ_IDS": json.dumps(ids),
            "SCHEMATHESIS_HOOKS": "hooks",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-12_000:]
    return done.stdout


@dataclass
class Found:
    """What protobuf bodies came to."""

    statuses: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    #: Bodies that were answered with a 5xx, not at all, or whose work failed as the server's.
    wrong: list[str] = field(default_factory=list)


def recorded_passes() -> list[bytes]:
    """Bodies of passes as the newest official client sent them."""
    recorded = json.loads((RECORDED / "0.36.0" / "forward_backward.json").read_text())
    return [base64.b64decode(request["body_base64"]) for request in recorded]


def mutated(body: bytes, draw: random.Random) -> bytes:
    """The body with a few bytes changed, cut out, repeated or put in."""
    changed = bytearray(body)
    for _ in range(draw.choice([1, 1, 1, 2, 4, 16])):
        place = draw.randrange(len(changed) + 1)
        length = draw.choice([1, 1, 2, 4, 8, 64])
        match draw.randrange(5):
            case 0:
                changed[place : place + length] = draw.randbytes(
                    len(changed[place : place + length])
                )
            case 1:
                del changed[place : place + length]
            case 2:
                changed[place:place] = changed[place : place + length]
            case 3:
                changed[place:place] = draw.randbytes(length)
            case _:
                changed[place : place + 1] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF])])
        if not changed:
            break
    return bytes(changed)


def bent(message: pb.ForwardBackwardRequest, draw: random.Random) -> bytes:
    """A sound message that asks for something odd: names, shapes, types, tokens, numbers."""
    for datum in draw.sample(list(message.data), k=min(2, len(message.data))):
        inputs = datum.loss_fn_inputs
        name = draw.choice(sorted(inputs) or ["weights"])
        tensor = inputs[name]
        match draw.randrange(9):
            case 0:
                del inputs[name]
            case 1:
                inputs[draw.choice(["weights", "logprobs", "nobody-knows-this"])].CopyFrom(tensor)
            case 2:
                tensor.dtype = draw.choice([0, 1, 2, 3, 4])
            case 3:
                tensor.shape[:] = draw.choice([[], [0], [-1], [2**62, 4], [1, 1, 1], [3, -5]])
            case 4:
                tensor.dense = tensor.dense[: draw.randrange(len(tensor.dense) + 1)]
            case 5:
                odd = draw.choice([float("nan"), float("inf"), 1e38, -1e38, 1e-45])
                tensor.dense = struct.pack("<f", odd) * (len(tensor.dense) // 4)
            case 6:
                tokens = [draw.choice([-1, 0, 2**31 - 1, -(2**31), 5]) for _ in range(5)]
                datum.model_input.add().encoded_text.tokens = struct.pack("<5i", *tokens)
            case 7:
                del datum.model_input[:]
            case _:
                csr = tensor.sparse_csr
                csr.values, csr.crow_indices = draw.randbytes(8), draw.randbytes(16)
                csr.col_indices = draw.randbytes(16)
    if draw.random() < 0.3:
        message.loss_fn = draw.choice(["ppo", "cispo", "dro", "gspo", "custom", "", "x" * 3000])
    if draw.random() < 0.3:
        key = draw.choice(["clip_low_threshold", "beta", "loss_id", ""])
        message.loss_fn_config[key] = draw.choice([float("nan"), -1.0, 1e308, 0.0])
    return message.SerializeToString()


def protobuf(url: str, *, bodies: int, seed: int = 1) -> Found:
    """Send mutated passes to a real model and wait for what they come to."""
    remote = Remote(url)
    draw = random.Random(seed)
    found = Found()
    passes = recorded_passes()
    model: Trainee | None = None
    for _ in range(bodies):
        if model is None:
            model = remote.model()
        message = pb.ForwardBackwardRequest.FromString(draw.choice(passes))
        message.model_id, message.seq_id = model.model_id, model.next
        odd = draw.random() < 0.5
        body = bent(message, draw) if odd else mutated(message.SerializeToString(), draw)
        try:
            answer = remote.post("forward_backward", body, Content_Type=PROTOBUF_TYPE)
        except Unexpected as error:
            found.wrong.append(f"{error}: {base64.b64encode(body).decode()}")
            continue
        found.statuses[answer.status] += 1
        if answer.status >= 500:
            found.wrong.append(f"{answer}: {base64.b64encode(body).decode()}")
        if answer.status != 200:
            continue
        if not _is_next(body, model):
            model = None  # another number, or another model: nothing to wait for
            continue
        model.number()
        settled = remote.settled(remote.submitted(answer), f"{PROTOBUF_TYPE}, application/json")
        outcome = "done" if settled.is_protobuf else str(settled.json.get("category", "done"))
        found.outcomes[outcome] += 1
        if outcome not in ("done", "user"):
            found.wrong.append(f"{settled}: {base64.b64encode(body).decode()}")
    return found


def _is_next(body: bytes, model: Trainee) -> bool:
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return False
    return (message.model_id, message.seq_id) == (model.model_id, model.next)


def main(cases: int, bodies: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", arch="llama")
        os.environ["TINKEX_LONG_POLL_S"] = "2"
        with serving(f"{TINY}={model}", data=Path(folder) / "data") as server:
            try:
                print(schemathesis(server.url, cases=cases, seed=random.randrange(10**6)))
            except AssertionError as error:
                print(error)
                print("".join(server.log[-200:]), file=sys.stderr)
                return 1
            found = protobuf(server.url, bodies=bodies, seed=random.randrange(10**6))
            print(f"protobuf: {dict(found.statuses)}, futures: {dict(found.outcomes)}")
            print("\n".join(found.wrong))
            return 1 if found.wrong else 0


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*(numbers + [100, 3000][len(numbers) :])))
