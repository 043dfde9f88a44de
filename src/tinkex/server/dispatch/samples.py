"""Samples: outside the order of steps, all at once, and given up when nobody wants them."""

import asyncio
import functools

from tinkex.server.base_check import BaseChanged
from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.ending import Ending, bug, deadly
from tinkex.server.dispatch.tap import Tap
from tinkex.server.executor import EngineLost, EngineRefused, Work, WorkFailed
from tinkex.server.store import RequestRow


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
            folder = await self._desk.store.checkpoints.open_again(row.version_id)
        payload = await self._desk.payloads.get(row.request_id)
        tap = self._taps.get(row.request_id)
        return orders.sample(row.owner, folder, payload, None if tap is None else tap.hear)
