"""Downloads from a stand-in service that truncates, stalls, loses and corrupts files."""

import asyncio
import base64
import concurrent.futures
import functools
import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import tinkex
from http_stub import Received, Reply, StubServer, reply_json, stub_server
from tinkex.client.errors import status_error
from tinkex.client.files import checkpoint_download as module
from tinkex.client.files.checkpoint_download import (
    check_target,
    download_checkpoint,
    download_checkpoint_async,
    resumable,
    safe_path,
)
from tinkex.client.files.file_download import DownloadFailed, Fetcher, FileInfo, Links, file_info
from tinkex.client.http.retry import RetryPolicy
from tinkex.client.http.transport import Request, Response
from tinkex.client.rest import RestClient
from waiting import until

EXPORT = "tinker://s:train:0/external_weights/e"
SAMPLER = "tinker://s:train:0/sampler_weights/w"
STATE = "tinker://s:train:0/weights/w"


class Files:
    """A service with one checkpoint, and the server of its files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.url = ""
        self.tag = '"1"'
        self.lasts = timedelta(minutes=15)
        self.signatures = 0
        #: Called for each file request: a reply instead of the right one, or None.
        self.fault: Callable[[str, Received], Reply | None] = lambda name, request: None
        self.headers: dict[str, str] = {}
        self.ranges = True

    def __call__(self, request: Received) -> Reply:
        path = request.path.partition("?")[0].removeprefix("/api/v1/")
        if path.startswith("client/"):
            return reply_json({})
        expires = datetime.now(UTC) + self.lasts
        if path.endswith("/external_weights_urls"):
            self.signatures += 1
            urls = {name: f"{self.url}/files/{name}?sig={self.signatures}" for name in self.files}
            return reply_json({"urls": urls, "expires": expires.isoformat()})
        if path.endswith("/archive"):
            self.signatures += 1
            url = f"{self.url}/files/archive.tar?sig={self.signatures}"
            return reply_json({"url": url, "expires": expires.isoformat()})
        name = path.removeprefix("/files/")
        if name not in self.files:
            return reply_json({"detail": f"nothing at {path}"}, 404)
        return self.fault(name, request) or self.whole(name, request)

    def whole(self, name: str, request: Received) -> Reply:
        body = self.files[name]
        headers = {"ETag": self.tag, **self.headers}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if found and self.ranges and request.headers.get("if-range", self.tag) == self.tag:
            start, stop = int(found[1]), int(found[2] or len(body) - 1) + 1
            if start >= len(body):
                return Reply(status=416, headers={"Content-Range": f"bytes */{len(body)}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
            return Reply(status=206, body=body[start:stop], headers=headers)
        return Reply(body=body, headers=headers)


@pytest.fixture
def files() -> Files:
    return Files(
        {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 40}
    )


@pytest.fixture
def here(files: Files) -> Iterator[StubServer]:
    with stub_server(files) as running:
        files.url = running.url
        yield running


@pytest.fixture
def rest(here: StubServer) -> Iterator[RestClient]:
    with RestClient(base_url=here.url, api_key="tml-secret") as client:
        yield client


@pytest.fixture(autouse=True)
def _quick_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(RetryPolicy, first_delay_s=0.02)
    monkeypatch.setattr("tinkex.client.files.file_download.RetryPolicy", quick)


def content(folder: Path) -> dict[str, bytes]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


def fetched(here: StubServer, name: str) -> list[str]:
    """The requested ranges, without those of the probe."""
    requests = [each for each in here.requests if each.path.startswith(f"/files/{name}")]
    return [each.headers["range"] for each in requests if each.headers["range"] != "bytes=0-0"]


def tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def test_files_arrive_complete_with_progress_and_without_the_key(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    target = tmp_path / "deep" / "adapter"
    folder = download_checkpoint(
        EXPORT, target, rest=rest, progress=lambda done, total: seen.append((done, total))
    )
    assert folder == target
    assert content(folder) == files.files
    assert [each.name for each in target.parent.iterdir()] == ["adapter"]
    assert seen[0] == (0, 10242)
    assert seen[-1] == (10242, 10242)
    assert seen == sorted(seen)
    links = [each for each in here.requests if each.path.startswith("/files/")]
    assert links
    assert all("tml-secret" not in str(each.headers) for each in links)


def test_defect_21_a_broken_connection_resumes_where_it_broke(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    def cut(name: str, request: Received) -> Reply | None:
        wanted = request.headers["range"]
        if name == "adapter_model.safetensors" and wanted in ("bytes=0-", "bytes=1000-"):
            right = files.whole(name, request)
            return Reply(
                status=right.status, body=right.body, headers=right.headers, cut_after=1000
            )
        return None

    files.fault = cut
    folder = download_checkpoint(EXPORT, tmp_path / "a", rest=rest)
    assert content(folder) == files.files
    assert fetched(here, "adapter_model") == ["bytes=0-", "bytes=1000-", "bytes=2000-"]


def test_defect_21_a_failed_download_resumes_later(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    def fail(name: str, request: Received) -> Reply | None:
        if name != "adapter_model.safetensors" or request.headers["range"] == "bytes=0-0":
            return None
        if request.headers["range"] == "bytes=0-":
            right = files.whole(name, request)
            return Reply(status=206, body=right.body, headers=right.headers, cut_after=5000)
        return reply_json({"detail": "not today"}, 400)

    files.fault = fail
    target = tmp_path / "a"
    with pytest.raises(tinkex.BadRequestError, match="not today") as failure:
        download_checkpoint(EXPORT, target, rest=rest)
    assert "sig=" not in repr(failure.value.request)
    assert not target.exists()
    files.fault = lambda name, request: None
    here.requests.clear()
    seen: list[int] = []
    download_checkpoint(EXPORT, target, rest=rest, progress=lambda done, _: seen.append(done))
    assert content(target) == files.files
    assert seen[0] >= 5000
    assert fetched(here, "adapter_model") == ["bytes=5000-"]
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_leftovers_of_another_version_are_not_mixed_in(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    test_defect_21_a_failed_download_resumes_later(here, files, rest, tmp_path)
    part = tmp_path / "b.part" / "files"
    part.mkdir(parents=True)
    (part / "adapter_model.safetensors").write_bytes(b"something else")
    (part / "no longer there").write_bytes(b"x")
    note = {"path": EXPORT, "files": {"adapter_model.safetensors": ['"0"', 10240]}}
    (part.parent / "download.json").write_text(json.dumps(note))
    assert content(download_checkpoint(EXPORT, tmp_path / "b", rest=rest)) == files.files


def test_a_service_without_ranges_is_downloaded_from_the_beginning(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    files.ranges = False
    cuts = iter([1000, 2000])

    def cut(name: str, request: Received) -> Reply | None:
        if name != "adapter_model.safetensors" or request.headers["range"] == "bytes=0-0":
            return None
        after = next(cuts, None)
        right = files.whole(name, request)
        return Reply(body=right.body, headers=right.headers, cut_after=after)

    files.fault = cut
    assert content(download_checkpoint(EXPORT, tmp_path / "a", rest=rest)) == files.files


def test_a_file_that_changes_during_the_download_is_an_error(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    def change(name: str, request: Received) -> Reply | None:
        if request.headers["range"] == "bytes=0-0":
            return None
        files.tag = '"2"'
        files.files = {name: body + b"more" for name, body in files.files.items()}
        return None

    files.fault = change
    with pytest.raises(DownloadFailed, match="changed"):
        download_checkpoint(EXPORT, tmp_path / "a", rest=rest)
    assert not (tmp_path / "a").exists()


def test_defect_21_a_checksum_is_verified_where_the_service_gives_one(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    files.files = {"model": b"right"}
    digest = base64.b64encode(hashlib.sha256(b"right").digest()).decode()
    files.headers = {"Repr-Digest": f"sha-256=:{digest}:"}
    assert content(download_checkpoint(EXPORT, tmp_path / "a", rest=rest)) == {"model": b"right"}
    files.files = {"model": b"wrong"}
    with pytest.raises(DownloadFailed, match="checksum"):
        download_checkpoint(EXPORT, tmp_path / "b", rest=rest)
    assert not (tmp_path / "b").exists()


def test_refused_links_are_renewed(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    files.fault = lambda name, request: (
        reply_json({"detail": "expired"}, 403) if request.path.endswith("sig=1") else None
    )
    assert content(download_checkpoint(EXPORT, tmp_path / "a", rest=rest)) == files.files
    assert files.signatures == 2
    files.fault = lambda name, request: reply_json({"detail": "never"}, 403)
    with pytest.raises(tinkex.PermissionDeniedError, match="never"):
        download_checkpoint(EXPORT, tmp_path / "b", rest=rest)


@pytest.mark.parametrize("status", [403, None])
def test_a_failed_request_for_links_is_not_repeated_here(status: int | None) -> None:
    """`Calls` has retried it already; its 403 says nothing about a link."""
    request = Request(method="GET", url="http://x/api/v1/y")
    asked: list[None] = []

    def renew() -> tuple[dict[str, str], datetime]:
        asked.append(None)
        if status is None:
            raise tinkex.APIConnectionError(request)
        raise status_error(Response(status_code=status, request=request))

    fetcher = Fetcher(tinkex.Settings(base_url="http://x", give_up_s=0.2), threading.Event())
    with pytest.raises(tinkex.APIError):
        fetcher.probe(Links(renew), "a")
    assert len(asked) == 1


def test_a_download_that_waits_says_so_and_that_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = threading.Event()
    failing.set()

    def answer(request: Received) -> Reply:
        if failing.is_set():
            return reply_json({"detail": "the store is down"}, 503)
        return Reply(status=206, body=b"x", headers={"Content-Range": "bytes 0-0/1"})

    settings = tinkex.Settings(base_url="http://x", wait_notice_s=0.1, give_up_s=30.0)
    with stub_server(answer) as stub:
        links = Links(lambda: ({"a": f"{stub.url}/a"}, datetime.now(UTC) + timedelta(hours=1)))
        fetcher = Fetcher(settings, threading.Event())
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            probed = [threads.submit(fetcher.probe, links, "a") for _ in range(4)]
            until(lambda: caplog.records)
            failing.clear()
            assert all(each.result(20).size == 1 for each in probed)
    first, last = [record.getMessage() for record in caplog.records]
    assert re.match(
        r"Download of a: the store is down. Trying for (30|2\d) s more \(TINKEX_GIVE", first
    )
    assert last.startswith("Download of a goes on after ")


def test_links_are_renewed_before_they_expire() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    made: list[datetime] = []

    def renew() -> tuple[dict[str, str], datetime]:
        made.append(now)
        return {"a": f"http://x/{len(made)}"}, now + timedelta(minutes=15)

    links = Links(renew, now=lambda: now)
    assert links.names() == ["a"]
    assert links.get("a") == "http://x/1"
    now += timedelta(minutes=9)
    assert links.get("a") == "http://x/1"
    now += timedelta(minutes=2)  # four minutes are left
    assert links.get("a") == "http://x/2"
    links.refused("a", "http://x/1")  # an old link
    assert links.get("a") == "http://x/2"
    links.refused("a", "http://x/2")
    assert links.get("a") == "http://x/3"
    with pytest.raises(DownloadFailed, match="was removed"):
        links.get("b")


def test_an_archive_is_unpacked(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    inside = {"adapter_config.json": b"{}", "more/weights.bin": b"w" * 3000}
    files.files = {"archive.tar": tar(inside)}
    for path in (SAMPLER, STATE):
        target = tmp_path / path.split("/")[3]
        assert content(download_checkpoint(path, target, rest=rest)) == inside


NAMES = ["../x", "/etc/x", "a/../../x", "..", "a\\..\\x", "C:x", "a/./..", "", ".", "a/ /b", "\0"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(DownloadFailed, match="leads out"):
        safe_path(name)


def test_a_checkpoint_with_a_path_outside_the_folder_writes_nothing(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    files.files = {"../../outside": b"x"}
    with pytest.raises(DownloadFailed, match="leads out"):
        download_checkpoint(EXPORT, tmp_path / "a", rest=rest)
    files.files = {"archive.tar": tar({"../../../outside": b"x"})}
    with pytest.raises(DownloadFailed, match="leads out"):
        download_checkpoint(STATE, tmp_path / "b", rest=rest)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        link = tarfile.TarInfo("weights")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        archive.addfile(link)
    files.files = {"archive.tar": packed.getvalue()}
    with pytest.raises(DownloadFailed, match="not a regular file"):
        download_checkpoint(STATE, tmp_path / "c", rest=rest)
    files.files = {"archive.tar": b"this is no archive" * 100}
    with pytest.raises(DownloadFailed, match="damaged"):
        download_checkpoint(STATE, tmp_path / "d", rest=rest)
    assert not outside.exists()
    assert not any((tmp_path / name).exists() for name in "abcd")


def _zeros(archive: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("weights")
    info.size = 80 << 20
    archive.addfile(info, io.BytesIO(bytes(info.size)))


def _endless_name(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("x" * (2 << 20)))


def _sparse(archive: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("weights")
    info.type = tarfile.GNUTYPE_SPARSE
    archive.addfile(info)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (_zeros, "it unpacks to more than 20 times its size"),
        (_endless_name, "a header has 2,0"),
        (_sparse, "weights is a sparse file"),
    ],
)
def test_an_archive_that_expands_without_measure_is_refused(
    fill: Callable[[tarfile.TarFile], None],
    message: str,
    here: StubServer,
    files: Files,
    rest: RestClient,
    tmp_path: Path,
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        fill(archive)
    files.files = {"archive.tar": packed.getvalue()}
    with pytest.raises(DownloadFailed, match=message):
        download_checkpoint(STATE, tmp_path / "a", rest=rest)
    assert not (tmp_path / "a").exists()


def test_a_link_to_a_file_of_this_machine_is_refused(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    files.url = f"file://{secret}#"
    with pytest.raises(DownloadFailed, match="http"):
        download_checkpoint(EXPORT, tmp_path / "a", rest=rest)


def test_an_existing_folder_is_replaced_only_with_overwrite(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    target = tmp_path / "a"
    target.mkdir()
    check_target(target, overwrite=False)  # an empty one is fine
    (target / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        download_checkpoint(EXPORT, target, rest=rest)
    assert [each for each in here.requests if "external" in each.path] == []
    files.fault = lambda name, request: reply_json({"detail": "no"}, 404)
    with pytest.raises(tinkex.NotFoundError):
        download_checkpoint(EXPORT, target, rest=rest, overwrite=True)
    assert content(target) == {"mine": b"kept"}
    files.fault = lambda name, request: None
    download_checkpoint(EXPORT, target, rest=rest, overwrite=True)
    assert content(target) == files.files
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="is a file"):
        download_checkpoint(EXPORT, tmp_path / "file", rest=rest, overwrite=True)


def test_the_current_folder_and_the_home_folder_are_never_replaced(
    here: StubServer,
    files: Files,
    rest: RestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "home" / "work").mkdir(parents=True)
    (tmp_path / "home" / "work" / "mine").write_text("kept")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for current, target in (("home/work", "."), ("home/work", ".."), (".", "home")):
        monkeypatch.chdir(tmp_path / current)
        with pytest.raises(FileExistsError, match="never replaced"):
            download_checkpoint(EXPORT, target, rest=rest, overwrite=True)
    assert [each for each in here.requests if "external" in each.path] == []
    assert (tmp_path / "home" / "work" / "mine").read_text() == "kept"
    monkeypatch.chdir(tmp_path)
    download_checkpoint(EXPORT, "home/work", rest=rest, overwrite=True)
    assert content(tmp_path / "home" / "work") == files.files


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_current_folder_is_refused_before_the_download(
    here: StubServer,
    rest: RestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
) -> None:
    """Another folder would have its name, and the shell would be in one that is deleted."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for target in (".", tmp_path / "empty"):
        with pytest.raises(FileExistsError, match="never replaced"):
            download_checkpoint(EXPORT, target, rest=rest, overwrite=overwrite)
    assert [each for each in here.requests if "external" in each.path] == []


def test_the_folder_may_be_relative(
    here: StubServer,
    files: Files,
    rest: RestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert content(download_checkpoint(EXPORT, "a", rest=rest)) == files.files
    assert content(tmp_path / "a") == files.files
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(FileExistsError):
        download_checkpoint(EXPORT, ".", rest=rest)


def test_two_downloads_into_one_folder_do_not_mix(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    begun, go = threading.Event(), threading.Event()

    def hold(name: str, request: Received) -> Reply | None:
        begun.set()
        go.wait(10)
        return None

    files.fault = hold
    outcome: list[Path] = []
    first = threading.Thread(
        target=lambda: outcome.append(download_checkpoint(EXPORT, tmp_path / "a", rest=rest))
    )
    first.start()
    assert begun.wait(10)
    with pytest.raises(RuntimeError, match="Another download"):
        download_checkpoint(EXPORT, tmp_path / "a", rest=rest)
    go.set()
    first.join(10)
    assert content(outcome[0]) == files.files


def test_a_full_disk_is_detected_before_the_download(
    here: StubServer,
    files: Files,
    rest: RestClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(OSError, match="10,242 bytes are needed and 100 are free"):
        download_checkpoint(EXPORT, tmp_path / "a", rest=rest)


def test_coroutines_can_wait_and_stop(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    async def whole() -> Path:
        return await download_checkpoint_async(EXPORT, tmp_path / "a", rest=rest)

    assert content(asyncio.run(whole())) == files.files
    begun, go = threading.Event(), threading.Event()

    def hold(name: str, request: Received) -> Reply | None:
        if request.headers["range"] != "bytes=0-0":
            begun.set()
            go.wait(10)
        return None

    files.fault = hold

    async def stopped() -> None:
        task = asyncio.create_task(download_checkpoint_async(EXPORT, tmp_path / "b", rest=rest))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert not (tmp_path / "b").exists()

    async def blocking() -> None:
        files.fault = lambda name, request: None
        download_checkpoint(EXPORT, tmp_path / "c", rest=rest)

    with pytest.warns(RuntimeWarning, match="download_checkpoint_async"):
        asyncio.run(blocking())


def test_without_archives_a_sampler_checkpoint_has_no_files_and_the_error_says_so(
    here: StubServer, files: Files, tmp_path: Path
) -> None:
    info = {"base_model": "m", "is_lora": True, "lora_rank": 4}

    def answer(request: Received) -> Reply:
        if request.path.endswith("weights_info") and SAMPLER in request.body.decode():
            return reply_json(info)
        if "archive" in request.path or "weights_info" in request.path:
            return reply_json({"detail": "there is no such thing"}, 404)
        return files(request)

    with stub_server(answer) as bare, RestClient(base_url=bare.url) as rest:
        with pytest.raises(DownloadFailed, match="save_weights_external"):
            download_checkpoint(SAMPLER, tmp_path / "a", rest=rest)
        with pytest.raises(tinkex.NotFoundError, match="no such thing"):
            download_checkpoint(STATE, tmp_path / "b", rest=rest)


def test_an_invalid_path_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid tinker path"):
        download_checkpoint("tinker://a/b", tmp_path / "a")


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (206, {"content-range": "bytes 0-0/9", "etag": '"a"'}, (9, '"a"')),
        (200, {"content-length": "9", "etag": 'W/"a"', "last-modified": "then"}, (9, "then")),
        (416, {"content-range": "bytes */0"}, (0, None)),
    ],
)
def test_file_info_is_read_from_headers(
    status: int, headers: dict[str, str], expected: tuple[int, str | None]
) -> None:
    info = file_info(status, headers)
    assert (info.size, info.tag) == expected


@pytest.mark.parametrize(
    ("status", "headers"),
    [(206, {}), (200, {}), (200, {"content-length": "9", "content-encoding": "gzip"})],
)
def test_a_file_of_unknown_size_is_refused(status: int, headers: dict[str, str]) -> None:
    with pytest.raises(DownloadFailed, match="how large"):
        file_info(status, headers)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"path": EXPORT, "files": {"f": ["t", 9]}}, True),
        ({"path": EXPORT, "files": {"f": ["u", 9]}}, False),
        ({"path": EXPORT, "files": {"f": ["t", 8]}}, False),
        ({"path": STATE, "files": {"f": ["t", 9]}}, False),
        ({"path": EXPORT, "files": []}, False),
        ({}, False),
    ],
)
def test_only_a_partial_copy_of_the_same_file_is_resumed(
    state: dict[str, Any], expected: bool
) -> None:
    info = FileInfo(size=9, tag="t", sha256=None)
    assert resumable(state, EXPORT, "f", info, 5) is expected
    assert not resumable(state, EXPORT, "f", FileInfo(size=9, tag=None, sha256=None), 5)
    assert not resumable(state, EXPORT, "f", info, 10)


# -- proxies and headers -----------------------------------------------------------------------------

SERVICE = "http://service.invalid"
SECRETS = {
    "CF-Access-Client-Id": "cf-id",
    "CF-Access-Client-Secret": "cf-secret",
    "X-Team": "blue",
    "Authorization": "Basic gateway",
}


@contextmanager
def asking(settings: tinkex.Settings) -> Iterator[RestClient]:
    with tinkex.ServiceClient(settings=settings) as service:
        yield RestClient(service.holder)


@pytest.fixture
def proxy(files: Files) -> Iterator[StubServer]:
    """The only route to the service and to its files."""
    files.url = "http://files.invalid"
    with stub_server(
        lambda request: files(
            replace(request, path=request.path.removeprefix(SERVICE).removeprefix(files.url))
        )
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_other_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("links", [SERVICE, "http://files.invalid"])
def test_h9_files_come_through_the_proxy_of_the_settings(
    proxy: StubServer, files: Files, tmp_path: Path, links: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.url = links
    monkeypatch.setenv("NO_PROXY", "*")  # an explicit proxy wins over the environment
    address = proxy.url.removeprefix("http://")
    settings = tinkex.Settings.resolve(
        base_url=SERVICE, api_key="tml-secret", proxy=f"http://user:p%40ss@{address}", give_up_s=0.3
    )
    with asking(settings) as rest:
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
    assert content(tmp_path / "adapter") == files.files
    requests = [each for each in proxy.requests if each.path.startswith(f"{links}/files/")]
    assert requests
    password = "Basic " + base64.b64encode(b"user:p@ss").decode()
    assert {each.headers["proxy-authorization"] for each in requests} == {password}


def test_h10_downloads_use_the_proxy_of_the_environment_at_the_time_the_client_was_created(
    proxy: StubServer, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    settings = tinkex.Settings.resolve(base_url=SERVICE, api_key="tml-secret", give_up_s=0.3)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    with asking(settings) as rest:
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
    assert content(tmp_path / "adapter") == files.files


@pytest.mark.parametrize(
    ("env", "given", "url", "expected"),
    [
        ({}, None, "http://files.example", None),
        ({"http_proxy": "http://p:1"}, None, "http://files.example", "http://p:1"),
        ({"http_proxy": "http://p:1"}, None, "https://files.example", None),
        ({"http_proxy": "http://p:1", "no_proxy": "files.example"}, None, "http://files.example", None),
        ({"http_proxy": "http://p:1"}, None, "http://127.0.0.1:9000", None),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, "http://g:2", "http://f.example", "http://g:2"),
        ({"all_proxy": "socks5://p:1"}, "http://g:2", "http://files.example", "http://g:2"),
        ({}, "http://g:2", "https://files.example", "http://g:2"),
    ],
)  # fmt: skip
def test_h10_links_to_other_hosts_have_the_proxy_the_settings_found_for_them(
    env: dict[str, str], given: str | None, url: str, expected: str | None, tmp_path: Path
) -> None:
    settings = tinkex.Settings.resolve(
        base_url=SERVICE, api_key="tml-a", proxy=given, env=env, home=tmp_path
    )
    assert settings.proxy_to(url) == expected
    assert replace(settings, give_up_s=1.0).proxy_to(url) == expected
    assert replace(settings, proxy="http://r:3").proxy_to(url) == "http://r:3"


def sent(request: Received) -> set[str]:
    """The secrets in a request."""
    assert "tml-secret" not in str(request.headers)
    return {name for name, value in SECRETS.items() if request.headers.get(name.lower()) == value}


def test_h9_headers_of_the_settings_go_to_files_of_the_service_itself(
    here: StubServer, files: Files, tmp_path: Path
) -> None:
    headers = {**SECRETS, "X-Api-Key": "tml-secret", "range": "bytes=9-9"}
    settings = tinkex.Settings(base_url=here.url, headers=headers)
    with asking(settings) as rest:
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
    assert content(tmp_path / "adapter") == files.files
    links = [each for each in here.requests if each.path.startswith("/files/")]
    assert all(sent(each) == set(SECRETS) for each in links)


def test_h9_headers_of_the_settings_go_to_no_other_origin(
    here: StubServer, files: Files, tmp_path: Path
) -> None:
    with stub_server(files) as elsewhere:
        files.url = elsewhere.url
        settings = tinkex.Settings(base_url=here.url, headers=SECRETS)
        with asking(settings) as rest:
            download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
        assert elsewhere.requests
        assert not any(sent(each) for each in elsewhere.requests)


def test_h9_redirects_keep_the_headers_within_the_origin_and_drop_them_outside(
    here: StubServer, files: Files, tmp_path: Path
) -> None:
    """The link redirects to another path here, then to another origin, then back."""

    def fault(name: str, request: Received) -> Reply | None:
        step = request.path.partition("step=")[2]
        to = {"": f"{here.url}/files/{name}?step=1", "1": f"{elsewhere.url}/{name}"}.get(step)
        return None if to is None else Reply(status=302, headers={"Location": to})

    def back(request: Received) -> Reply:
        return Reply(status=307, headers={"Location": f"{here.url}/files{request.path}?step=2"})

    files.fault = fault
    with stub_server(back) as elsewhere:
        settings = tinkex.Settings(base_url=here.url, headers=SECRETS)
        with asking(settings) as rest:
            download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
        assert content(tmp_path / "adapter") == files.files
        assert elsewhere.requests
        assert not any(sent(each) for each in elsewhere.requests)
    found = {
        each.path[-6:]: sent(each) for each in here.requests if each.path.startswith("/files/")
    }
    assert found.pop("step=1") == set(SECRETS)
    assert found.pop("step=2") == set()
    assert all(each == set(SECRETS) for each in found.values())


def test_a_redirect_to_another_kind_of_address_is_refused(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    files.fault = lambda name, request: Reply(status=302, headers={"Location": "ftp://127.0.0.1/x"})
    with pytest.raises(DownloadFailed, match="neither http:// nor https://"):
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)


@pytest.mark.parametrize(
    "location", ["http://127.0.0.1:port/x", "http://127.0.0.1:99999/x", "http://[::1/x"]
)
def test_a_redirect_to_an_invalid_address_is_refused(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path, location: str
) -> None:
    files.fault = lambda name, request: Reply(status=302, headers={"Location": location})
    with pytest.raises(DownloadFailed, match="neither http:// nor https://"):
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)


def test_a_link_with_an_invalid_port_is_refused(
    here: StubServer, files: Files, rest: RestClient, tmp_path: Path
) -> None:
    files.url = "http://127.0.0.1:port"
    with pytest.raises(DownloadFailed, match="not an http://"):
        download_checkpoint(EXPORT, tmp_path / "adapter", rest=rest)
