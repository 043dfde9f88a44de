"""
Restarts long training runs from their last checkpoint after failures of the server.

`may_recover` decides which errors are worth a restart, `Restarts` how many and when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tinkex import display
from tinkex.client.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    TinkerError,
)
from tinkex.client.http.retry import (
    exponential_delay_s,
    is_retryable,
    is_user_error,
    retrying,
    retrying_in_thread,
)
from tinkex.client.rest import RestClient
from tinkex.tracebacks import ends_at_caller

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient
    from tinkex.client.training import TrainingClient
    from tinkex.wire.checkpoints import SaveWeightsResponse

__all__ = [
    "CorruptedRunError",
    "Recovery",
    "Restart",
    "Saved",
    "may_recover",
    "recovering",
    "recovering_async",
]

log = logging.getLogger("tinkex.recovery")

T = TypeVar("T")

#: Time limit of the check for corruption; without a response, the run counts as intact.
CORRUPTED_CHECK_S = 10.0
MAX_BACK_OFF_S = 300.0


class CorruptedRunError(TinkerError):
    """The server marks the run as corrupted: its weights do not match its steps."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint to resume from, and the first step that it does not contain."""

    path: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The argument of `on_restart`, before a run is restarted."""

    error: Exception
    #: Restarts since the last checkpoint, including this one, and the maximum.
    attempt: int
    most: int
    #: Seconds until the restart.
    delay_s: float
    #: The checkpoint to resume from; None is the beginning.
    saved: Saved | None


def may_recover(error: BaseException) -> bool:
    """Whether a restart from the last checkpoint may help: the server failed or lost the model."""
    if isinstance(error, CorruptedRunError | APIConnectionError):
        return True
    if isinstance(error, RequestFailedError):
        return not is_user_error(error)
    if isinstance(error, APIStatusError):
        return error.status_code in (404, 410) or is_retryable(error)
    return False


class Restarts:
    """Counts the restarts since the last checkpoint, and reports them."""

    def __init__(
        self,
        most: int,
        back_off_s: float,
        saved: Saved | None = None,
        on_restart: Callable[[Restart], None] | None = None,
    ) -> None:
        if most < 0 or back_off_s < 0:
            raise ValueError(
                f"most_restarts={most} and back_off_s={back_off_s:g}: both must be 0 or more."
            )
        self.most = most
        self._back_off_s = back_off_s
        self._count = 0
        self._last_saved: Saved | None = None
        self._on_restart = on_restart
        #: The current start; None if none has got its model yet.
        self.run: Recovery | None = None
        self._saved = saved

    @property
    def saved(self) -> Saved | None:
        """The checkpoint that the next start resumes from."""
        return self._saved if self.run is None else self.run.saved

    def delay_after(self, error: Exception) -> float | None:
        """Seconds until the next start; None to raise the error."""
        if self.run is None or not isinstance(error, TinkerError) or not may_recover(error):
            return None
        restart = self.after(error, self.saved)
        if restart is None:
            return None
        where = "its beginning" if restart.saved is None else restart.saved.path
        log.warning(
            "the run failed (%s) and restarts from %s in %.0f s, restart %d of %d",
            type(error).__name__,
            where,
            restart.delay_s,
            restart.attempt,
            restart.most,
        )
        if self._on_restart is not None:
            self._on_restart(restart)
        return restart.delay_s

    def after(self, error: Exception, saved: Saved | None) -> Restart | None:
        """The next restart; None if there were too many."""
        if saved != self._last_saved:  # there is a new checkpoint, so counting starts over
            self._last_saved, self._count = saved, 0
        self._count += 1
        if self._count > self.most:
            return None
        delay_s = exponential_delay_s(self._count, first_s=self._back_off_s, max_s=MAX_BACK_OFF_S)
        return Restart(
            error=error, attempt=self._count, most=self.most, delay_s=delay_s, saved=saved
        )


class Recovery:
    """The argument of a training function: its clients, its next step, and how to save."""

    def __init__(
        self, service: ServiceClient, training: TrainingClient, saved: Saved | None
    ) -> None:
        self.service = service
        self.training = training
        #: The last checkpoint; None before the first.
        self.saved = saved

    def __repr__(self) -> str:
        return display.call("Recovery", [("model_id", self.training.model_id), ("step", self.step)])

    @property
    def step(self) -> int:
        """The first step that is not done yet."""
        return 0 if self.saved is None else self.saved.step

    def save(self, step: int, *, ttl_seconds: int | None = None) -> Saved:
        """
        Save weights and optimizer. A restart resumes here.

        Args:
            step: The next step to run.
            ttl_seconds: Seconds until the checkpoint expires. None: never.

        Returns:
            The checkpoint and the step.

        Raises:
            CorruptedRunError: The server marks the run as corrupted.

        Example:
            def train(run):
                run.training.optim_step(tinkex.AdamParams()).result()
                run.save(1, ttl_seconds=86400)
        """
        answer = self.training.save_state(_name(step), ttl_seconds, overwrite=True).result()
        if is_corrupted(self.service, self.training):
            raise corrupted_error(self.training)
        return self._remember(answer, step)

    async def save_async(self, step: int, *, ttl_seconds: int | None = None) -> Saved:
        """
        `save` for coroutines.

        Args:
            step: The next step to run.
            ttl_seconds: Seconds until the checkpoint expires. None: never.

        Returns:
            The checkpoint and the step.

        Raises:
            CorruptedRunError: The server marks the run as corrupted.

        Example:
            async def train(run):
                await run.training.optim_step(tinkex.AdamParams())
                await run.save_async(1)
        """
        answer = await self.training.save_state(_name(step), ttl_seconds, overwrite=True)
        if await asyncio.to_thread(is_corrupted, self.service, self.training):
            raise corrupted_error(self.training)
        return self._remember(answer, step)

    def _remember(self, answer: SaveWeightsResponse, step: int) -> Saved:
        self.saved = Saved(path=answer.path, step=step)
        return self.saved


def _name(step: int) -> str:
    return f"recovery-{step:06d}"


def is_corrupted(service: ServiceClient, training: TrainingClient) -> bool:
    """Whether the server marks the run as corrupted. False if it cannot tell."""
    try:
        run = (
            RestClient(service.holder).get_training_run(training.model_id).result(CORRUPTED_CHECK_S)
        )
    except (TinkerError, TimeoutError, RuntimeError) as error:
        log.debug("cannot check whether %s is corrupted: %s", training.model_id, error)
        return False
    return run.corrupted


def corrupted_error(training: TrainingClient) -> CorruptedRunError:
    return CorruptedRunError(
        f"The server marks run {training.model_id} as corrupted, so its weights cannot be trusted. "
        "Restart from an earlier checkpoint (tinkex.recovering does so)."
    )


@ends_at_caller
def recovering(
    train: Callable[[Recovery], T],
    *,
    service: Callable[[], ServiceClient],
    create: Callable[[ServiceClient], TrainingClient],
    saved: Saved | None = None,
    most_restarts: int = 3,
    back_off_s: float = 5.0,
    on_restart: Callable[[Restart], None] | None = None,
) -> T:
    """
    Run a training function, and restart it from its last checkpoint if the server loses the run.

    Each start has its own session. User errors are raised immediately, and so is any error of the
    first start.

    Args:
        train: The training function. It starts at `run.step` and calls `run.save` now and then.
        service: Creates the service client of a start.
        create: Creates the training client of the first start.
        saved: A checkpoint for the first start, instead of `create`.
        most_restarts: Most restarts without a new checkpoint.
        back_off_s: Seconds before the first restart; twice that before the next, and so on.
        on_restart: Called before each restart.

    Returns:
        What `train` returns.

    Example:
        def train(run: tinkex.Recovery) -> None:
            for step in range(run.step, 4):
                done = run.training.forward_backward(data, "cross_entropy")
                run.training.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result()
                done.result()
                if step % 2 == 1:
                    run.save(step + 1)

        def create(service):
            return service.create_lora_training_client(MODEL)

        tinkex.recovering(train, service=tinkex.ServiceClient, create=create)
    """
    restarts = Restarts(most_restarts, back_off_s, saved, on_restart)

    def start() -> T:
        with service() as client:
            if (saved := restarts.saved) is None:
                training = create(client)
            else:
                training = client.create_training_client_from_state_with_optimizer(saved.path)
            restarts.run = run = Recovery(client, training, saved)
            try:
                return train(run)
            except TinkerError as error:
                if not may_recover(error) and is_corrupted(client, training):
                    raise corrupted_error(training) from error
                raise

    return retrying_in_thread(start, restarts.delay_after)


async def recovering_async(
    train: Callable[[Recovery], Awaitable[T]],
    *,
    service: Callable[[], ServiceClient],
    create: Callable[[ServiceClient], Awaitable[TrainingClient]],
    saved: Saved | None = None,
    most_restarts: int = 3,
    back_off_s: float = 5.0,
    on_restart: Callable[[Restart], None] | None = None,
) -> T:
    """
    `recovering` with coroutines for `train` and `create`.

    Args:
        train: The training function. It starts at `run.step` and calls `run.save_async`.
        service: Creates the service client of a start.
        create: Creates the training client of the first start.
        saved: A checkpoint for the first start, instead of `create`.
        most_restarts: Most restarts without a new checkpoint.
        back_off_s: Seconds before the first restart; twice that before the next, and so on.
        on_restart: Called before each restart.

    Returns:
        What `train` returns.

    Example:
        async def train(run: tinkex.Recovery) -> None:
            await run.training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
            await run.save_async(1)

        async def create(service):
            return await service.create_lora_training_client_async(MODEL)

        async def main():
            await tinkex.recovering_async(train, service=tinkex.ServiceClient, create=create)
    """
    restarts = Restarts(most_restarts, back_off_s, saved, on_restart)

    async def start() -> T:
        async with service() as client:
            if (saved := restarts.saved) is None:
                training = await create(client)
            else:
                training = await client.create_training_client_from_state_with_optimizer_async(
                    saved.path
                )
            restarts.run = run = Recovery(client, training, saved)
            try:
                return await train(run)
            except TinkerError as error:
                if not may_recover(error) and await asyncio.to_thread(
                    is_corrupted, client, training
                ):
                    raise corrupted_error(training) from error
                raise

    return await retrying(start, restarts.delay_after)
