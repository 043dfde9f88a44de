"""Runs and checkpoints: lists, publishing, expiry, deletion, archives, exports and copies."""

import io
import tarfile
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pyrage  # type: ignore[import-untyped]
import pytest

from server.echo import EchoExecutor
from server.hosting import Answer, Api, hosted
from server.tenants import new_key, with_key

pytestmark = pytest.mark.anyio

RUNS = "/api/v1/training_runs"


async def saved(api: Api, model: str, seq_id: int, name: str, **more: Any) -> str:
    """Save a training checkpoint; return its path."""
    requested = await api.step("save_weights", model_id=model, seq_id=seq_id, path=name, **more)
    result = await api.result(requested)
    return str(result["path"])


async def exported(api: Api, model: str, seq_id: int, name: str, **more: Any) -> Any:
    return await api.result(
        await api.step("save_weights_external", model_id=model, seq_id=seq_id, path=name, **more)
    )


def files_below(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file()]


async def sampling_status(api: Api, session: str, path: str, number: int = 0) -> int:
    body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
    return (await api.post("create_sampling_session", body)).status


async def test_runs_are_listed_in_pages_with_the_newest_first(api: Api) -> None:
    session = await api.session()
    models = [await api.model(session, number=number) for number in range(3)]
    await saved(api, models[1], 1, "a", user_metadata={"k": "v"})
    page = (await api.get(f"{RUNS}?limit=2&offset=0&access_scope=accessible")).json
    assert [run["training_run_id"] for run in page["training_runs"]] == models[:0:-1]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    newest = page["training_runs"][1]["last_checkpoint"]
    assert newest["tinker_path"] == f"tinker://{models[1]}/weights/a"
    assert newest["user_metadata"] == {"k": "v"}
    rest = (await api.get(f"{RUNS}?limit=2&offset=2")).json
    assert [run["training_run_id"] for run in rest["training_runs"]] == models[:1]
    assert (await api.get(f"{RUNS}?project_id=none")).json["cursor"]["total_count"] == 0
    assert (await api.get(f"{RUNS}?limit=-1")).status == 422


async def test_an_unknown_run_says_how_to_list_runs_not_how_to_train(api: Api) -> None:
    for method, path in (
        ("GET", f"{RUNS}/nope"),
        ("GET", f"{RUNS}/nope?access_scope=accessible"),
        ("GET", f"{RUNS}/nope/checkpoints"),
        ("DELETE", f"{RUNS}/nope/checkpoints/weights/a"),
        ("POST", f"{RUNS}/nope/checkpoints/weights/a/publish"),
    ):
        async with api.http.request(method, path) as got:
            assert got.status == 404
            assert (await got.json())["detail"] == (
                "there is no training run 'nope' on this server. `tinkex run list` or GET "
                "training_runs lists yours."
            )


async def test_checkpoints_are_listed_by_run_and_in_pages(api: Api) -> None:
    model = await api.model()
    for seq_id, name in enumerate("abc", 1):
        await saved(api, model, seq_id, name)
    await exported(api, model, 4, "e")
    listed = (await api.get(f"{RUNS}/{model}/checkpoints")).json["checkpoints"]
    ids = [each["checkpoint_id"] for each in listed]
    assert ids == ["external_weights/e", "weights/c", "weights/b", "weights/a"]
    assert listed[0]["checkpoint_type"] == "external"
    assert listed[1]["size_bytes"] == 1
    page = (await api.get("/api/v1/checkpoints?limit=2&offset=1")).json
    assert [each["checkpoint_id"] for each in page["checkpoints"]] == ids[1:3]
    assert page["cursor"]["total_count"] == 4
    # Older clients fail on an unknown kind.
    old = {"User-Agent": "AsyncTinker/Python 0.27.2"}
    async with api.http.get("/api/v1/checkpoints", headers=old) as got:
        known = await got.json()
    assert [each["checkpoint_id"] for each in known["checkpoints"]] == ids[1:]
    assert known["cursor"]["total_count"] == 3


async def test_a_time_to_live_can_be_set_and_taken_away(api: Api) -> None:
    model = await api.model()
    await saved(api, model, 1, "a")
    place = f"training_runs/{model}/checkpoints/weights/a/ttl"
    assert await api.call("PUT", place, {"ttl_seconds": 7200}) == 204
    (listed,) = (await api.get("/api/v1/checkpoints")).json["checkpoints"]
    assert listed["expires_at"]
    assert await api.call("PUT", place, {"ttl_seconds": None}) == 204
    (listed,) = (await api.get("/api/v1/checkpoints")).json["checkpoints"]
    assert "expires_at" not in listed
    assert await api.call("PUT", place, {"ttl_seconds": 5}) == 400
    assert await api.call("PUT", place, {}) == 422
    assert await api.call("PUT", place.replace("/a/", "/b/"), {"ttl_seconds": None}) == 404


async def test_a_deleted_checkpoint_is_a_404_and_open_samplers_continue(
    api: Api, tmp_path: Path
) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await saved(api, model, 1, "a")
    assert await sampling_status(api, session, path) == 200
    place = f"training_runs/{model}/checkpoints/weights/a"
    assert await api.call("DELETE", place) == 204
    assert await api.call("DELETE", place) == 404
    assert (await api.post("weights_info", {"tinker_path": path})).status == 404
    assert await sampling_status(api, session, path, 1) == 404
    loaded = await api.result(await api.step("load_weights", model_id=model, seq_id=2, path=path))
    assert loaded["category"] == "user"
    assert (await api.get(f"{RUNS}/{model}/checkpoints")).json == {"checkpoints": []}
    await api.clean_up()
    sample = {
        "sampling_session_id": f"{session}:sample:0",
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {},
        "num_samples": 1,
    }
    assert "sequences" in await api.result((await api.post("asample", sample)).json["request_id"])
    await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    await api.clean_up()
    assert not [*(tmp_path / "checkpoints").glob("*/*/*/*")]


async def test_others_may_only_read_published_checkpoints(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path) as api:
        mine, yours = await new_key(tmp_path, "me"), await new_key(tmp_path, "you")
        async with with_key(api, mine) as me, with_key(api, yours) as you:
            model, session = await me.model(), await you.session()
            path = await saved(me, model, 1, "a")
            place = f"training_runs/{model}/checkpoints/weights/a"
            about = {"tinker_path": path}
            assert (await you.post("weights_info", about)).status == 404
            assert await sampling_status(you, session, path) == 404
            assert [await me.call("POST", f"{place}/publish") for _ in range(2)] == [204, 204]
            assert (await you.post("weights_info", about)).status == 200
            assert await sampling_status(you, session, path) == 200
            made = await you.model(session)
            loaded = await you.result(
                await you.step("load_weights", model_id=made, seq_id=1, path=path)
            )
            assert loaded["path"] == path
            assert (await you.get(f"/api/v1/{place}/archive")).status == 200
            for method, end in (("DELETE", ""), ("DELETE", "/publish"), ("PUT", "/ttl")):
                assert await you.call(method, place + end, {"ttl_seconds": None}) == 404
            assert (await you.get("/api/v1/checkpoints")).json["checkpoints"] == []
            assert await me.call("DELETE", f"{place}/publish") == 204
            assert (await you.post("weights_info", about)).status == 404
            # The key of the owner, shared for one request, and never stored.
            body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
            assert (await you.post("load_weights", body)).status == 404
            lent = await you.post("load_weights", {**body, "weights_access_token": mine})
            assert "error" not in await you.result(lent.json["request_id"])
    assert mine.encode() not in (tmp_path / "tinkex.db").read_bytes()


async def test_an_archive_is_a_tar_behind_a_signed_link(api: Api) -> None:
    model = await api.model()
    await api.forward_backward(model, 1, tokens=9)
    await api.optim_step(model, 2)
    await saved(api, model, 3, "a")
    place = f"{RUNS}/{model}/checkpoints/weights/a/archive"
    async with api.http.get(place, allow_redirects=False) as got:
        assert got.status == 302
        link, expires = got.headers["Location"], got.headers["Expires"]
    assert expires.endswith(" GMT")
    assert 0 < parsedate_to_datetime(expires).timestamp() - time.time() <= 900
    async with api.http.get(link) as got:
        body = await got.read()
        assert got.headers["Content-Length"] == str(len(body))
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        assert archive.getnames() == ["value"]
        member = archive.extractfile("value")
        assert member
        assert member.read() == b"9"
    for wrong in (link[:-1] + "x", link.replace("expires=", "expires=9")):
        async with api.http.get(wrong) as got:
            assert got.status == 403
    assert (await api.get(place.replace("/a/", "/b/"))).status == 404


async def test_a_range_of_an_archive_can_be_requested_to_resume_a_download(api: Api) -> None:
    model = await api.model()
    await saved(api, model, 1, "a")
    place = f"{RUNS}/{model}/checkpoints/weights/a/archive"
    async with api.http.get(place) as got:
        whole, link, tag = await got.read(), str(got.url), got.headers["ETag"]

    async def part(requested: str, **headers: str) -> tuple[int, str | None, bytes]:
        async with api.http.get(link, headers={"Range": requested, **headers}) as got:
            return got.status, got.headers.get("Content-Range"), await got.read()

    size = len(whole)
    for start, stop in ((0, 1), (100, 600), (512, 513), (700, size), (size - 1, size)):
        requested = f"bytes={start}-{stop - 1}"
        expected = (206, f"bytes {start}-{stop - 1}/{size}", whole[start:stop])
        assert await part(requested) == expected
        assert await part(requested, **{"If-Range": tag}) == expected
    assert await part("bytes=513-") == (206, f"bytes 513-{size - 1}/{size}", whole[513:])
    assert await part(f"bytes={size}-") == (416, f"bytes */{size}", b"")
    # Another version than that of the first part, and headers that are not a single range.
    assert await part("bytes=513-", **{"If-Range": '"other"'}) == (200, None, whole)
    for requested in ("bytes=9-3", "bytes=-5", "bytes=1-2,5-6", "lines=1-", "bytes=" + "9" * 5000):
        assert await part(requested) == (200, None, whole)


async def test_an_export_has_a_link_for_each_file(api: Api) -> None:
    model = await api.model()
    result = await exported(api, model, 1, "e")
    assert result == {
        "path": f"tinker://{model}/external_weights/e",
        "size_bytes": 1,
        "type": "save_weights_external",
    }
    place = f"{RUNS}/{model}/checkpoints/external_weights/e/external_weights_urls"
    found = (await api.get(place)).json
    assert [*found["urls"]] == ["value"]
    async with api.http.get(found["urls"]["value"]) as got:
        assert await got.read() == b"0"
    again = await exported(api, model, 2, "e")
    assert again["category"] == "user"
    other = await api.result(
        await api.step("load_weights", model_id=model, seq_id=3, path=result["path"])
    )
    assert "other programs" in other["error"]


async def test_an_export_can_be_encrypted_for_age_keys(api: Api, tmp_path: Path) -> None:
    model = await api.model()
    key = pyrage.x25519.Identity.generate()
    keys = [str(key.to_public())]
    await exported(api, model, 1, "e", age_encryption_recipients=keys)
    place = f"{RUNS}/{model}/checkpoints/external_weights/e/external_weights_urls"
    urls = (await api.get(place)).json["urls"]
    assert [*urls] == ["value.age"]
    async with api.http.get(urls["value.age"]) as got:
        assert pyrage.decrypt(await got.read(), [key]) == b"0"
    # No unencrypted file is left.
    assert files_below(tmp_path / "checkpoints") == ["value.age"]
    wrong = await exported(api, model, 2, "f", age_encryption_recipients=["age1nonsense"])
    assert wrong["category"] == "user"
    assert "age1nonsense" in wrong["error"]
    many = await exported(api, model, 3, "f", age_encryption_recipients=keys * 11)
    assert "10 are allowed" in many["error"]


async def test_a_copy_is_a_separate_run(api: Api, tmp_path: Path) -> None:
    session = await api.session()
    model = await api.model(session)
    path = await saved(api, model, 1, "a", user_metadata={"k": "v"})
    key = {"X-Idempotency-Key": "5b1a", "x-sdk-version": "0.36.0"}
    body = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 7200}
    first = (await api.post("copy_weights", body, headers=key)).json["tinker_path"]
    assert (await api.post("copy_weights", body, headers=key)).json["tinker_path"] == first
    other = (await api.post("copy_weights", body, headers={"X-Idempotency-Key": "6"})).json
    assert other["tinker_path"] != first
    runs = (await api.get(f"{RUNS}?project_id=p")).json["training_runs"]
    assert len(runs) == 2
    older = {"source_path": path, "session_id": session, "model_seq_id": 1}
    second = (await api.post("copy_weights", older)).json["tinker_path"]
    assert second == f"tinker://{session}:train:1/weights/a"
    # The copies stay when the original is deleted.
    await api.call("DELETE", f"training_runs/{model}/checkpoints/weights/a")
    await api.clean_up()
    for copy in (first, second):
        about = (await api.post("weights_info", {"tinker_path": copy})).json
        assert about["lora_rank"] == 8
    loaded = await api.result(await api.step("load_weights", model_id=model, seq_id=2, path=first))
    assert loaded["path"] == first
    assert (await api.post("copy_weights", {"source_path": path})).status == 404
    assert (await api.post("copy_weights", {"source_path": first})).status == 422


async def test_a_refused_model_is_not_listed_as_a_run(api: Api) -> None:
    session = await api.session()
    made = await api.model(session, number=1)
    body = {"session_id": session, "model_seq_id": 0, "base_model": api.base_model}
    requested = await api.post("create_model", {**body, "lora_config": {"rank": 2000}})
    refused = requested.json["model_id"]
    assert "rank" in (await api.result(requested.json["request_id"]))["error"]

    async def listed() -> list[str]:
        page = (await api.get(RUNS)).json
        assert page["cursor"]["total_count"] == len(page["training_runs"])
        return [run["training_run_id"] for run in page["training_runs"]]

    assert await listed() == [made]
    assert (await api.get(f"{RUNS}/{refused}")).status == 404
    assert (await api.get(f"/api/v1/sessions/{session}")).json["training_run_ids"] == [made]


async def test_a_refused_model_is_not_listed_after_its_request_expired(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    async with hosted(echo, tmp_path, result_kept_s=0, unfetched_kept_s=0, janitor_s=0) as api:
        session = await api.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": api.base_model}
        requested = await api.post("create_model", {**body, "lora_config": {"rank": 2000}})
        await api.result(requested.json["request_id"])
        done = {"reason": {"type": "success"}, "detail": None}
        await api.post(f"sessions/{session}/finish", done)
        await api.clean_up()
        assert (await api.get(RUNS)).json["training_runs"] == []


async def test_a_repeated_copy_of_another_checkpoint_is_refused(api: Api) -> None:
    """A copy into an existing run is answered only if it repeats the same copy."""
    session = await api.session()
    model = await api.model(session)
    path = await saved(api, model, 1, "one")
    await api.model(session, number=1)  # trained, without a checkpoint
    trained = await api.model(session, number=2)
    body = {"model_id": trained, "seq_id": 1, "path": "smp"}
    await api.result(await api.step("save_weights_for_sampler", **body))
    twin = await saved(api, await api.model(session, number=3), 1, "one")  # with the same content

    async def copied(source: str, number: int) -> Answer:
        into = {"session_id": session, "model_seq_id": number}
        return await api.post("copy_weights", {"source_path": source, **into})

    for number in (1, 2, 3):
        refused = await copied(path, number)
        assert refused.status == 422, (number, refused)
        (reported,) = refused.json["detail"]
        assert reported["loc"][-1] == "model_seq_id"
        assert f"{session}:train:{number}" in reported["msg"]
        assert "next free number" in reported["msg"]
    first = await copied(path, 4)
    assert first.json["tinker_path"] == f"tinker://{session}:train:4/weights/one"
    assert (await copied(path, 4)).json == first.json
    other = await saved(api, await moved(api, session, 5), 3, "one")
    assert twin != other
    assert (await copied(other, 4)).status == 422
    # Nor can a model be created under the number of a copy.
    made = {"session_id": session, "model_seq_id": 4, "base_model": api.base_model}
    assert (await api.post("create_model", {**made, "lora_config": {"rank": 8}})).status == 422


async def moved(api: Api, session: str, number: int) -> str:
    """A model whose weights differ from a new one."""
    model = await api.model(session, number=number)
    await api.passed(await api.forward_backward(model, 1))
    await api.result(await api.optim_step(model, 2))
    return model
