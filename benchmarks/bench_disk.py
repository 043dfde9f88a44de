"""
Does the data folder stop growing?

    python benchmarks/bench_disk.py [--requests 10000]

The real server over an executor that computes nothing, with results kept for 60 s: a training loop
of forward_backward (8 examples of 128 tokens) and optim_step, every result fetched. The folder's
size is taken after each thousand requests: as it is, and again once their 60 s are over (the
janitor is given a clock that is so much ahead). What a server needs while it runs is the first
figure, about rate times 60 s of rows; that it does not grow is the second.
"""

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import encode_forward_backward_request
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

KEPT_S = 60.0
EXAMPLES, TOKENS = 8, 128
MOST_GROWTH = 1.2


def folder_bytes(folder: Path) -> int:
    """All files but SQLite's journal: that has a size of its own (4 to 8 MB), whatever is in it."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    )


async def checkpointed(api: Api) -> None:
    """Move what is in the journal into the database, so that its size is the whole truth."""
    assert api.app is not None

    def act(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    await asyncio.to_thread(act, api.app.state.context.settings.folder)


def pass_body(model_id: str, seq_id: int) -> bytes:
    inputs = {"target_tokens": [1] * TOKENS, "weights": [1.0] * TOKENS}
    tokens = ModelInput.from_ints([seq_id % 1000] * TOKENS)
    data = [Datum(model_input=tokens, loss_fn_inputs=inputs)] * EXAMPLES
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return encode_forward_backward_request(
        ForwardBackwardRequest(forward_backward_input=work, model_id=model_id, seq_id=seq_id)
    )


async def tidy_later(api: Api) -> None:
    """The janitor's pass as it would be once everything has been kept long enough."""
    assert api.app is not None
    context = api.app.state.context
    ahead = Cleanup(
        settings=context.settings,
        store=context.store,
        dispatcher=context.dispatcher,
        futures=context.futures,
        clock=lambda: time.time() + KEPT_S + 1,
    )
    await ahead.run_once()


async def measure(folder: Path, requests: int) -> list[dict[str, int]]:
    found = []
    executor = EchoExecutor()
    async with hosted(executor, folder, result_kept_s=KEPT_S, janitor_s=5.0) as api:
        model = await api.model()
        for seq_id in range(1, requests + 1, 2):
            sent = await api.post("forward_backward", pass_body(model, seq_id), headers=PROTOBUF)
            stepped = await api.optim_step(model, seq_id + 1, learning_rate=1e-4)
            await api.passed(sent.json["request_id"])
            await api.result(stepped)
            # Values double with every step; numbers of thousands of digits would be the slowest part.
            executor.models[model].value = 0
            executor.ran.clear()
            done = seq_id + 1
            if done % 1000 == 0:
                await checkpointed(api)
                as_is = folder_bytes(folder)
                # When a result was fetched is written within five seconds.
                await asyncio.sleep(6)
                await tidy_later(api)
                await checkpointed(api)
                after = folder_bytes(folder)
                found.append({"requests": done, "bytes": as_is, "bytes_a_minute_later": after})
                print(f"{done:6d} requests: {as_is:10,d} bytes, a minute later {after:10,d}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        found = asyncio.run(measure(Path(folder), options.requests))
        elapsed_s = time.perf_counter() - began_s
    growth = found[-1]["bytes_a_minute_later"] / found[0]["bytes_a_minute_later"]
    print(f"growth from {found[0]['requests']} to {found[-1]['requests']} requests: {growth:.3f}")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, results kept {KEPT_S:.0f} s, "
        f"{elapsed_s:.0f} s in all; the journal of SQLite (4 to 8 MB) left out."
    )
    lines = [
        f"# Size of the data folder, {today}",
        "",
        about,
        "",
        "| requests | bytes while running | bytes a minute later |",
        "|---|---|---|",
        *(
            f"| {row['requests']:,} | {row['bytes']:,} | {row['bytes_a_minute_later']:,} |"
            for row in found
        ),
        "",
        f"Growth from the first line to the last: {growth:.3f} times (at most {MOST_GROWTH}).",
    ]
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    name = f"disk_{os.cpu_count()}cpu_{today}.md"
    (results / name).write_text("\n".join(lines) + "\n")
    if growth > MOST_GROWTH:
        sys.exit(f"grew by more than {MOST_GROWTH}")


if __name__ == "__main__":
    main()
