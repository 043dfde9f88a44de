"""Immutable data is not read again for every request."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted
from server.scheduler.test_pickup import numbered_sample
from server.store.test_store import a_model, opened, step
from tinkex.server.queued_request import Kind
from tinkex.server.store import Damaged

pytestmark = pytest.mark.anyio

LARGE = b"x" * 100_000


async def sampled(api: Api, session: str, number: int) -> Any:
    asked = {**numbered_sample(session), "seq_id": number}
    return await api.result((await api.post("asample", asked)).json["request_id"])


async def test_samples_of_one_checkpoint_look_it_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api, asyncio.timeout(20):
        assert api.app
        session = await api.session()
        model = await api.model(session)
        saved = await api.step("save_weights_for_sampler", model_id=model, seq_id=1, path="s")
        path = (await api.result(saved))["path"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
        assert (await api.post("create_sampling_session", body)).status == 200
        checkpoints, lookups = api.app.state.context.store.checkpoints, 0
        version = checkpoints.version

        async def counted(version_id: str) -> Any:
            nonlocal lookups
            lookups += 1
            return await version(version_id)

        monkeypatch.setattr(checkpoints, "version", counted)
        for number in range(1, 6):
            assert (await sampled(api, session, number))["sequences"][0]["tokens"] == [0]
        assert lookups == 1
        # The cleanup clears the cache.
        await api.clean_up()
        await sampled(api, session, 6)
        assert lookups == 2


async def test_a_large_payload_is_handed_on_as_a_file_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    try:
        model = await a_model(store)
        new = step(model, 1, Kind.FORWARD_BACKWARD, LARGE)
        first = await store.requests.accept(new)
        read: list[str] = []
        get = store.files.get
        monkeypatch.setattr(store.files, "get", lambda key: (read.append(key), get(key))[1])
        path = await store.requests.payload(first.request_id)
        assert isinstance(path, Path)
        assert path.read_bytes() == LARGE
        assert read == []
        # A new process verifies the file once.
        store.files._known.clear()
        for _ in range(3):
            assert await store.requests.payload(first.request_id) == path
        assert len(read) == 1
        # A changed file of the same size is detected.
        path.write_bytes(LARGE.replace(b"x", b"y"))
        os.utime(path, ns=(1, 1))
        with pytest.raises(Damaged, match="not what was written"):
            await store.requests.payload(first.request_id)
    finally:
        store.close()
