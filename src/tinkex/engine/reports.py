"""What an engine process says about an order: it is done, it has grown, or it failed."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from tinkex.engine.adapters.checkpoints import NotWritten
from tinkex.engine.engine import NoSuchModel
from tinkex.engine.sampling.sampler import Grown
from tinkex.wire import engine_protocol
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto import frames_pb2

log = logging.getLogger(__name__)


def done(ticket: int, result: bytes, compute_s: float) -> engine_protocol.Report:
    return engine_protocol.Report(
        ticket=ticket, done=frames_pb2.Done(result=result, compute_s=compute_s)
    )


def grown(ticket: int, grown: Iterable[Grown]) -> engine_protocol.Report:
    sequences = [
        frames_pb2.Tokens(
            sequence=each.sequence, start=each.start, tokens=each.tokens, logprobs=each.logprobs
        )
        for each in grown
    ]
    return engine_protocol.Report(ticket=ticket, grown=frames_pb2.Grown(sequences=sequences))


def muddled(ticket: int, error: Exception) -> engine_protocol.Report:
    message = f"a batch of several requests failed ({type(error).__name__}: {error})"
    failed = frames_pb2.Failed(category=engine_protocol.SHARED_FAILURE, message=message)
    return engine_protocol.Report(ticket=ticket, failed=failed)


def failed(ticket: int, error: Exception) -> engine_protocol.Report:
    """What cannot be done is the user's to read; everything else is a bug with a number."""
    if isinstance(error, NoSuchModel):
        # Whoever asked has it built here again.
        failed = frames_pb2.Failed(category=engine_protocol.MODEL_MISSING, message=str(error))
    elif isinstance(error, UserFailure | NotWritten):
        category = "server" if isinstance(error, NotWritten) else "user"
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
