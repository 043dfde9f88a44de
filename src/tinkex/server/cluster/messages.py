"""The kinds of notifications between web processes and workers. Each has a list of items."""

import base64
from collections.abc import Sequence
from typing import Any

from tinkex.server.queued_request import Kind, Outcome, QueuedRequest

# To all web processes.
FINISHED = "finished"  # requests that are finished, as `finished_item` describes them
EVENTS = "events"  # samplers with new events
CHANGED_SESSIONS = "changed sessions"  # sessions that are finished or have timed out

# To one web process.
TOKENS = "tokens"  # "REQUEST-ID TOKENS-AS-BASE64": tokens of a running sample

# To one worker.
ACCEPTED = "accepted"  # requests
STREAMED = "streamed"  # "REQUEST-ID CHANNEL": a sample whose tokens go to this channel
CANCELLED = "cancelled"  # requests
REFUSED = "refused"  # models with a refused step

# [model, term, question, worker]: bring a copy of a model to the newest step, and tell that worker.
COPY = "copy"
# [model, term, question, step, error]: what a copy has; without a step, why there is none.
COPIED = "copied"
NO_COPY = "no copy"  # [model, term]: its copy is not needed
MOVED = "moved"  # models that the worker has now, or whose steps came to another one

#: Larger results, and longer errors, are not in notifications: web processes read them.
MAX_RESULT_BYTES = 4_800
MAX_ERROR_CHARS = 1_000


def finished_item(request: QueuedRequest, *, with_outcome: bool) -> list[str | None]:
    """A finished request; `with_outcome` if its row certainly has this outcome."""
    outcome = request.outcome or Outcome()
    result = category = None
    if outcome.error is not None:
        with_outcome = with_outcome and len(outcome.error) <= MAX_ERROR_CHARS
        category = outcome.category or "server"
    elif with_outcome and outcome.result_key is None and len(outcome.result) <= MAX_RESULT_BYTES:
        result = base64.b64encode(outcome.result).decode()
    return [
        request.request_id,
        request.owner,
        request.kind,
        request.base_model,
        request.session_id,
        category,
        outcome.error if with_outcome else None,
        result,
    ]


def finished_request(item: Sequence[Any]) -> tuple[QueuedRequest, bool]:
    """The request of `finished_item`, and whether its outcome is complete."""
    request_id, owner, kind, base_model, session_id, category, error, result = item
    if category is None:
        outcome = Outcome(result=base64.b64decode(result or ""))
    else:
        outcome = Outcome(error=error or "", category=category)
    request = QueuedRequest(
        request_id=request_id,
        owner=owner,
        kind=Kind(kind),
        base_model=base_model,
        session_id=session_id,
        outcome=outcome,
    )
    return request, error is not None or result is not None
