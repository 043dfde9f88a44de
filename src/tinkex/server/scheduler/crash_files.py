"""
Files that tell the next web process about a crash of this one.

A request may crash the web process together with its engines, or take all memory of the machine. Then
nobody is left to count. So the data folder has two kinds of files:

- `running` exists while a web process runs. A web process that is stopped deletes it.
- `isolated/ID` exists while an isolated request runs. Other requests leave no file.

They are not synced: if the machine goes down, they do not count anyway. Write errors are ignored: they
must not stop the work.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from tinkex.server.process_end import ProcessEnd, oom_kills

log = logging.getLogger("tinkex.server.scheduler")


class CrashFiles:
    """The files of one data folder."""

    def __init__(self, folder: Path) -> None:
        self._running = folder / "running"
        self._isolated = folder / "isolated"

    def find_crash(self, last_status: int) -> frozenset[str] | None:
        """
        The isolated requests that were running when the last web process crashed.

        None if it did not crash: it was stopped or killed from outside, or the machine went down.
        `last_status` is its exit status, negative for a signal.
        """
        try:
            marker = json.loads(self._running.read_bytes())
            if marker["boot_id"] != boot_id():
                return None
            end = ProcessEnd(last_status, oom_kills() - marker["oom_kills"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        if not end.by_itself:
            return None
        with contextlib.suppress(OSError):
            return frozenset(file.name for file in self._isolated.iterdir())
        return frozenset()

    def start(self) -> None:
        """This web process runs now; what the last one left is deleted."""
        try:
            shutil.rmtree(self._isolated, ignore_errors=True)
            self._isolated.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("crashes of this process are not counted: %s", error)
        else:
            self.mark_running()

    def mark_running(self) -> None:
        """Repeated when the end of an engine was counted, so that it does not count twice."""
        with contextlib.suppress(OSError):
            self._running.write_text(json.dumps({"boot_id": boot_id(), "oom_kills": oom_kills()}))

    def add(self, request_ids: Iterable[str]) -> None:
        """These isolated requests run now."""
        for request_id in request_ids:
            with contextlib.suppress(OSError):
                (self._isolated / request_id).touch()

    def remove(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            with contextlib.suppress(OSError):
                (self._isolated / request_id).unlink(missing_ok=True)

    def close(self) -> None:
        """This web process is being stopped: there is nothing to count."""
        with contextlib.suppress(OSError):
            self._running.unlink(missing_ok=True)


def boot_id() -> str:
    """An id that changes with every start of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
