"""
The `SchedulerPort` protocol: what routes need of a scheduler.

On one machine `Scheduler` itself has these methods. In a web process of a cluster `RemoteScheduler` has
them: it writes rows, and workers schedule.
"""

from typing import Protocol

from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.scheduler.fairness import QueueState, TrainingLimits
from tinkex.server.scheduler.results import ComputeUsage
from tinkex.server.scheduler.sample_worker import TokenStream


class SchedulerPort(Protocol):
    """Takes accepted requests. `Scheduler` documents the methods."""

    @property
    def training_limits(self) -> TrainingLimits: ...

    @property
    def usage(self) -> ComputeUsage: ...

    async def place(self, request: QueuedRequest) -> None: ...

    def submit(
        self, request: QueuedRequest, *, token_stream: TokenStream | None = None
    ) -> None: ...

    def creation_refused(self, request: QueuedRequest, outcome: Outcome) -> None: ...

    async def refuse_step(self, step: QueuedRequest) -> None: ...

    async def is_blocked_by(self, model_id: str, seq_id: int) -> bool: ...

    def queue_state(self, request_id: str) -> QueueState: ...

    def token_stream(self, request_id: str) -> TokenStream | None: ...

    def cancel(self, request_id: str, *, owner: str) -> None: ...

    def cancel_unless_polled(self, request_id: str, *, owner: str, after_s: float) -> None: ...

    def unload_session(self, session_id: str) -> None: ...

    async def snapshot(self, model_id: str) -> bool: ...
