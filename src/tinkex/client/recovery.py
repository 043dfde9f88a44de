"""
Long runs that survive what happens on a server: started again from their last checkpoint.

What is worth a restart and when is decided by `may_recover` and `Restarts`; the loops are thin.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tinkex.client.errors import (
    APIConnectionError,
    APIStatusError,
    RequestFailedError,
    TinkerError,
)
from tinkex.client.http.retry import is_retryable, is_user_error
from tinkex.client.rest import RestClient

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

#: Whether a run is corrupted is asked no longer than this; not to know is not to be.
CORRUPTED_CHECK_S = 10.0
MAX_BACK_OFF_S = 300.0


class CorruptedRunError(TinkerError):
    """The server marks the run as corrupted: its weights are not what the steps say."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint to go on from, and the first step that it does not contain."""

    path: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What `on_restart` is told before a run is started again."""

    error: Exception
    #: Restarts since the last checkpoint, this one included, and how many there may be.
    attempt: int
    most: int
    #: Seconds until it starts.
    delay_s: float
    #: Where it goes on; None is the beginning.
    saved: Saved | None


def may_recover(error: BaseException) -> bool:
    """Whether a new model from the last checkpoint may help: the server lost ours, or itself."""
    if isinstance(error, CorruptedRunError | APIConnectionError):
        return True
    if isinstance(error, RequestFailedError):
        return not is_user_error(error)
    if isinstance(error, APIStatusError):
        return error.status_code in (404, 410) or is_retryable(error)
    return False


class Restarts:
    """How often a run was started again since it last got anywhere."""

    def __init__(self, most: int, back_off_s: float) -> None:
        if most < 0 or back_off_s < 0:
            raise ValueError(
                f"most_restarts={most} and back_off_s={back_off_s:g}: neither may be below zero."
            )
        self.most = most
        self._back_off_s = back_off_s
        self._count = 0
        self._from: Saved | None = None

    def after(self, error: Exception, saved: Saved | None) -> Restart | None:
        """The next restart, or None: it has been tried often enough."""
        if saved != self._from:  # it got further, so this is another failure
            self._from, self._count = saved, 0
        self._count += 1
        if self._count > self.most:
            return None
        delay_s = min(self._back_off_s * 2.0 ** (self._count - 1), MAX_BACK_OFF_S)
        return Restart(
            error=error, attempt=self._count, most=self.most, delay_s=delay_s, saved=saved
        )


class Recovery:
    """What a training function is given: where it stands, and how to save that."""

    def __init__(
        self, service: ServiceClient, training: TrainingClient, saved: Saved | None
    ) -> None:
        self.service = service
        self.training = training
        #: The last checkpoint; None before the first.
        self.saved = saved

    def __repr__(self) -> str:
        return f"<Recovery of {self.training.model_id} at step {self.step}>"

    @property
    def step(self) -> int:
        """The first step that is still to be done."""
        return 0 if self.saved is None else self.saved.step

    def save(self, step: int, *, ttl_seconds: int | None = None) -> Saved:
        """Save weights and optimizer; `step` is the next one to do. A restart goes on from here."""
        answer = self.training.save_state(_name(step), ttl_seconds, overwrite=True).result()
        if is_corrupted(self.service, self.training):
            raise corrupted_error(self.training)
        return self._remember(answer, step)

    async def save_async(self, step: int, *, ttl_seconds: int | None = None) -> Saved:
        """The same, for coroutines."""
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
    """Whether the server says so. One that cannot tell (any more) does not."""
    try:
        run = (
            RestClient(service.holder).get_training_run(training.model_id).result(CORRUPTED_CHECK_S)
        )
    except (TinkerError, TimeoutError, RuntimeError) as error:
        log.debug("whether %s is corrupted is not known: %s", training.model_id, error)
        return False
    return run.corrupted


def corrupted_error(training: TrainingClient) -> CorruptedRunError:
    return CorruptedRunError(
        f"The server marks run {training.model_id} as corrupted, so its weights cannot be trusted. "
        "Start again from its last checkpoint that was saved before (tinkex.recovering does)."
    )


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
    Run `train`, and again from its last checkpoint when the server loses the run.

        def train(run: tinkex.Recovery) -> None:
            for step in range(run.step, 1000):
                done = run.training.forward_backward(batch(step), "cross_entropy")
                run.training.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result()
                done.result()
                if step % 50 == 49:
                    run.save(step + 1)

        tinkex.recovering(train, service=tinkex.ServiceClient,
                          create=lambda service: service.create_lora_training_client(MODEL))

    Each start has a session of its own (`service()`). The first makes its model with `create`, or
    from `saved`; later ones from what `run.save` saved last, optimizer included. At most
    `most_restarts` of them without a new checkpoint, after `back_off_s`, twice that, and so on.
    Errors of the caller's own are raised at once, and so is whatever stops the first start.
    """
    restarts = Restarts(most_restarts, back_off_s)
    begun = False
    while True:
        try:
            with service() as client:
                run = Recovery(client, _start(client, create, saved), saved)
                begun = True
                try:
                    return train(run)
                except TinkerError as error:
                    saved = run.saved
                    if not may_recover(error) and is_corrupted(client, run.training):
                        raise corrupted_error(run.training) from error
                    raise
        except TinkerError as error:
            restart = restarts.after(error, saved) if begun and may_recover(error) else None
            if restart is None:
                raise
        _report(restart, on_restart)
        time.sleep(restart.delay_s)


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
    """The same with coroutines for `train` and `create`."""
    restarts = Restarts(most_restarts, back_off_s)
    begun = False
    while True:
        try:
            async with service() as client:
                if saved is None:
                    training = await create(client)
                else:
                    training = await client.create_training_client_from_state_with_optimizer_async(
                        saved.path
                    )
                run = Recovery(client, training, saved)
                begun = True
                try:
                    return await train(run)
                except TinkerError as error:
                    saved = run.saved
                    if may_recover(error):
                        raise
                    if await asyncio.to_thread(is_corrupted, client, training):
                        raise corrupted_error(training) from error
                    raise
        except TinkerError as error:
            restart = restarts.after(error, saved) if begun and may_recover(error) else None
            if restart is None:
                raise
        _report(restart, on_restart)
        await asyncio.sleep(restart.delay_s)


def _start(
    client: ServiceClient, create: Callable[[ServiceClient], TrainingClient], saved: Saved | None
) -> TrainingClient:
    if saved is None:
        return create(client)
    return client.create_training_client_from_state_with_optimizer(saved.path)


def _report(restart: Restart, on_restart: Callable[[Restart], None] | None) -> None:
    where = "its beginning" if restart.saved is None else restart.saved.path
    log.warning(
        "the run failed (%s) and starts again from %s in %.0f s, restart %d of %d",
        type(restart.error).__name__,
        where,
        restart.delay_s,
        restart.attempt,
        restart.most,
    )
    if on_restart is not None:
        on_restart(restart)
