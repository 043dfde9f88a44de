"""The socket to the web process: reads orders, builds and sends reports.

`frames.proto` defines both messages.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Iterable

from tinkex.engine.adapters.checkpoints import WriteFailed
from tinkex.engine.engine import NoSuchModel
from tinkex.engine.sampling.interface import PartialOutput
from tinkex.wire import engine_protocol
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto import frames_pb2

log = logging.getLogger("tinkex.engine.process")


class Connection:
    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        #: None only wakes the worker.
        self.inbox: queue.SimpleQueue[engine_protocol.Order | None] = queue.SimpleQueue()
        self._sending = threading.Lock()

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def start_reading(self) -> None:
        """Starts the thread that reads orders into the inbox."""
        threading.Thread(target=self._read, name="tinkex-orders", daemon=True).start()

    def send(self, report: engine_protocol.Report) -> None:
        try:
            # The thread that writes snapshots sends too.
            with self._sending:
                self._socket.sendall(engine_protocol.frame(report))
        except OSError:
            _exit()

    def wake(self, _: object = None) -> None:
        """Called by other threads when something that the worker may wait for has ended."""
        self.inbox.put(None)

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while head := stream.read(engine_protocol.LENGTH_PREFIX.size):
                    body = stream.read(engine_protocol.body_length(head))
                    self.inbox.put(engine_protocol.Order.FromString(body))
        except ConnectionError:
            pass  # the web process died before it read all reports
        except Exception:
            log.exception("cannot read further orders")
        finally:
            _exit()


def _exit() -> None:
    """Ends the process at once: the web process is gone, so no report can be delivered."""
    os._exit(0)


def done_report(ticket: int, result: bytes, compute_s: float) -> engine_protocol.Report:
    return engine_protocol.Report(
        ticket=ticket, done=frames_pb2.Done(result=result, compute_s=compute_s)
    )


def partial_output_report(ticket: int, outputs: Iterable[PartialOutput]) -> engine_protocol.Report:
    sequences = [
        frames_pb2.Tokens(
            sequence=each.sequence,
            start=each.start,
            tokens=each.tokens,
            logprobs=each.logprobs,
            top_count=len(each.top[0][0]) if each.top else 0,
            top_tokens=[token for tokens, _ in each.top for token in tokens],
            top_logprobs=[logprob for _, logprobs in each.top for logprob in logprobs],
        )
        for each in outputs
    ]
    return engine_protocol.Report(ticket=ticket, grown=frames_pb2.Grown(sequences=sequences))


def shared_failure_report(ticket: int, error: Exception) -> engine_protocol.Report:
    """A micro-batch of several requests failed: the server retries each request alone."""
    message = f"a batch of several requests failed ({type(error).__name__}: {error})"
    failed = frames_pb2.Failed(category=engine_protocol.SHARED_FAILURE, message=message)
    return engine_protocol.Report(ticket=ticket, failed=failed)


def failure_report(ticket: int, error: Exception) -> engine_protocol.Report:
    """User failures are reported with their message, all other errors as a bug with a log id."""
    if isinstance(error, NoSuchModel):
        # The server then rebuilds the model in this engine.
        failed = frames_pb2.Failed(category=engine_protocol.MODEL_MISSING, message=str(error))
    elif isinstance(error, UserFailure | WriteFailed):
        category = "server" if isinstance(error, WriteFailed) else "user"
        failed = frames_pb2.Failed(category=category, message=str(error))
    else:
        bug = secrets.token_hex(4)
        log.error("engine bug %s", bug, exc_info=error)
        failed = frames_pb2.Failed(
            category="server",
            message=f"the engine failed unexpectedly ({type(error).__name__}: {error}). "
            f"The server's log has the details under the id {bug}.",
        )
    return engine_protocol.Report(ticket=ticket, failed=failed)
