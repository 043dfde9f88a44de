"""An engine keeps the custom losses of sessions whose models it has, and no others."""

import asyncio
from pathlib import Path

import pytest

from server.api.test_custom_losses import loss
from server.echo import EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.executor import WorkFailed
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_output,
)
from tinkex.wire.training import ForwardBackwardOutput
from waiting import until_async

pytestmark = pytest.mark.anyio


class LossRecorder(EchoExecutor):
    """Records its losses; a pass with a loss that it does not have fails."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[str, str] = {}

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        done = await super().run(base_model, work, incarnation=incarnation)
        if work.HasField("register_loss"):
            if b"refused" in work.register_loss.payload.inline:
                raise WorkFailed("user", "that loss is not offered")
            self.losses[work.register_loss.loss_id] = work.register_loss.session_id
        if work.HasField("forget_losses"):
            gone = [
                loss
                for loss, session in self.losses.items()
                if session == work.forget_losses.session_id
            ]
            for one in gone:
                del self.losses[one]
        return done

    def _pass(self, work: Order) -> bytes:
        asked, _ = decode_forward_backward_request(work.run_pass.payload.inline)
        named = (asked.forward_backward_input.loss_fn_config or {}).get("loss_id")
        if asked.forward_backward_input.loss_fn != "custom":
            return super()._pass(work)
        if self.losses.get(str(named)) != work.run_pass.session_id:
            raise WorkFailed("user", f"there is no custom loss {named}")
        return encode_forward_backward_output(
            ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[], metrics={})
        )

    def die(self) -> None:
        super().die()
        self.losses.clear()


async def created(api: Api, session: str, number: int = 0) -> str:
    made = await api.result(await api.step("create_custom_loss", **loss(session, number)))
    return str(made["loss_id"])


async def test_losses_are_dropped_with_the_last_model_of_their_session_and_restored_with_it(
    tmp_path: Path,
) -> None:
    engine = LossRecorder()
    async with hosted(engine, tmp_path) as api:
        assert api.app is not None
        scheduler = api.app.state.context.scheduler
        mine, other = await api.session(), await api.session()
        models = [await api.model(mine, number=number) for number in range(2)]
        foreign = await api.model(other)
        loss_id, theirs = await created(api, mine), await created(api, other)
        for model in models:
            assert "error" not in await api.result(await api.custom(model, 1, {"loss_id": loss_id}))
        # One of two models is unloaded: the other still needs them.
        await api.result(await api.step("unload_model", model_id=models[0]))
        assert loss_id in engine.losses
        scheduler.unload_session(mine)
        await until_async(lambda: loss_id not in engine.losses)
        assert theirs in engine.losses
        # They are registered again with the model, and so are new ones.
        later = await created(api, mine, 1)
        assert later not in engine.losses
        for number, one in ((2, loss_id), (3, later)):
            passed = await api.custom(models[1], number, {"loss_id": one})
            assert "error" not in await api.result(passed)
        assert "error" not in await api.result(await api.custom(foreign, 1, {"loss_id": theirs}))
        # A model that needs a rebuild does not keep them either.
        engine.die()
        scheduler.unload_session(mine)
        scheduler.unload_session(other)
        await until_async(lambda: not engine.losses)
        assert "error" not in await api.result(await api.custom(foreign, 2, {"loss_id": theirs}))


async def test_losses_that_no_model_can_use_are_only_checked(tmp_path: Path) -> None:
    engine = LossRecorder()
    async with hosted(engine, tmp_path) as api:
        session = await api.session()
        for number in range(20):
            await created(api, session, number)
        bad = await api.step("create_custom_loss", **loss(session, 20, name="refused"))
        assert (await api.result(bad))["category"] == "user"
        await until_async(lambda: not engine.losses)
        assert len(engine.tasks("register_loss")) == 21


async def test_a_model_that_is_loaded_while_losses_are_created_has_them_all(tmp_path: Path) -> None:
    engine = LossRecorder()
    async with hosted(engine, tmp_path) as api:
        session = await api.session()
        known: list[str] = []

        async def make() -> None:
            for number in range(15):
                made = await created(api, session, number)
                known.append(made)

        async def load_and_unload(number: int) -> None:
            model = await api.model(session, number=number)
            for step in range(1, 12):
                if known:
                    passed = await api.custom(model, step, {"loss_id": known[-1]})
                else:
                    passed = await api.forward_backward(model, step)
                assert "error" not in await api.result(passed)
                await api.result(await api.step("unload_model", model_id=model))

        await asyncio.gather(make(), *(load_and_unload(number) for number in range(3)))
        await until_async(lambda: not engine.losses)
