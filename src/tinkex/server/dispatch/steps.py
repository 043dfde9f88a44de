"""One step of a model: what the engine does for it, and its way to the disk and its waiters."""

import asyncio
from pathlib import Path

from tinkex.server import plan
from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.ending import Ending, bug
from tinkex.server.dispatch.revival import Revival
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, Outcome, Work, WorkFailed
from tinkex.server.plan import Cause, Kind, Step
from tinkex.server.saving import Saving
from tinkex.server.store import NewRequest
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import CreateModelResponse

# After these the next step may start before the result is on disk: if the process dies in
# between, the step simply runs again.
_SETTLED_BEHIND = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


class Steps:
    """Runs steps whose turn has come; whose turn it is, others know."""

    def __init__(self, desk: Desk, revival: Revival, saving: Saving) -> None:
        self._desk = desk
        self._revival = revival
        self._saving = saving

    async def run(
        self, run: Run, step: Step, payload: bytes | Path | BaseException, incarnation: int
    ) -> None:
        """To its end, good or bad; raises EngineLost if it is to be tried again."""
        try:
            if isinstance(payload, BaseException):
                raise payload
            ending = await self._perform(run, step, payload, incarnation)
        except EngineLost:
            raise  # whether it is tried again, its turn decides
        except WorkFailed as failed:
            ending = Ending(error=failed.message, category=failed.category)
        except UserFailure as failed:
            ending = Ending(error=str(failed), category="user")
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            ending = bug(error)
        if ending.category == "server" and step.kind not in plan.PASSES:
            # Half a step may have happened: the model is built again before its next one.
            run.live_in = None
        await self.end(run, step, ending)

    async def _perform(
        self, run: Run, step: Step, payload: bytes | Path, incarnation: int
    ) -> Ending:
        model = run.model
        requests = self._desk.store.requests

        async def work(order: Work) -> Outcome:
            return await self._revival.work(run, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await work(orders.create(model))
                return Ending(result=encode_json(CreateModelResponse(model_id=model.model_id)))
            case Kind.FORWARD | Kind.FORWARD_BACKWARD | Kind.OPTIM_STEP:
                run.bytes_since += orders.size(payload)
                outcome = await work(orders.pass_or_step(model, step.kind, payload))
                return Ending(result=outcome.result)
            case Kind.SAVE_WEIGHTS | Kind.SAVE_FOR_SAMPLER | Kind.SAVE_EXTERNAL:
                payload = await self._desk.payloads.read(step.request_id)
                result = await self._saving.save(model, step, payload, work)
                return Ending(result=result, committed=True)
            case Kind.LOAD_WEIGHTS:
                if step.creates:
                    await work(orders.create(model))
                payload = await self._desk.payloads.read(step.request_id)
                # Another owner's checkpoint was found when the request came.
                row = await requests.get(step.request_id)
                given = None if row is None else row.version_id
                result, version_id = await self._saving.load(model, payload, work, version_id=given)
                await requests.finish_load(step.request_id, result, version_id)
                return Ending(result=result, committed=True)
            case _:
                raise ValueError(f"{step.kind} is not a step of a model")

    async def end(self, run: Run, step: Step, ending: Ending) -> None:
        """The step is over: let the line go on, store the result, wake the waiters."""
        run.line.finish(step, failure=ending.error)
        run.steps_since += 1
        run.stepped = step.kind is Kind.OPTIM_STEP
        self._desk.companies[run.model.base_model].over(step.request_id)
        settling = self._desk.spawn(self.settle(run, step, ending))
        run.settling.add(settling)
        settling.add_done_callback(run.settling.discard)
        if step.kind not in _SETTLED_BEHIND:
            await asyncio.shield(settling)

    async def file_refused(self, run: Run, step: Step, reason: str) -> None:
        """A step that was never accepted, and has failed: nobody waits for it."""
        model = run.model
        run.line.finish(step, failure=reason)
        run.steps_since += 1
        new = NewRequest(
            owner=model.owner,
            kind=step.kind,
            base_model=model.base_model,
            payload=b"",
            session_id=model.session_id,
            model_id=model.model_id,
            seq_id=step.seq_id,
        )
        async with run.commit_order:
            await self._desk.store.requests.file_refused(new, reason, cause=Cause.WORK)

    async def settle(self, run: Run, step: Step, ending: Ending) -> None:
        """Store what became of a step, after those before it, and wake its waiters."""
        self._desk.payloads.forget(step.request_id)
        model = run.model
        self._desk.failures.settled(
            ending,
            request_id=step.request_id,
            kind=step.kind,
            session_id=model.session_id,
            model_id=model.model_id,
            creates=step.kind is Kind.CREATE_MODEL or step.creates,
        )
        if not ending.committed:
            async with run.commit_order:
                commit = await self._desk.commit(step.request_id, ending)
            await commit
        self._desk.wake(step.request_id, model.owner, step.kind, model.session_id, ending)
