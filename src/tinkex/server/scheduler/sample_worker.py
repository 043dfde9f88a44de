"""A sample that is read while it is drawn, by any number of readers."""

import asyncio
import functools

from tinkex.server.executor import EngineLost, EngineRefused, Work, WorkFailed
from tinkex.server.scheduler import jobs
from tinkex.server.scheduler.base_model_check import BaseChanged
from tinkex.server.scheduler.execution import Desk
from tinkex.server.scheduler.jobs import Ending, bug, deadly
from tinkex.server.scheduler.model_state import Runs
from tinkex.server.scheduler.recovery import Revival
from tinkex.server.store import RequestRow
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossResponse
from tinkex.wire.partial_sample import Growing
from tinkex.wire.proto import frames_pb2


class Tap:
    """What an engine has told of a sample so far. Belongs to one event loop."""

    def __init__(self) -> None:
        self.growing = Growing()
        #: Done at the next token; then there is another one.
        self.changed = self._next()

    def hear(self, told: frames_pb2.Tokens) -> None:
        """An engine that was started again tells everything again; only what is new counts."""
        if self.growing.take(told.sequence, told.tokens, told.logprobs, start=told.start):
            changed, self.changed = self.changed, self._next()
            changed.set_result(None)

    def _next(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


# MERGED: Samples: outside the order of steps, all at once, and given up when nobody wants them.


class Samples:
    """Those that run or wait in an engine now."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        #: By request: cancelling one of these cancels the sample.
        self._running: dict[str, tuple[str, asyncio.Task[Ending]]] = {}
        #: Of those that are read while they are drawn.
        self._taps: dict[str, Tap] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Give one up that nobody waits for any more; harmless if it is not running."""
        running_owner, work = self._running.get(request_id, (None, None))
        if work is not None and running_owner == owner:
            work.cancel()

    def open_tap(self, request_id: str, tap: Tap) -> None:
        """Before it runs: its tokens are told to this one."""
        self._taps[request_id] = tap

    def tap(self, request_id: str) -> Tap | None:
        """None if it does not run any more, or nobody asked for its tokens when it began."""
        return self._taps.get(request_id)

    async def abandon(self, request_id: str, *, owner: str, after_s: float) -> None:
        """Give one up whose reader is gone, unless somebody asks for it in the meantime."""
        futures = self._desk.futures
        asked = futures.asked(request_id)
        await asyncio.sleep(after_s)
        if futures.asked(request_id) == asked and not futures.awaited(request_id):
            self.cancel(request_id, owner=owner)

    async def run(self, row: RequestRow) -> None:
        """To its end, good or bad."""
        work = asyncio.create_task(self._perform(row))
        self._running[row.request_id] = (row.owner, work)
        try:
            await asyncio.wait({work})
            ending = work.result()
        except asyncio.CancelledError:
            if not work.cancelled():
                # It is this task that was cancelled: the server stops, and the sample runs again.
                work.cancel()
                raise
            ending = Ending(error="cancelled: the client gave up on it.", category="user")
        except BaseChanged as changed:
            ending = Ending(error=str(changed), category="user")
        except (WorkFailed, EngineRefused) as failed:
            refused = isinstance(failed, EngineRefused)
            category = failed.category if isinstance(failed, WorkFailed) else "server"
            ending = Ending(error=str(failed), category=category, lasting=refused)
        except EngineLost as lost:
            if self._desk.closing:
                return
            ending = deadly(str(lost))
        except Exception as error:  # noqa: BLE001  a bug must fail one sample and be seen
            ending = bug(error)
        finally:
            del self._running[row.request_id]
            self._taps.pop(row.request_id, None)
        await self._desk.settle(row, ending)

    async def _perform(self, row: RequestRow) -> Ending:
        outcome = await self._desk.insist(row, functools.partial(self._prepared, row))
        return Ending(result=outcome.result)

    async def _prepared(self, row: RequestRow) -> Work:
        folder = None
        if row.version_id is not None:
            if (check := self._desk.base_check) is not None:
                incarnation = await self._desk.executor.ready(row.base_model)
                await check.check_version(row.version_id, row.base_model, incarnation)
            folder = await self._desk.store.checkpoints.open_cached(row.version_id)
        payload = await self._desk.payloads.get(row.request_id)
        tap = self._taps.get(row.request_id)
        return jobs.sample(row.owner, folder, payload, None if tap is None else tap.hear)


# MERGED: Custom losses: every engine that has a model of the session looks at a new one.


class Losses:
    """Outside the order of steps."""

    def __init__(self, desk: Desk, runs: Runs, revival: Revival) -> None:
        self._desk = desk
        self._runs = runs
        self._revival = revival

    async def create(self, row: RequestRow) -> None:
        """To its end, good or bad."""
        try:
            ending = await self._perform(row)
        except (WorkFailed, EngineRefused) as failed:
            category = failed.category if isinstance(failed, WorkFailed) else "server"
            ending = Ending(error=str(failed), category=category)
        except EngineLost as lost:
            if self._desk.closing:
                return
            ending = deadly(str(lost))
        except Exception as error:  # noqa: BLE001  a bug must fail one request and be seen
            ending = bug(error)
        await self._desk.settle(row, ending)

    async def _perform(self, row: RequestRow) -> Ending:
        loss = await self._desk.store.models.custom_loss(row.request_id)

        async def registering() -> Work:
            return jobs.register(loss)

        # Engines that meet a model of this session later get its losses then.
        alive = {
            run.model.base_model
            for run in self._runs.opened()
            if run.model.session_id == loss.session_id
            # Or is on its way there, and may have looked for losses before there was this one.
            and (run.live_in is not None or run.driver is not None)
        }
        for base_model in sorted(alive | {row.base_model}):
            try:
                await self._desk.insist(row, registering, base_model=base_model)
            finally:
                await self._revival.loss_was_checked(base_model, loss.session_id)
        return Ending(result=encode_json(CreateCustomLossResponse(loss_id=loss.loss_id)))
