"""
How long a model pauses when it moves to another worker, in steps, against a worker that stops it.

    python benchmarks/bench_move.py [--step-s 0.5] [--restore-s 2] [--moves 5]

A client trains one model without a break: a pass, an optimizer step, and so on. Engines wait instead of
computing, half of `--step-s` for each of the two and `--restore-s` to read a snapshot, one order after
the other. So this measures what a move adds, and no GPU. Two workers, a web process and PostgreSQL; the
first three are in this process. The model moves to the other worker and back; then it moves as a drain
without a copy does it: it stops, is written, and is rebuilt on the other worker.
The pause is the longest time between two results of a move, less the median between two results.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import reports

sys.path.insert(0, str(reports.ROOT / "tests"))

from postgres import postgres_server
from server.cluster_parts import a_web, a_worker
from server.echo import EchoExecutor, task_of
from server.hosting import Api
from tinkex.server.cluster.worker import Worker
from tinkex.wire.proto.frames_pb2 import Done, Order

#: The goal, in steps.
MAX_PAUSE = 2.0


class SimulatedEngine(EchoExecutor):
    """Runs one order after the other, and waits as long as it should take."""

    def __init__(self, step_s: float, restore_s: float) -> None:
        super().__init__()
        self._took_s = {"run_pass": step_s / 2, "optim_step": step_s / 2, "restore": restore_s}
        self._turn = asyncio.Lock()

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        async with self._turn:
            await asyncio.sleep(self._took_s.get(task_of(work), 0.0))
            return await super().run(base_model, work, incarnation=incarnation)


class Training:
    """A client that takes one step after the other; when each of them was done."""

    def __init__(self, api: Api, model: str) -> None:
        self._api, self._model = api, model
        self.done_s: list[float] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        seq_id = 1
        while True:
            await self._api.forward_backward(self._model, seq_id, tokens=1)
            await self._api.value(await self._api.optim_step(self._model, seq_id + 1))
            self.done_s.append(time.monotonic())
            seq_id += 2

    async def steps(self, more: int) -> None:
        wanted = len(self.done_s) + more
        while len(self.done_s) < wanted:
            if self.task.done():
                await self.task
            await asyncio.sleep(0.01)


async def measure(step_s: float, restore_s: float, moves: int) -> dict[str, list[float]]:
    """The pauses of both ways to move, in seconds, and the times between results without a move."""
    with tempfile.TemporaryDirectory() as home, postgres_server() as postgres:
        db, folder = postgres.database(), Path(home)
        async with AsyncExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name in ("one", "two"):
                engine = SimulatedEngine(step_s, restore_s)
                # Long: the machine may be busy.
                worker = a_worker(db, folder, name, engine, takeover_s=30.0)
                workers[name] = await stack.enter_async_context(worker)
            for worker in workers.values():
                await worker.known.look()
            api = await stack.enter_async_context(a_web(db, folder, takeover_s=30.0))
            model = await api.model()
            training = Training(api, model)
            await training.steps(4)
            between = _gaps(training.done_s)
            usual_s = statistics.median(between)
            found: dict[str, list[float]] = {"usual": between, "move": [], "stop": []}
            for number in range(2 * moves):
                how = "move" if number < moves else "stop"
                began = len(training.done_s)
                ((name, here),) = (
                    one for one in workers.items() if one[1]._scheduler._models.get(model)
                )
                state = here._scheduler._models.get(model)
                assert state is not None
                if how == "stop":
                    await here._moves._stop(state)
                elif not await here._moves.move(state, "two" if name == "one" else "one"):
                    raise RuntimeError("the model was not moved")
                await training.steps(3)
                longest_s = max(_gaps(training.done_s[max(began - 1, 0) :]))
                found[how].append(max(longest_s - usual_s, 0.0))
                print(how, f"{found[how][-1]:.2f} s", file=sys.stderr, flush=True)
            training.task.cancel()
            await asyncio.gather(training.task, return_exceptions=True)
            return found


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--restore-s", type=float, default=2.0)
    parser.add_argument("--moves", type=int, default=5)
    options = parser.parse_args()
    found = asyncio.run(measure(options.step_s, options.restore_s, options.moves))
    step_s = options.step_s
    rows = [
        f"| {words} | {len(found[how])} | {statistics.median(found[how]):.2f} s | "
        f"{statistics.median(found[how]) / step_s:.1f} | {max(found[how]) / step_s:.1f} |"
        for how, words in (
            ("move", "the copy follows the log"),
            ("stop", "the model stops and is rebuilt"),
        )
    ]
    verdict = "met" if max(found["move"]) / step_s < MAX_PAUSE else "missed"
    simulated = (
        f"A step is simulated: {step_s / 2} s for the pass and as much for the optimizer step; a "
        f"snapshot is restored in {options.restore_s} s. No GPU is involved. Without a move, results "
        f"are {statistics.median(found['usual']):.2f} s apart (median)."
    )
    lines = [
        reports.head("Moves of a model in training", "python benchmarks/bench_move.py"),
        simulated,
        "",
        "| how | moves | median pause | in steps | longest, in steps |",
        "|---|--:|--:|--:|--:|",
        *rows,
        "",
        f"Goal for the longest pause of a move: less than {MAX_PAUSE:.0f} steps ({verdict}).",
    ]
    reports.write("move", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
