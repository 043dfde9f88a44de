"""
Strange requests, many of them: no answer may be a 5xx, none may hang, no work fail as the server's.

    python -m qa.fuzz.run [--bodies 50000] [--graphs 1000] [--cases 100] [--passes 3000] [--seed N]

`make fuzz` runs all of it. Bodies are mutations of what official clients really sent (tests/data/wire),
sent to the application in this process; graphs are hostile custom losses for the engine's interpreter.
Schemathesis makes JSON from the server's own OpenAPI page, and passes are run by a real engine. The seed
of a run that found something finds it again. `python -m qa.fuzz.write_corpus` keeps interesting bodies for
`make test`.
"""

import argparse
import asyncio
import base64
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from qa.fuzz import request_bodies as bodies
from qa.fuzz.mutations import bent, mutated
from serving import TINY, serving
from tinkex.conformance.raw_client import Remote, Trainee, Unexpected
from tinkex.testing import write_tiny_model
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.proto import tinkex_wire_pb2 as pb

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = ROOT / "tests" / "data" / "wire"
#: An answer that takes longer hangs. Polls are held longer; the servers here hold them shortly.
SLOWEST_S = 20
MEBIBYTE = 2**20
#: The last quarter of a run may have so many times the memory of the first.
MOST_GROWTH = 1.1
#: Memory that the process of the graphs may ask for.
GRAPH_BYTES = 8 * 2**30


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
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
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


def against_a_server(cases: int, passes: int, seed: int) -> list[str]:
    """Schemathesis, and passes that a real engine runs."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", arch="llama")
        os.environ["TINKEX_LONG_POLL_S"] = "2"
        with serving(f"{TINY}={model}", data=Path(folder) / "data") as server:
            try:
                print(schemathesis(server.url, cases=cases, seed=seed))
            except AssertionError as error:
                print("".join(server.log[-200:]), file=sys.stderr)
                return [str(error)]
            found = protobuf(server.url, bodies=passes, seed=seed)
            print(f"passes: {dict(found.statuses)}, futures: {dict(found.outcomes)}")
            return found.wrong


def mutated_bodies(count: int, seed: int) -> list[str]:
    """Bodies to the application in this process; those that are interesting go into the corpus."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_bodies(Path(folder), count, seed))
    first, last = found.quarters()
    print(
        f"bodies: {count} in {found.took_s:.0f} s, slowest {found.slowest_s:.2f} s, "
        f"{dict(found.statuses)}, {len(found.interesting)} kinds of answers; resident memory "
        f"{first / MEBIBYTE:.0f} MiB in the first quarter, {last / MEBIBYTE:.0f} in the last"
    )
    if last > first * MOST_GROWTH + 20 * MEBIBYTE:
        found.wrong.append(f"memory grew from {first:.0f} to {last:.0f} bytes")
    return found.wrong


async def _bodies(folder: Path, count: int, seed: int) -> bodies.Found:
    async with bodies.line(folder) as line:
        return await bodies.fuzzed(line, bodies=count, seed=seed, say=print)


def hostile_graphs(count: int, seed: int) -> list[str]:
    """In a process of their own, which has a limit on its memory and its time."""
    done = subprocess.run(
        [sys.executable, "-m", "qa.fuzz.custom_loss_graphs", str(count), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (GRAPH_BYTES, GRAPH_BYTES)),
        check=False,
    )
    if done.returncode:
        return [f"the interpreter ended with {done.returncode}: {done.stderr[-4000:]}"]
    found = json.loads(done.stdout)
    wrong: list[str] = found.pop("wrong")
    print(f"graphs: {count}, {found}")
    if found["last_quarter_bytes"] > found["first_quarter_bytes"] * MOST_GROWTH + 50 * MEBIBYTE:
        wrong.append("memory grew")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="of schemathesis, for each route")
    parser.add_argument("--passes", type=int, default=3_000, help="to a real engine")
    parser.add_argument("--bodies", type=int, default=50_000, help="to the application alone")
    parser.add_argument("--graphs", type=int, default=1_000, help="to the interpreter of losses")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}")
    wrong = mutated_bodies(chosen.bodies, chosen.seed) if chosen.bodies else []
    wrong += hostile_graphs(chosen.graphs, chosen.seed) if chosen.graphs else []
    if chosen.cases or chosen.passes:
        wrong += against_a_server(chosen.cases, chosen.passes, chosen.seed)
    print("\n".join(wrong) or "nothing was wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
