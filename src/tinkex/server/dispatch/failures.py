"""
Which sessions have failed: marked with the reason, until work of theirs succeeds again.

A session has failed when the server could not do its work, or when a model of it was not created.
What a user can mend in the next request, such as an unknown loss, fails that request only.
"""

from typing import Any

from tinkex.server.dispatch.ending import Ending
from tinkex.server.plan import Kind
from tinkex.server.store import Store

LONGEST_MESSAGE = 2000


class Failures:
    """The marks, in memory and in the rows of their sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: set[str] = set()

    async def start(self) -> None:
        self._marked = set(await self._store.runs.failed_sessions())

    def settled(
        self,
        ending: Ending,
        *,
        request_id: str,
        kind: Kind,
        session_id: str | None,
        model_id: str | None = None,
        sampling_session_id: str | None = None,
        creates: bool = False,
    ) -> None:
        """Called for each result before it is stored, so that both are written together."""
        if session_id is None:
            return
        if ending.error is None:
            if session_id in self._marked:
                self._marked.discard(session_id)
                self._store.runs.mark_failed(session_id, None)
            return
        if ending.category != "server" and not creates:
            return
        reason: dict[str, Any] = {
            "type": "request",
            "request_id": request_id,
            "request_type": kind.value,
        }
        if model_id is not None and (creates or ending.lasting):
            reason = {"type": "training_run", "training_run_id": model_id}
        elif sampling_session_id is not None and ending.lasting:
            reason = {"type": "sampling_session", "sampling_session_id": sampling_session_id}
        self._marked.add(session_id)
        failure = {
            "category": "user" if ending.category == "user" else "internal",
            "message": ending.error[:LONGEST_MESSAGE],
            "reason": reason,
        }
        self._store.runs.mark_failed(session_id, failure)
