"""Checkpoints: names, versions, loading, and models created from them."""

import shutil
from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted

pytestmark = pytest.mark.anyio


async def trained(api: Api, model: str, *, first: int, tokens: int) -> float:
    await api.forward_backward(model, first, tokens=tokens)
    return await api.value(await api.optim_step(model, first + 1))


async def test_a_saved_state_is_loaded_into_another_model(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    await trained(api, model, first=1, tokens=6)
    saved = await api.result(
        await api.step(
            "save_weights", model_id=model, seq_id=3, path="six", user_metadata={"a": "b"}
        )
    )
    assert saved == {"path": f"tinker://{model}/weights/six", "type": "save_weights"}
    other = await api.model(session, number=1)
    loaded = await api.result(
        await api.step("load_weights", model_id=other, seq_id=1, path=saved["path"])
    )
    assert loaded["path"] == saved["path"]
    assert await api.value(await api.optim_step(other, 2)) == 12
    about = (await api.post("weights_info", {"tinker_path": saved["path"]})).json
    assert about["base_model"] == BASE
    assert about["is_lora"] is True
    assert about["lora_rank"] == 8
    run = (await api.get(f"/api/v1/training_runs/{model}")).json
    assert run["training_run_id"] == model
    assert run["model_owner"] == "local"
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/six"
    assert run["last_checkpoint"]["user_metadata"] == {"a": "b"}


async def test_an_existing_name_is_a_user_failure_unless_overwritten(
    api: Api, tmp_path: Path
) -> None:
    session = await api.session()
    model = await api.model(session)
    await api.result(await api.step("save_weights", model_id=model, seq_id=1, path="a"))
    taken = await api.result(await api.step("save_weights", model_id=model, seq_id=2, path="a"))
    assert taken["category"] == "user"
    assert "overwrite=True" in taken["error"]
    await trained(api, model, first=3, tokens=4)
    again = await api.result(
        await api.step("save_weights", model_id=model, seq_id=5, path="a", overwrite=True)
    )
    # Two versions are stored, and the name refers to the newer one.
    assert len([*(tmp_path / "checkpoints" / model / "weights" / "a").iterdir()]) == 2
    other = await api.model(session, number=1)
    await api.step("load_weights", model_id=other, seq_id=1, path=again["path"], optimizer=True)
    assert await api.value(await api.optim_step(other, 2)) == 8


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "x" * 201, "tab\there"])
async def test_invalid_checkpoint_names_are_user_failures(api: Api, name: str) -> None:
    model = await api.model()
    failed = await api.result(await api.step("save_weights", model_id=model, seq_id=1, path=name))
    assert failed["category"] == "user"
    assert "cannot be used" in failed["error"]
    assert await api.value(await api.optim_step(model, 2)) == 0


async def test_a_time_to_live_has_limits(api: Api) -> None:
    model = await api.model()
    short = await api.step("save_weights", model_id=model, seq_id=1, path="a", ttl_seconds=60)
    assert "3600" in (await api.result(short))["error"]
    fine = await api.step("save_weights", model_id=model, seq_id=2, path="a", ttl_seconds=3600)
    assert (await api.result(fine))["path"]
    run = (await api.get(f"/api/v1/training_runs/{model}")).json
    assert run["last_checkpoint"]["expires_at"] is not None


async def test_loading_a_missing_checkpoint_is_a_user_failure(api: Api) -> None:
    model = await api.model()
    failed = await api.result(
        await api.step("load_weights", model_id=model, seq_id=1, path="tinker://a/weights/b")
    )
    assert failed["category"] == "user"
    assert "tinker://a/weights/b" in failed["error"]


async def test_optimizer_state_cannot_come_from_a_sampler_save(api: Api) -> None:
    model = await api.model()
    saved = await api.result(
        await api.step("save_weights_for_sampler", model_id=model, seq_id=1, path="s")
    )
    failed = await api.result(
        await api.step("load_weights", model_id=model, seq_id=2, path=saved["path"], optimizer=True)
    )
    assert "no optimizer state" in failed["error"]


async def test_load_weights_can_create_a_model(api: Api, echo: EchoExecutor) -> None:
    session = await api.session()
    model = await api.model(session)
    await trained(api, model, first=1, tokens=6)
    saved = await api.result(await api.step("save_weights", model_id=model, seq_id=3, path="a"))
    body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": True}
    first, again = await api.post("load_weights", body), await api.post("load_weights", body)
    assert first.json == again.json
    made = first.json["model_id"]
    assert made == f"{session}:train:1"
    await api.result(first.json["request_id"])
    assert await api.value(await api.optim_step(made, 1)) == 12
    echo.die()
    assert await api.value(await api.optim_step(made, 2)) == 24


async def test_a_rebuilt_model_loads_the_version_that_it_loaded_first(
    api: Api, echo: EchoExecutor
) -> None:
    session = await api.session()
    source, model = await api.model(session), await api.model(session, number=1)
    await trained(api, source, first=1, tokens=6)
    saved = await api.result(await api.step("save_weights", model_id=source, seq_id=3, path="a"))
    await api.result(await api.step("load_weights", model_id=model, seq_id=1, path=saved["path"]))
    await trained(api, source, first=4, tokens=100)
    await api.result(
        await api.step("save_weights", model_id=source, seq_id=6, path="a", overwrite=True)
    )
    echo.die()
    assert await api.value(await api.optim_step(model, 2)) == 12


async def test_checkpoints_can_live_in_another_store(tmp_path: Path) -> None:
    """Any fsspec URL: the engine uses a local copy of the stored files."""
    store = f"memory://{tmp_path.name}"
    async with hosted(EchoExecutor(), tmp_path / "one", storage=store) as api:
        model = await api.model()
        await api.forward_backward(model, 1, tokens=40_000)
        assert await api.value(await api.optim_step(model, 2)) == 40_000
        saved = await api.result(
            await api.step("save_weights_for_sampler", model_id=model, seq_id=3, path="a")
        )
        shutil.rmtree(tmp_path / "one" / "checkpoints")
        body = {
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {},
            "model_path": saved["path"],
        }
        request = (await api.post("asample", body)).json["request_id"]
        assert (await api.result(request))["sequences"][0]["tokens"] == [40_000]
