"""
What became of the steps of a model, on its way to the disk: strictly in the order of the steps.

So the log on disk is always what the model was after one of its steps. A result that cannot be
stored is tried again. If that does not help, its step fails, and the model goes back to the step
before it: nobody was told what came after, and those steps run again.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from tinkex.server import plan
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.ending import Ending, unstorable
from tinkex.server.dispatch.run import Run, Unstored
from tinkex.server.plan import Cause, Kind, Step
from tinkex.server.store import NewRequest


class Results:
    """One task for each model that has something to store."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        #: Called when steps of a model wait again.
        self.went_back: Callable[[Run], None] = lambda run: None

    def add(self, run: Run, step: Step, ending: Ending, *, spoiled: str | None) -> None:
        """The step is over; `spoiled` is what its line said before it."""
        model = run.model
        if step.request_id:
            self._desk.payloads.forget(step.request_id)
            self._desk.failures.settled(
                ending,
                request_id=step.request_id,
                kind=step.kind,
                session_id=model.session_id,
                model_id=model.model_id,
                creates=step.kind is Kind.CREATE_MODEL or step.creates,
            )
        run.unstored.append(Unstored(step, ending, spoiled))
        if run.storing is None:
            run.storing = self._desk.spawn(self._store_all(run))

    async def _store_all(self, run: Run) -> None:
        try:
            while run.unstored:
                await self._store_next(run)
        finally:
            run.storing = None

    async def _store_next(self, run: Run) -> None:
        group = _together(run.unstored)
        try:
            try:
                await self._desk.insist_on_storing(lambda: self._commit(run, group))
            except Exception:
                if len(group) == 1:
                    raise
                # The first alone, so that it does not fail for one behind it.
                group = group[:1]
                await self._desk.insist_on_storing(lambda: self._commit(run, group))
        except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
            self._go_back(run, group[0], unstorable(error))
            return
        for one in group:
            run.unstored.popleft()
            if one.step.request_id:
                self._desk.wake(
                    one.step.request_id,
                    run.model.owner,
                    one.step.kind,
                    run.model.session_id,
                    one.ending,
                )

    async def _commit(self, run: Run, group: Sequence[Unstored]) -> None:
        """All of a group in one transaction."""
        requests = self._desk.store.requests
        first = group[0]
        if first.ending.committed:
            return
        if not first.step.request_id:
            model = run.model
            new = NewRequest(
                owner=model.owner,
                kind=first.step.kind,
                base_model=model.base_model,
                payload=b"",
                session_id=model.session_id,
                model_id=model.model_id,
                seq_id=first.step.seq_id,
            )
            await requests.file_refused(new, first.ending.error or "", cause=Cause.WORK)
            return
        endings = [await self._desk.kept(one.step.request_id, one.ending) for one in group]
        await requests.finish_all(endings)

    def _go_back(self, run: Run, failed: Unstored, ending: Ending) -> None:
        """The step fails; what ran after it was not told to anybody, and runs again."""
        if failed.ending.error is not None:
            # It has changed nothing, so nothing after it is different without it.
            again = replace(ending, cause=failed.ending.cause)
            run.unstored[0] = replace(failed, ending=again)
            return
        behind = [one for one in list(run.unstored)[1:] if not one.is_late]
        late = [one for one in list(run.unstored)[1:] if one.is_late]
        run.unstored = deque([replace(failed, ending=ending), *late])
        line = run.line
        line.spoiled = failed.spoiled
        line.learn(failed.step, ending.error)
        # Not with the first of those put back: the number before it may be one that never came.
        line.go_back(failed.step.seq_id + 1)
        for one in behind:
            if one.step.request_id:
                line.put_back([one.step])
            else:
                line.put_back_refused(one.step, one.ending.error or "")
        run.live_in = None
        run.going_back = True
        self.went_back(run)


def _together(unstored: Sequence[Unstored]) -> list[Unstored]:
    """
    The passes in front, or the one step that is there.

    Everything else is stored once all before it is: it must not be on disk without them.
    """
    group: list[Unstored] = []
    for one in unstored:
        alone = one.step.kind not in plan.PASSES or not one.step.request_id or one.ending.committed
        if group and alone:
            break
        group.append(one)
        if alone:
            break
    return group
