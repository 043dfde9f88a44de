"""Storage quotas: a request over a quota fails as a user error, at once, and changes nothing."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, revoke, with_key
from tinkex.server.store import checkpoints
from tinkex.server.store.quotas import Quota, owner_quota
from tinkex.wire.proto.frames_pb2 import Done, Order

pytestmark = pytest.mark.anyio

#: The size of a save by the echo executor.
SAVE_BYTES = 1


async def save(api: Api, model: str, seq_id: int, name: str | None, **fields: Any) -> Any:
    """The result of a save; without a name, one for a sampler."""
    body: dict[str, Any] = {"model_id": model, "seq_id": seq_id, **fields}
    if name is not None:
        return await api.result(await api.step("save_weights", path=name, **body))
    body["sampling_session_seq_id"] = seq_id
    return await api.result(await api.step("save_weights_for_sampler", **body))


def refused(answer: Mapping[str, Any], *texts: str) -> None:
    assert answer.get("category") == "user", answer
    for text in texts:
        assert text in answer["error"]


def new_model(session: str, number: int) -> dict[str, Any]:
    model = {"session_id": session, "model_seq_id": number, "base_model": BASE}
    return {**model, "lora_config": {"rank": 8, "seed": 1}}


def folders(data: Path) -> set[Path]:
    """Folders with checkpoint files."""
    return {file.parent for file in (data / "checkpoints").rglob("*") if file.is_file()}


async def test_checkpoints_over_the_quota_fail_and_training_goes_on(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_checkpoints=2, janitor_s=0.0) as api:
        model = await api.model()
        assert "path" in await save(api, model, 1, "a")
        assert "path" in await save(api, model, 2, "b")
        saves = len(echo.tasks("save"))
        refused(
            await save(api, model, 3, "c"),
            "you have 2 checkpoints, this needs 1 more, and 2 are allowed",
            "tinkex checkpoint delete",
            "ttl_seconds",
        )
        # Nothing was written for it.
        assert len(echo.tasks("save")) == saves
        assert await api.value(await api.optim_step(model, 4)) == 0
        # Overwriting, and saving without a name, do not increase the count.
        assert "path" in await save(api, model, 5, "b", overwrite=True)
        assert "path" in await save(api, model, 6, None)
        deleted = f"training_runs/{model}/checkpoints/weights/a"
        assert await api.call("DELETE", deleted) == 204
        assert "path" in await save(api, model, 7, "c")


async def test_named_and_unnamed_bytes_count_until_the_files_are_deleted(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_checkpoint_bytes=2, janitor_s=0.0) as api:
        model = await api.model()
        assert "path" in await save(api, model, 1, "a")
        assert "path" in await save(api, model, 2, None)
        for name in ("b", None):
            answer = await save(api, model, 3 if name else 4, name)
            refused(answer, "you have 2 bytes of checkpoints", "2 are allowed")
        # A deleted checkpoint stops counting at once, before the cleanup.
        assert await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/a") == 204
        assert "path" in await save(api, model, 5, "b")
        # Overwriting needs space for both versions until it is done.
        assert "path" not in await save(api, model, 6, "b", overwrite=True)
        assert len(folders(tmp_path)) == 2


class Heavy(EchoExecutor):
    """Saves of two bytes."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        outcome = await super().run(base_model, work, incarnation=incarnation)
        if work.HasField("save"):
            return Done(result=json.dumps({"size_bytes": 2}).encode())
        return outcome


async def test_a_save_that_fits_on_retry_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    fingerprint = checkpoints.fingerprint
    monkeypatch.setattr(
        checkpoints, "fingerprint", lambda folder: (hashed.append(folder), fingerprint(folder))[1]
    )
    async with hosted(Heavy(), tmp_path, max_checkpoint_bytes=5, janitor_s=0.0) as api:
        model = await api.model()
        for seq_id, name in ((1, "a"), (2, "b")):
            assert "path" in await save(api, model, seq_id, name)
        assert await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/b") == 204
        assert len(hashed) == 2
        assert "path" in await save(api, model, 3, "a", overwrite=True)
        assert len(hashed) == 3


async def test_a_save_over_the_quota_leaves_no_files(tmp_path: Path) -> None:
    async with hosted(Heavy(), tmp_path, max_checkpoint_bytes=5, janitor_s=0.0) as api:
        model = await api.model()
        assert "path" in await save(api, model, 1, "a")
        assert "path" in await save(api, model, 2, "b")
        before = folders(tmp_path)
        for seq_id, name in ((3, "c"), (4, None)):
            answer = await save(api, model, seq_id, name)
            refused(answer, "you have 4 bytes of checkpoints, this needs 2 more, and 5 are allowed")
        assert folders(tmp_path) == before
        # An overwritten version frees its space for the next.
        assert "path" not in await save(api, model, 5, "a", overwrite=True)
        assert await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/b") == 204
        for seq_id in (6, 7, 8):
            assert "path" in await save(api, model, seq_id, "a", overwrite=True)


async def test_runs_over_the_quota_fail_and_end_with_their_session(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_runs=1) as api:
        session = await api.session()
        await api.model(session)
        made = await api.post("create_model", new_model(session, 1))
        assert made.status == 200
        answer = await api.result(made.json["request_id"])
        refused(answer, "you have 1 training runs, this needs 1 more, and 1 are allowed")
        assert await api.post("create_model", new_model(session, 1)) == made
        # It is not a run, and its steps fail with the reason.
        assert (await api.get("/api/v1/training_runs")).json["cursor"]["total_count"] == 1
        step = await api.optim_step(made.json["model_id"], 1)
        refused(await api.result(step), "over quota")
        found = (await api.post("sessions/search", {})).json["sessions"]
        assert found[0]["status"]["type"] == "failed"
        finish = {"reason": {"type": "success"}}
        assert (await api.post(f"sessions/{session}/finish", finish)).status == 200
        await api.model()


async def test_a_run_with_a_checkpoint_counts_after_its_session(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_runs=1) as api:
        session = await api.session()
        model = await api.model(session)
        await save(api, model, 1, "a")
        finish = {"reason": {"type": "success"}}
        assert (await api.post(f"sessions/{session}/finish", finish)).status == 200
        other = await api.session()
        source = {"path": f"tinker://{model}/weights/a", "session_id": other}
        loaded = await api.post("load_weights", {**source, "model_seq_id": 0})
        refused(await api.result(loaded.json["request_id"]), "over quota")
        assert await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/a") == 204
        await api.model(other, number=1)


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ({"max_runs": 1}, "1 training runs"),
        ({"max_checkpoints": 1}, "1 checkpoints"),
        ({"max_checkpoint_bytes": SAVE_BYTES}, "1 bytes of checkpoints"),
    ],
)
async def test_copies_count_too(
    echo: EchoExecutor, tmp_path: Path, quota: dict[str, int], text: str
) -> None:
    async with hosted(echo, tmp_path, **quota) as api:
        session = await api.session()
        model = await api.model(session)
        await save(api, model, 1, "a")
        before = folders(tmp_path)
        copy = {"source_path": f"tinker://{model}/weights/a", "session_id": session}
        answer = await api.post("copy_weights", {**copy, "model_seq_id": 7})
        # A 400: clients do not retry it.
        assert answer.status == 400
        assert text in answer.json["detail"]
        assert "over quota" in answer.json["detail"]
        assert folders(tmp_path) == before
        assert (await api.get("/api/v1/checkpoints")).json["cursor"]["total_count"] == 1
        assert (await api.get("/api/v1/training_runs")).json["cursor"]["total_count"] == 1


async def test_a_concurrent_copy_leaves_no_files(
    echo: EchoExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(echo, tmp_path) as api:
        assert api.app
        store = api.app.state.context.store
        session = await api.session()
        model = await api.model(session)
        await save(api, model, 1, "a")
        copy = {"source_path": f"tinker://{model}/weights/a", "session_id": session}
        hashed = []
        fingerprint = store.checkpoints.fingerprint
        monkeypatch.setattr(
            store.checkpoints, "fingerprint", lambda one: (hashed.append(one), fingerprint(one))[1]
        )
        first = await api.post("copy_weights", {**copy, "model_seq_id": 7})
        assert first.status == 200
        assert len(hashed) == 1
        before = folders(tmp_path)

        # Two concurrent requests; neither sees the other at its start.
        async def not_yet(*_: object) -> None:
            return None

        monkeypatch.setattr(store.checkpoint_catalog, "earlier_copy", not_yet)
        again = await api.post("copy_weights", {**copy, "model_seq_id": 7})
        assert again.json == first.json
        assert folders(tmp_path) == before
        # The number belongs to another run.
        taken = await api.post("copy_weights", {**copy, "model_seq_id": 0})
        assert taken.status == 422
        assert folders(tmp_path) == before


async def test_concurrent_saves_do_not_exceed_the_quota_together(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, max_checkpoints=1, max_runs=6, janitor_s=0.0) as api:
        session = await api.session()
        bodies = [new_model(session, number) for number in range(12)]
        made = await asyncio.gather(*(api.post("create_model", body) for body in bodies))
        results = [await api.result(one.json["request_id"]) for one in made]
        models = [one["model_id"] for one in results if "model_id" in one]
        assert len(models) == 6
        # All files are written before the first commit.
        echo.open.clear()
        echo.entered = asyncio.Semaphore(0)
        saves = [
            await api.step("save_weights", model_id=model, seq_id=1, path="a") for model in models
        ]
        async with asyncio.timeout(20):
            for _ in models:
                await echo.entered.acquire()
        echo.open.set()
        saved = [await api.result(one) for one in saves]
        assert len([one for one in saved if "path" in one]) == 1
        assert len(folders(tmp_path)) == 1


async def test_a_key_may_have_a_quota_of_its_own(echo: EchoExecutor, tmp_path: Path) -> None:
    small = await new_key(tmp_path, "ann", limits={"max_checkpoints": 1})
    other = await new_key(tmp_path, "bob")
    async with hosted(echo, tmp_path, max_checkpoints=2) as api:
        for key, most in ((small, 1), (other, 2)):
            async with with_key(api, key) as mine:
                model = await mine.model()
                for number in range(most):
                    assert "path" in await save(mine, model, number + 1, f"n{number}")
                refused(await save(mine, model, most + 1, "more"), f"{most} are allowed")
        async with with_key(api, small) as mine:
            model = await mine.model()
            # Another key of the same owner with a larger quota.
            await new_key(tmp_path, "ann", limits={"max_checkpoints": 0})
            assert "path" in await save(mine, model, 1, "more")
            await revoke(tmp_path, 3)
            refused(await save(mine, model, 2, "again"), "1 are allowed")


@pytest.mark.parametrize(
    ("server", "keys", "most"),
    [
        (0, [], 0),
        (5, [], 5),
        (5, [{}], 5),
        (5, [{"max_runs": 2}], 2),
        (5, [{"max_runs": 2}, {}], 5),
        (5, [{"max_runs": 7}, {"max_runs": 2}], 7),
        (5, [{"max_runs": 0}, {"max_runs": 2}], 0),
    ],
)
def test_the_largest_quota_of_an_owners_keys_counts(
    server: int, keys: list[dict[str, int]], most: int
) -> None:
    assert owner_quota(Quota(max_runs=server), keys) == Quota(max_runs=most)


async def test_there_are_no_quotas_unless_they_are_set(api: Api) -> None:
    session = await api.session()
    for number in range(5):
        model = await api.model(session, number=number)
        assert "path" in await save(api, model, 1, "a")
