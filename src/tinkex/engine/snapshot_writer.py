"""Writes snapshots to disk in its own thread while the engine continues to compute."""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path

from tinkex.engine.adapters.checkpoints import Files, memory_bytes
from tinkex.engine.adapters.checkpoints import write as write_files
from tinkex.engine.connection import Connection, SnapshotWritten, done_report, failure_report


class SnapshotWriter:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._copies: queue.SimpleQueue[tuple[int, Path, Files]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tinkex-snapshots", daemon=True).start()

    def put(self, ticket: int, folder: Path, copied: Files) -> None:
        """Queues a copy. The thread reports on the order once the copy is written."""
        self._copies.put((ticket, folder, copied))

    def _run(self) -> None:
        while True:
            self._connection.inbox.put(SnapshotWritten(size_bytes=self._write(*self._copies.get())))

    def _write(self, ticket: int, folder: Path, copied: Files) -> int:
        began_s = time.perf_counter()
        try:
            result = json.dumps({"size_bytes": write_files(copied, folder)}).encode()
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._connection.send(failure_report(ticket, error))
        else:
            self._connection.send(done_report(ticket, result, time.perf_counter() - began_s))
        return memory_bytes(copied)
