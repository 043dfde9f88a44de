"""Cancels abandoned samples on the server, a few at a time, in one background task."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tinkex.client.errors import TinkerError
from tinkex.client.http.transport import Kind, Request
from tinkex.client.http.typed_requests import Calls
from tinkex.wire.client_config import ClientDynamicConfigResponse
from tinkex.wire.codec import decode_json
from tinkex.wire.futures import CancelFutureRequest, UntypedAPIFuture

log = logging.getLogger("tinkex.cancels")

DEADLINE_S = 30.0


class CancelQueue:
    """Cancels requests, if the service supports it. Belongs to one event loop."""

    def __init__(self, calls: Calls, keep: Callable[[asyncio.Task[None]], None]) -> None:
        self._calls = calls
        self._keep = keep
        #: Request ids, or submissions whose response was not received.
        self._queue: deque[str | Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self.dynamic = ClientDynamicConfigResponse()

    def add(self, request: str | Request) -> None:
        """
        Cancel a request by its id, or by its submission.

        A submission that was interrupted may have been accepted. Sent again, it returns the same
        request id, because its seq_id is the same; that id is then cancelled.
        """
        if not self.dynamic.sample_cancel_enabled:
            return
        self._queue.append(request)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain())
            self._keep(self._task)

    async def _drain(self) -> None:
        try:
            while self._queue:
                count = max(1, self.dynamic.sample_cancel_max_batch_size)
                some = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
                await asyncio.gather(*(self._cancel(each) for each in some))
        finally:
            self._task = None

    async def _cancel(self, request: str | Request) -> None:
        try:
            if isinstance(request, Request):
                answer = await self._calls.once(request)
                request = decode_json(UntypedAPIFuture, answer.content).request_id
            await self._calls.call(
                "POST",
                "cancel_future",
                CancelFutureRequest(request_id=request),
                answer=type(None),
                kind=Kind.RETRIEVE,
                deadline_s=DEADLINE_S,
            )
        except (TinkerError, ValueError) as error:
            log.debug("a request was not cancelled: %s", error)
