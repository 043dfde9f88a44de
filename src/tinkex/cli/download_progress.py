"""Progress of a model download: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinkex.models.cache import Progress, line_progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


@contextmanager
def fetch_progress() -> Iterator[Progress]:
    """A callback for `tinkex.models.resolve.resolve` that reports to stderr."""
    if not sys.stderr.isatty():
        yield line_progress(sys.stderr)
        return
    bars: Bars | None = None
    tasks: dict[str, TaskID] = {}

    def progress(done: int, total: int, what: str) -> None:
        nonlocal bars
        if bars is None:
            # With the first download: most starts have none, and need no rich.
            bars = _bars()
            bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done)

    try:
        yield progress
    finally:
        if bars is not None:
            bars.stop()


def _bars() -> Bars:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
