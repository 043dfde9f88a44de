"""Files in an object store: a real S3 API, which tests also stop and pause."""

import asyncio
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from object_store import BUCKET, ObjectStore, object_store
from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted, pass_body
from tinkex.server.store import blobs as files_module
from tinkex.server.store.blobs import Files, ObjectTooLarge
from tinkex.server.store.storage_health import Damaged, ObjectStoreUnavailable

LARGE = 40_000  # tokens: payload and result are stored as files
SOON_S = 20.0


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
def root(running: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own in the store, with short timeouts."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(files_module._S3, "read_timeout", 1)
    return f"s3://{BUCKET}/{tmp_path.name}"


def folder_of(tmp_path: Path, **content: str) -> str:
    folder = tmp_path / "written"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    return str(folder)


def test_writes_of_another_process_are_visible_at_once(root: str, tmp_path: Path) -> None:
    one, other = Files(root), Files(root)
    assert one.top_names("checkpoints") == set()
    assert not one.exists("checkpoints/m/weights/a/v1")
    other.upload(folder_of(tmp_path, a="1"), "checkpoints/m/weights/a/v1")
    assert one.top_names("checkpoints") == {"m"}
    assert one.exists("checkpoints/m/weights/a/v1")
    assert not one.exists("checkpoints/m/weights/a/v")
    assert one.list_older("checkpoints", 4, before_s=math.inf) == ["checkpoints/m/weights/a/v1"]
    assert one.list_older("checkpoints", 4, before_s=1000) == []


def test_a_folder_uploaded_twice_is_stored_once(root: str, tmp_path: Path) -> None:
    files, folder = Files(root), folder_of(tmp_path, a="1", b="2")
    files.upload(folder, "checkpoints/m/weights/a/v1")
    files.upload(folder, "checkpoints/m/weights/a/v1")
    files.copy("checkpoints/m/weights/a/v1", "checkpoints/m/weights/a/v2")
    files.copy("checkpoints/m/weights/a/v1", "checkpoints/m/weights/a/v2")
    for version in ("v1", "v2"):
        back = tmp_path / "back" / version
        files.download(f"checkpoints/m/weights/a/{version}", str(back))
        assert {file.name: file.read_text() for file in back.iterdir()} == {"a": "1", "b": "2"}


def test_a_folder_can_be_moved(root: str, tmp_path: Path) -> None:
    files = Files(root)
    files.upload(folder_of(tmp_path, number="7 0"), "snapshots/m/one")
    files.move("snapshots/m/one", "aside/snapshots/m/one")
    files.move("snapshots/m/one", "aside/snapshots/m/one")  # a repeat does nothing
    assert not files.exists("snapshots/m/one")
    files.download("aside/snapshots/m/one", str(tmp_path / "back"))
    assert (tmp_path / "back" / "number").read_text() == "7 0"
    files.remove("aside/snapshots/m/one")
    files.remove("aside/snapshots/m/one")
    assert files.all_keys() == []


def test_a_missing_object_differs_from_an_unavailable_store(root: str, tmp_path: Path) -> None:
    files = Files(root)
    key = files.put("payloads", b"abc")
    assert files.get(key) == b"abc"
    assert files.exists(key)
    files.remove(key)
    with pytest.raises(Damaged, match="is missing"):
        files.get(key)
    with pytest.raises(FileNotFoundError):
        files.download("snapshots/m/none", str(tmp_path / "none"))
    # A missing bucket does not mean that an object is missing.
    elsewhere = Files("s3://no-such-bucket/x")
    for act in (lambda: elsewhere.get(key), lambda: elsewhere.put("results", b"x")):
        with pytest.raises(ObjectStoreUnavailable, match="bucket does not exist"):
            act()


def test_a_new_bucket_may_be_called_a_bucket(
    root: str, running: ObjectStore, tmp_path: Path
) -> None:
    running.make_bucket("a-bucket")
    files = Files(f"s3://a-bucket/{tmp_path.name}")
    assert files.top_names("checkpoints") == set()
    with pytest.raises(Damaged, match="is missing"):
        files.get("payloads/aa/none")


ANSWERS = {
    "too large": (400, b"<Error><Code>EntityTooLarge</Code><Message>too big</Message></Error>"),
    "too large for a proxy": (413, b"<html><h1>413 Request Entity Too Large</h1></html>"),
    "no rights": (403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    "slow down": (503, b"<Error><Code>SlowDown</Code><Message>wait</Message></Error>"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_errors_of_one_object_differ_from_errors_of_the_store(
    root: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    status, body = ANSWERS[answer]

    class Refusing(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        try:
            expected = ObjectTooLarge if answer.startswith("too large") else ObjectStoreUnavailable
            with pytest.raises(expected):
                Files(root).put("results", b"abc")
        finally:
            server.shutdown()


def test_a_store_that_does_not_respond_times_out(root: str, running: ObjectStore) -> None:
    files = Files(root)
    files.put("payloads", b"abc")
    began_s = time.monotonic()
    with running.paused(), pytest.raises(ObjectStoreUnavailable):
        files.put("payloads", b"abc")
    # Two tries of a second; the libraries' own defaults are five times five tries.
    assert time.monotonic() - began_s < SOON_S


async def state(api: Api) -> str | None:
    answer = await api.get("/api/v1/healthz")
    return None if answer.status == 200 else str(answer.json["trouble"])


async def until_well(api: Api) -> None:
    deadline = time.monotonic() + SOON_S
    while await state(api) is not None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


@pytest.mark.anyio
async def test_training_saving_and_sampling_with_an_empty_cache(root: str, tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path / "one", storage=root) as api:
        model = await api.model()
        await api.forward_backward(model, 1, tokens=LARGE)
        assert await api.value(await api.optim_step(model, 2)) == LARGE
        saved = await api.result(
            await api.step("save_weights_for_sampler", model_id=model, seq_id=3, path="a")
        )
        assert await api.app.state.context.scheduler.snapshot(model)  # type: ignore[union-attr]
    # Another machine, with the same database and object store, and an empty folder.
    for gone in ("checkpoints", "snapshots"):
        shutil.rmtree(tmp_path / "one" / gone)
    async with hosted(EchoExecutor(), tmp_path / "one", storage=root) as api:
        body = {
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {},
            "model_path": saved["path"],
        }
        request = (await api.post("asample", body)).json["request_id"]
        assert (await api.result(request))["sequences"][0]["tokens"] == [LARGE]
        assert await api.value(await api.optim_step(model, 4)) == 2 * LARGE


@pytest.mark.anyio
async def test_a_result_waits_for_a_store_that_does_not_respond(
    root: str, running: ObjectStore, tmp_path: Path
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path / "data", storage=root) as api:
        model = await api.model()
        echo.open.clear()
        while not echo.entered.locked():
            await echo.entered.acquire()
        passed = await api.forward_backward(model, 1, tokens=LARGE)
        stepped = await api.optim_step(model, 2)
        await echo.entered.acquire()
        with running.paused():
            echo.open.set()
            deadline = time.monotonic() + SOON_S
            while await state(api) != "away":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            refused = await api.post(
                "forward_backward", pass_body(model, 3, LARGE), headers=PROTOBUF
            )
            assert refused.status == 503
            assert "object store" in refused.body.decode()
        assert (await api.passed(passed)).metrics
        assert await api.value(stepped) == LARGE
        await until_well(api)
        await api.forward_backward(model, 3, tokens=LARGE)
        assert await api.value(await api.optim_step(model, 4)) == 3 * LARGE


@pytest.mark.anyio
async def test_new_work_is_refused_during_an_outage_and_accepted_after_it(
    root: str, running: ObjectStore, tmp_path: Path
) -> None:
    async with hosted(EchoExecutor(), tmp_path / "data", storage=root) as api:
        model = await api.model()
        running.kill()
        try:
            refused = await api.post(
                "forward_backward", pass_body(model, 1, LARGE), headers=PROTOBUF
            )
            assert refused.status == 503
            assert await state(api) == "away"
            # Small requests too: their results may be large.
            small = await api.post("forward_backward", pass_body(model, 1), headers=PROTOBUF)
            assert small.status == 503
        finally:
            running.start()
        await until_well(api)
        await api.forward_backward(model, 1, tokens=LARGE)
        assert await api.value(await api.optim_step(model, 2)) == LARGE


@pytest.mark.anyio
async def test_a_save_waits_for_the_store(root: str, running: ObjectStore, tmp_path: Path) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path / "data", storage=root) as api:
        model = await api.model()
        echo.open.clear()
        saving = await api.step("save_weights", model_id=model, seq_id=1, path="a")
        with running.paused():
            echo.open.set()
            deadline = time.monotonic() + SOON_S
            while await state(api) != "away":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        assert (await api.result(saving))["path"].endswith("/weights/a")


def test_a_server_does_not_start_without_its_object_store(
    root: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tinkex.cli.main", "serve", f"x={tiny_model}", "--port", "0"),
            *("--data", str(tmp_path / "data"), "--storage", root),
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    assert "object store" in done.stderr
    assert "--storage" in done.stderr
    assert "Traceback" not in done.stderr
