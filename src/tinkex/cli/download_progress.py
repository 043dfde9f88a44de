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
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    tasks: dict[str, rich_progress.TaskID] = {}
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bars:

        def progress(done: int, total: int, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield progress
