"""
A server on one machine, before and after a change: CPU time and memory, measured in turn.

    git archive COMMIT src | tar x -C FOLDER
    python benchmarks/compare_one_machine.py FOLDER [--rounds 5]

Both sides run on the same environment, with `src` of the folder and of this repository. Samples: the
web process with an instant engine (`bench_api.py`), 1 and 100 in flight. Training: `tinkex serve` with
a tiny model, forward_backward and optim_step in turn; CPU of the web process for a step. Memory: of the
supervisor and the web process when the server is ready. CPU times and memory, because rates depend on
the other work of a machine.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bench_api
import reports

sys.path.insert(0, str(bench_api.ROOT / "tests"))

import tinkex
from processes import children
from serving import TINY, serving
from tinkex import types
from tinkex.testing import write_tiny_model

DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, 65))),
        loss_fn_inputs={"target_tokens": list(range(2, 66)), "weights": [1.0] * 64},
    )
]
STEPS = 40


@contextmanager
def using(source: Path) -> Iterator[None]:
    """Processes that are started here import tinkex from this folder."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(source)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def samples(source: Path) -> dict[str, float]:
    found = {}
    with using(source), bench_api.started("tinkex", script=bench_api.__file__) as server:
        for in_flight, requests in ((1, 200), (100, 1500)):
            measured = asyncio.run(bench_api.measure("", server, in_flight, requests))
            found[f"web CPU ms per sample, {in_flight} in flight"] = measured.cpu_ms
    return found


def training(source: Path, model: Path) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        using(source),
        serving(f"{TINY}={model}", data=Path(folder, "data")) as server,
    ):
        supervisor = server.process.pid
        web = next(
            pid
            for pid in children(supervisor)
            if b"tinkex.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        found = {
            "memory of the supervisor at start, MiB": resident_mb(supervisor),
            "memory of the web process at start, MiB": resident_mb(web),
        }
        service = tinkex.ServiceClient(base_url=server.url, api_key="tml-bench")
        client = service.create_lora_training_client(TINY, rank=4)
        cpu_s = 0.0
        for number in range(STEPS + 5):
            if number == 5:  # the first ones load what all later ones use
                cpu_s = bench_api.Server("", web).cpu_s()
            passed = client.forward_backward(DATA, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            passed.result()
        used_s = bench_api.Server("", web).cpu_s() - cpu_s
        found["web CPU ms per training step"] = 1000 * used_s / STEPS
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="a folder with `src` of the other commit")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sources = {
        "before": options.before.absolute() / "src",
        "after": bench_api.ROOT / "src",
    }
    rounds: dict[str, dict[str, list[float]]] = {side: {} for side in sources}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder, "tiny"), arch="llama")
        for number in range(options.rounds):
            # The order changes, so that neither side is always the second one.
            for side in list(sources)[:: 1 if number % 2 else -1]:
                found = {**samples(sources[side]), **training(sources[side], model)}
                print(side, found, file=sys.stderr, flush=True)
                for name, value in found.items():
                    rounds[side].setdefault(name, []).append(value)
    lines = [
        reports.head("One machine, before and after", "python benchmarks/compare_one_machine.py"),
        f"{options.rounds} rounds of each, in turn; medians, and the range of the ratios of pairs.",
        "",
        "| | before | after | ratio | range |",
        "|---|--:|--:|--:|---|",
    ]
    for name, before in rounds["before"].items():
        after = rounds["after"][name]
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(before):.2f} | {statistics.median(after):.2f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    reports.write("one_machine", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
