"""Writes snapshots of models while the engine continues to compute."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tinkex.engine.adapters.checkpoints import HOST, Files, copied, memory_bytes
from tinkex.engine.adapters.checkpoints import write as write_files
from tinkex.engine.connection import Connection, done_report, failure_report
from tinkex.engine.device import available_bytes
from tinkex.wire import engine_protocol
from tinkex.wire.text_format import format_bytes

log = logging.getLogger("tinkex.engine.process")

#: No snapshot is copied while the copies that wait to be written take this much host memory.
MAX_PENDING_BYTES = 256 * 2**20
#: A larger snapshot is copied only if its copy takes at most this fraction of the free host memory.
MAX_COPY_FRACTION = 0.5


class SnapshotWriter:
    """Copies a model at once, writes the copy in another thread, and reports on the order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "tinkex-snapshots")
        #: Copies that are not written yet, with their host memory.
        self._copies: dict[Future[None], int] = {}

    @property
    def pending_bytes(self) -> int:
        """Host memory of the copies that are not written yet."""
        self._copies = {copy: size for copy, size in self._copies.items() if not copy.done()}
        return sum(self._copies.values())

    @property
    def is_full(self) -> bool:
        """Whether the next snapshot waits until some copies are written."""
        return self.pending_bytes >= MAX_PENDING_BYTES

    def write(self, order: engine_protocol.Order, files: Files, *, reserve: int) -> None:
        """
        Leaves `reserve` bytes of the disk free.

        Without host memory for a copy, the model itself is written now, and other work waits.
        """
        folder = Path(order.snapshot.folder)
        size = memory_bytes(files)
        if not _may_copy(size):
            log.info(
                "no host memory for a copy of model %s: its snapshot (%s) is written while other "
                "work waits",
                *(order.snapshot.model_id, format_bytes(size)),
            )
            self._write(order.ticket, folder, files, reserve)
            return
        written = self._thread.submit(self._write, order.ticket, folder, copied(files), reserve)
        self._copies[written] = size
        written.add_done_callback(self._connection.wake)

    def _write(self, ticket: int, folder: Path, files: Files, reserve: int) -> None:
        began_s = time.perf_counter()
        try:
            size = write_files(files, folder, reserve=reserve)
            result = json.dumps({"size_bytes": size}).encode()
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._connection.send(failure_report(ticket, error))
        else:
            self._connection.send(done_report(ticket, result, time.perf_counter() - began_s))


def _may_copy(size: int) -> bool:
    """Whether a copy of this size leaves enough host memory."""
    return size <= MAX_PENDING_BYTES or size <= MAX_COPY_FRACTION * available_bytes(HOST)
