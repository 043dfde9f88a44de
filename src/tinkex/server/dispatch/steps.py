"""One step of a model: what the engine does for it, and its way to the disk and its waiters."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.ending import Ending, bug
from tinkex.server.dispatch.results import Results
from tinkex.server.dispatch.revival import Revival
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, Outcome, Work, WorkFailed
from tinkex.server.plan import Kind, Step
from tinkex.server.saving import Saving
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import CreateModelResponse

# After these the next step may start before the result is on disk: if the process dies in
# between, the step simply runs again.
SETTLED_BEHIND = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


class Steps:
    """Runs steps whose turn has come; whose turn it is, others know."""

    def __init__(self, desk: Desk, revival: Revival, saving: Saving, results: Results) -> None:
        self._desk = desk
        self._revival = revival
        self._saving = saving
        self._results = results

    async def begin(
        self, run: Run, step: Step, payload: bytes | Path | BaseException, incarnation: int
    ) -> asyncio.Task[None]:
        """
        Send the engine what a step is, and follow it to its end, good or bad.

        A pass is with the engine when this returns, so a later one comes later. What is answered
        raises EngineLost if the step is to be tried again.
        """
        doing: Awaitable[Ending]
        if isinstance(payload, BaseException):
            doing = _raised(payload)
        elif step.kind in SETTLED_BEHIND:
            try:
                run.bytes_since += orders.size(payload)
                work = orders.pass_or_step(run.model, step.kind, payload)
                doing = _computed(await self._revival.send(run, work, incarnation))
            except Exception as error:  # noqa: BLE001  as if the engine had answered it
                doing = _raised(error)
        else:
            doing = self._perform(run, step, incarnation)
        return asyncio.create_task(self._follow(run, step, doing))

    async def _follow(self, run: Run, step: Step, doing: Awaitable[Ending]) -> None:
        try:
            ending = await doing
        except EngineLost:
            raise  # whether it is tried again, its turn decides
        except WorkFailed as failed:
            ending = Ending(error=failed.message, category=failed.category)
        except UserFailure as failed:
            ending = Ending(error=str(failed), category="user")
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            ending = bug(error)
        if ending.category == "server":
            # Half a step may have happened: the model is built again before its next one.
            run.live_in = None
        await self.end(run, step, ending)

    async def _perform(self, run: Run, step: Step, incarnation: int) -> Ending:
        model = run.model
        requests = self._desk.store.requests

        async def work(order: Work) -> Outcome:
            return await self._revival.work(run, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await work(orders.create(model))
                return Ending(result=encode_json(CreateModelResponse(model_id=model.model_id)))
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
        self._desk.companies[run.model.base_model].over(step.request_id)
        if run.going_back:
            # What it was computed from is not what the log says.
            run.line.put_back([step])
            return
        self._file(run, step, ending)
        run.stepped = step.kind is Kind.OPTIM_STEP
        if step.kind not in SETTLED_BEHIND:
            await run.settled()

    def file_refused(self, run: Run, step: Step, reason: str) -> None:
        """A step that was never accepted, and has failed: nobody waits for it."""
        if run.going_back:
            run.line.put_back_refused(step, reason)
        else:
            self._file(run, step, Ending(error=reason, category="user"))

    def _file(self, run: Run, step: Step, ending: Ending) -> None:
        spoiled = run.line.spoiled
        run.line.finish(step, failure=ending.error)
        run.steps_since += 1
        self._results.add(run, step, ending, spoiled=spoiled)


async def _computed(answer: asyncio.Future[Outcome]) -> Ending:
    return Ending(result=(await answer).result)


async def _raised(error: BaseException) -> Ending:
    raise error
