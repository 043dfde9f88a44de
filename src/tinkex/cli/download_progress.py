"""Progress of a model download: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tinkex.models.cache import Progress, line_progress


@contextmanager
def fetch_progress() -> Iterator[Progress]:
    """A callback for `tinkex.models.resolve.resolve` that reports to stderr."""
    if not sys.stderr.isatty():
        yield line_progress(sys.stderr)
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TaskID,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars
    except ModuleNotFoundError:
        yield line_progress(sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as bars:

        def progress(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress
