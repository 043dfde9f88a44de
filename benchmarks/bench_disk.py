"""
Whether the data folder stops growing.

    python benchmarks/bench_disk.py [--requests 10000]

The real server with `EchoExecutor` and results kept for 60 s runs a training loop of forward_backward
(8 examples of 128 tokens) and optim_step, and every result is fetched. After each thousand requests
the size of the folder is measured twice: immediately, which is about 60 s of rows, and after a
cleanup whose clock is 60 s ahead. The second figure must not grow.
"""

import argparse
import asyncio
import contextlib
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import encode_forward_backward_request
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

KEPT_S = 60.0
EXAMPLES, TOKENS = 8, 128
MAX_GROWTH = 1.2


def folder_bytes(folder: Path) -> int:
    """All files but SQLite's write-ahead log, whose size (4 to 8 MB) does not depend on its content."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith(("-wal", "-shm"))
    )


async def checkpointed(api: Api) -> None:
    """Moves the write-ahead log into the database, so that its size counts everything."""
    assert api.app is not None

    def checkpoint(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / "tinkex.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    await asyncio.to_thread(checkpoint, api.app.state.context.settings.folder)


def pass_body(model_id: str, seq_id: int) -> bytes:
    inputs = {"target_tokens": [1] * TOKENS, "weights": [1.0] * TOKENS}
    tokens = ModelInput.from_ints([seq_id % 1000] * TOKENS)
    data = [Datum(model_input=tokens, loss_fn_inputs=inputs)] * EXAMPLES
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return encode_forward_backward_request(
        ForwardBackwardRequest(forward_backward_input=work, model_id=model_id, seq_id=seq_id)
    )


async def clean_up_later(api: Api) -> None:
    """Runs the cleanup with a clock at which all results have expired."""
    assert api.app is not None
    context = api.app.state.context
    ahead = Cleanup(
        settings=context.settings,
        store=context.store,
        scheduler=context.scheduler,
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
            # The value doubles with each step; without a reset, huge integers dominate the time.
            executor.models[model].value = 0
            executor.ran.clear()
            done = seq_id + 1
            if done % 1000 == 0:
                await checkpointed(api)
                before = folder_bytes(folder)
                # The server writes the time of a fetch within five seconds.
                await asyncio.sleep(6)
                await clean_up_later(api)
                await checkpointed(api)
                after = folder_bytes(folder)
                found.append({"requests": done, "bytes": before, "bytes_after": after})
                print(f"{done:6d} requests: {before:10,d} bytes, after cleanup {after:10,d}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        found = asyncio.run(measure(Path(folder), options.requests))
        elapsed_s = time.perf_counter() - began_s
    growth = found[-1]["bytes_after"] / found[0]["bytes_after"]
    print(f"growth from {found[0]['requests']} to {found[-1]['requests']} requests: {growth:.3f}")
    command = f"python benchmarks/bench_disk.py --requests {options.requests}"
    lines = [
        reports.head("Size of the data folder", command, f"{elapsed_s:.0f} s"),
        f"Results are kept for {KEPT_S:.0f} s. SQLite's write-ahead log (4 to 8 MB) is not included.",
        "",
        "| requests | bytes | bytes after cleanup |",
        "|---|---|---|",
        *(f"| {row['requests']:,} | {row['bytes']:,} | {row['bytes_after']:,} |" for row in found),
        "",
        f"Growth from the first row to the last: {growth:.3f} (goal ≤ {MAX_GROWTH}).",
    ]
    reports.write("disk", "\n".join(lines) + "\n")
    if growth > MAX_GROWTH:
        sys.exit(f"the data folder grew by more than {MAX_GROWTH}")


if __name__ == "__main__":
    main()
