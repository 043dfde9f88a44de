"""Shows the operations of a running program: bars on a terminal or in a notebook, else lines."""

from __future__ import annotations

import contextvars
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from tinkex.client.observe import instrumentation, queue_states
from tinkex.client.observe.queue_states import QueueState
from tinkex.extras import MissingExtra, needs

__all__ = ["Row", "as_html", "progress", "rows", "summary_line"]

BAR_EVERY_S = 0.25
NOTEBOOK_EVERY_S = 0.5
LINES_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The counts of one kind of operation."""

    name: str
    done: int
    failed: int
    in_flight: int
    waiting: int

    @property
    def total(self) -> int:
        return self.done + self.failed + self.in_flight + self.waiting


def rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Row]:
    """The difference between two snapshots of the metrics, and the current gauges."""

    def increase(family: str, name: str) -> int:
        key = f"{family}.{name}"
        # The metrics may have been reset in between.
        return max(0, int(now["counters"].get(key, 0) - before["counters"].get(key, 0)))

    def level(family: str, name: str) -> int:
        return max(0, int(now["gauges"].get(f"{family}.{name}", 0)))

    prefix = "operations_in_flight."
    found = [
        Row(
            name=name,
            done=increase("operations_done", name),
            failed=increase("operations_failed", name),
            in_flight=level("operations_in_flight", name),
            waiting=level("samples_waiting", name),
        )
        for name in (key.removeprefix(prefix) for key in now["gauges"] if key.startswith(prefix))
    ]
    return [row for row in found if row.total]


def summary_line(shown: Sequence[Row], paused: Sequence[QueueState]) -> str:
    """
    The counts of all operations and the reasons of all pauses, as one line of text.

    For example: `sample 12/40, 28 in flight; Sampling from s-1: two jobs ahead`.
    """
    parts = []
    for row in shown:
        text = f"{row.name} {row.done}/{row.total}"
        for count, what in (
            (row.in_flight, "in flight"),
            (row.waiting, "waiting"),
            (row.failed, "failed"),
        ):
            if count:
                text += f", {count} {what}"
        parts.append(text)
    parts += [f"{each.subject}: {each.reason}" for each in paused]
    return "; ".join(parts)


def as_html(shown: Sequence[Row], paused: Sequence[QueueState]) -> str:
    """The same as a table with bars, for a notebook."""
    from html import escape

    lines = []
    for row in shown:
        notes = [f"{row.failed} failed"] if row.failed else []
        if paused and row.in_flight:
            notes.append(f"paused: {paused[0].reason}")
        ended = row.done + row.failed
        lines.append(
            f'<tr><td style="text-align: left">{escape(row.name)}</td>'
            f'<td><progress value="{ended}" max="{row.total}"></progress></td>'
            f"<td>{ended}/{row.total}</td>"
            f'<td style="text-align: left">{escape(", ".join(notes))}</td></tr>'
        )
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


@contextmanager
def progress(file: TextIO | None = None, *, every_s: float | None = None) -> Iterator[None]:
    """
    Show the operations of every client of this process while the block runs.

    In a notebook, and on a terminal with the extra `cli`, there is a bar for each kind of
    operation; elsewhere a line every 10 s if something changed, and one at the end.

    Args:
        file: Where to print. None: the notebook, else stderr.
        every_s: Seconds between updates. None: less than 1 for bars, 10 for lines.

    Returns:
        A context for the block.

    Example:
        with tinkex.progress():
            answers = [each.result() for each in futures]
    """
    out = sys.stderr if file is None else file
    before = instrumentation.metrics_snapshot()
    if file is None and _in_notebook():
        cell = _NotebookCell(before)
        with _periodically(every_s or NOTEBOOK_EVERY_S, cell.show):
            yield
        return
    if out.isatty() and (bars := _bars(out)) is not None:
        with bars, _periodically(every_s or BAR_EVERY_S, lambda: bars.show(before)):
            yield
        return
    last = ""

    def line() -> None:
        nonlocal last
        text = summary_line(rows(before, instrumentation.metrics_snapshot()), queue_states.paused())
        if text and text != last:
            last = text
            out.write(f"tinkex: {text}\n")
            out.flush()

    with _periodically(every_s or LINES_EVERY_S, line):
        yield


@contextmanager
def _periodically(seconds: float, show: Callable[[], None]) -> Iterator[None]:
    """Call `show` periodically on a separate thread, and once more at the end."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            show()

    # In the caller's context, which tells a notebook the cell that the output belongs to.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="tinkex-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()


def _in_notebook() -> bool:
    """Whether this is a kernel of Jupyter. A program that has not loaded IPython is none."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class _NotebookCell:
    """One output of a cell, replaced when something changes."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._before = before
        self._shown = ""
        self._handle: Any = None

    def show(self) -> None:
        now, paused = rows(self._before, instrumentation.metrics_snapshot()), queue_states.paused()
        html = as_html(now, paused)
        if not now or html == self._shown:
            return
        self._shown = html
        data = {"text/html": html, "text/plain": f"tinkex: {summary_line(now, paused)}"}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class _Bars:
    def __init__(self, file: TextIO) -> None:
        with needs("A progress bar"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=file),
            transient=False,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, before: Mapping[str, Any]) -> None:
        paused = queue_states.paused()
        for row in rows(before, instrumentation.metrics_snapshot()):
            if row.name not in self._tasks:
                self._tasks[row.name] = self._progress.add_task(row.name, note="")
            note = f"{row.failed} failed" if row.failed else ""
            if paused and row.in_flight:
                note = f"{note} paused: {paused[0].reason}".strip()
            self._progress.update(
                self._tasks[row.name],
                completed=row.done + row.failed,
                total=row.total,
                note=note,
            )


def _bars(file: TextIO) -> _Bars | None:
    try:
        return _Bars(file)
    except MissingExtra:  # without the extra `cli`, print lines
        return None
