"""Custom losses: every engine that has a model of the session looks at a new one."""

from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.ending import Ending, bug, deadly
from tinkex.server.dispatch.revival import Revival
from tinkex.server.dispatch.run import Runs
from tinkex.server.executor import EngineLost, EngineRefused, Work, WorkFailed
from tinkex.server.store import RequestRow
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossResponse


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
        loss = await self._desk.store.runs.custom_loss(row.request_id)

        async def registering() -> Work:
            return orders.register(loss)

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
