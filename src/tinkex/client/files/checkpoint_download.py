"""
Downloads the files of a checkpoint into a folder.

    folder = tinkex.download_checkpoint("tinker://RUN/sampler_weights/NAME", "adapter")

Files are first written to `FOLDER.part`, from which an interrupted download resumes. At the end the
folder is renamed to FOLDER.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tinkex import file_locks
from tinkex.client.errors import APIStatusError
from tinkex.client.files.file_download import DownloadFailed, Fetcher, FileInfo, Links, Stopped
from tinkex.client.futures import refuse_to_block
from tinkex.durable_files import may_be_replaced, replace_folder
from tinkex.tracebacks import ends_at_caller
from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

Progress = Callable[[int, int], None]

#: Files downloaded in parallel.
MAX_PARALLEL_FILES = 4
ARCHIVE = "archive.tar"
EXPORT_TTL_S = 3600
#: What an archive may take when it is unpacked, as a multiple of its size. An adapter that has not
#: been trained is mostly zeros; what expands a thousandfold is no adapter.
MAX_EXPANSION, MIN_UNPACKED_BYTES = 20, 64 << 20
#: Of a header with a long name, which is read into memory.
MAX_TAR_HEADER = 1 << 20
#: Statuses of services that have no archives.
NO_ARCHIVES = frozenset({404, 405, 410, 501})


@ends_at_caller
def download_checkpoint(
    path: str,
    folder: str | Path,
    *,
    rest: RestClient | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """
    Download the adapter files of a checkpoint of any kind.

    A failed download resumes where it stopped when it is called again.

    Args:
        path: The checkpoint, `tinker://RUN/KIND/NAME`.
        folder: Where the files go; it is created.
        rest: The client to use. None: a new one with the default service and key.
        overwrite: Whether to replace a folder that is not empty; else that is an error.
        progress: Called with `(done_bytes, total_bytes)` from another thread, one call at a time.

    Returns:
        The folder.

    Raises:
        FileExistsError: The folder is not empty, or must not be replaced: it is the current one,
            the home folder, or around one of these.
        NotFoundError: No such checkpoint, or not yours.

    Example:
        tinkex.download_checkpoint(path, "adapter", rest=rest)
    """
    refuse_to_block("download_checkpoint", "download_checkpoint_async")
    stop = threading.Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="tinkex-download")
    try:
        # On a separate thread, so that Ctrl-C works while a connection is idle.
        return pool.submit(_download, path, Path(folder), rest, overwrite, progress, stop).result()
    finally:
        stop.set()
        pool.shutdown(wait=False)


async def download_checkpoint_async(
    path: str,
    folder: str | Path,
    *,
    rest: RestClient | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """
    `download_checkpoint` for coroutines. If cancelled, it stops after the current piece.

    Args:
        path: The checkpoint, `tinker://RUN/KIND/NAME`.
        folder: Where the files go; it is created.
        rest: The client to use. None: a new one with the default service and key.
        overwrite: Whether to replace a folder that is not empty; else that is an error.
        progress: Called with `(done_bytes, total_bytes)` from another thread, one call at a time.

    Returns:
        The folder.

    Example:
        async def fetch():
            await tinkex.download_checkpoint_async(path, "adapter", rest=rest)
    """
    stop = threading.Event()
    try:
        return await asyncio.to_thread(
            _download, path, Path(folder), rest, overwrite, progress, stop
        )
    finally:
        stop.set()


def _download(
    path: str,
    folder: Path,
    rest: RestClient | None,
    overwrite: bool,
    progress: Progress | None,
    stop: threading.Event,
) -> Path:
    from tinkex.client.rest import RestClient

    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    check_target(folder, overwrite)
    if rest is None:
        with RestClient() as own:
            return _download(path, folder, own, overwrite, progress, stop)
    target = folder.absolute()
    part = target.with_name(f"{target.name}.part")
    fetcher = Fetcher(rest.holder.settings, stop)
    with contextlib.ExitStack() as stack:
        if parsed.checkpoint_type == "external":
            links = _file_links(rest, path)
        elif (archive := _archive_links(rest, path)) is not None:
            links = archive
        else:
            links = _file_links(rest, stack.enter_context(_exported(rest, parsed)))
        part.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_exclusive(part))
        files = _fetch_all(fetcher, links, part, path, progress)
        if files == [ARCHIVE] and parsed.checkpoint_type != "external":
            _unpack(part / "files" / ARCHIVE, part / "unpacked")
            ready = part / "unpacked"
        else:
            ready = part / "files"
        check_target(folder, overwrite)  # again: the download may have taken a long time
        replace_folder(ready, folder)
    shutil.rmtree(part, ignore_errors=True)
    return folder


# -- decisions -----------------------------------------------------------------------------------


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise if the folder cannot be used. Runs before anything is downloaded."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file. Choose another folder for the checkpoint.")
    if not folder.is_dir():
        return
    if any(folder.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{folder} already exists and is not empty. Choose another folder, or pass "
            "overwrite=True to replace it."
        )
    if not may_be_replaced(folder):
        raise FileExistsError(
            f"{folder} is the current folder, your home folder, or around one of these. Such a "
            "folder is never replaced. Choose a new one for the checkpoint."
        )


def safe_path(name: str) -> PurePosixPath:
    """A file's path inside the folder; raises if it could lead outside."""
    path = PurePosixPath(name)
    if (
        not path.parts
        or path.is_absolute()
        or ".." in path.parts
        or any(bad in name for bad in "\\:\0")
        or not all(part.strip(" .") for part in path.parts)
    ):
        raise DownloadFailed(
            f"The checkpoint has a file {name!r}, whose name is invalid or leads out of the "
            "folder. Nothing was written."
        )
    return path


def resumable(state: Mapping[str, Any], path: str, name: str, info: FileInfo, have: int) -> bool:
    """Whether the partial file of an earlier download belongs to the current file."""
    files = state.get("files")
    known = files.get(name) if isinstance(files, dict) and state.get("path") == path else None
    return info.tag is not None and known == [info.tag, info.size] and have <= info.size


# -- links ---------------------------------------------------------------------------------------


def _file_links(rest: RestClient, path: str) -> Links:
    def renew() -> tuple[Mapping[str, str], datetime]:
        found = rest.get_external_weights_urls(path).result()
        return found.urls, found.expires

    return Links(renew)


def _archive_links(rest: RestClient, path: str) -> Links | None:
    """One link, to a tar of the files; None if the service has no archives."""

    def renew() -> tuple[Mapping[str, str], datetime]:
        found = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        return {ARCHIVE: found.url}, found.expires

    links = Links(renew)
    try:
        links.names()
    except APIStatusError as error:
        if error.status_code not in NO_ARCHIVES:
            raise
        rest.get_weights_info_by_tinker_path(path).result()  # raises if there is no such checkpoint
        return None
    return links


@contextlib.contextmanager
def _exported(rest: RestClient, parsed: ParsedCheckpointTinkerPath) -> Iterator[str]:
    """Exports through a temporary model, for services without archives; then deletes the export."""
    from tinkex.client.service import ServiceClient

    if parsed.checkpoint_type != "training":
        raise DownloadFailed(
            f"This service has no downloads of {parsed.tinker_path}. Save with save_state() or "
            "save_weights_external(), and download that."
        )
    settings = rest.holder.settings
    with ServiceClient(
        base_url=settings.base_url,
        api_key=settings.api_key.value if settings.api_key else None,
        default_headers_overrides=settings.headers,
    ) as service:
        training = service.create_training_client_from_state(parsed.tinker_path)
        name = f"download-{uuid.uuid4().hex[:12]}"
        export = training.save_weights_external(name, ttl_seconds=EXPORT_TTL_S).result().path
        try:
            yield export
        finally:
            # It expires by itself; a failure here must not hide an earlier error.
            with contextlib.suppress(Exception):
                rest.delete_checkpoint_from_tinker_path(export).result(30)


# -- downloading ---------------------------------------------------------------------------------


def _fetch_all(
    fetcher: Fetcher, links: Links, part: Path, path: str, progress: Progress | None
) -> list[str]:
    names = links.names()
    targets = {name: part / "files" / safe_path(name) for name in names}
    if not targets:
        raise DownloadFailed(f"{path} has no files.")
    with ThreadPoolExecutor(MAX_PARALLEL_FILES, thread_name_prefix="tinkex-download") as pool:
        try:
            probes = [pool.submit(fetcher.probe, links, name) for name in names]
            info = {name: probe.result() for name, probe in zip(names, probes, strict=True)}
            done = _prepare(part, path, info, targets)
            show = _ProgressSum(progress, done, sum(each.size for each in info.values()))
            work = [
                pool.submit(fetcher.fetch, links, name, info[name], targets[name], show.on_bytes)
                for name in names
            ]
            failures = [error for each in work if (error := _outcome(each, fetcher))]
        except BaseException:
            fetcher.stop.set()  # before the pool waits for its threads
            raise
    if failures:
        raise next((each for each in failures if not isinstance(each, Stopped)), failures[0])
    return names


def _outcome(work: Any, fetcher: Fetcher) -> BaseException | None:
    error: BaseException | None = work.exception()
    if error is not None:
        fetcher.stop.set()  # stops the other downloads
    return error


def _prepare(
    part: Path, path: str, info: Mapping[str, FileInfo], targets: Mapping[str, Path]
) -> int:
    """Delete leftovers of other downloads; returns how many bytes can be kept."""
    note = part / "download.json"
    try:
        state = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    kept = 0
    shutil.rmtree(part / "unpacked", ignore_errors=True)
    for file in (part / "files").rglob("*"):
        if file.is_file() and file not in targets.values():
            file.unlink()
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        have = target.stat().st_size if target.is_file() else 0
        if have and not resumable(state, path, name, info[name], have):
            target.unlink()
            have = 0
        kept += have
    files = {name: [each.tag, each.size] for name, each in info.items()}
    note.write_text(json.dumps({"path": path, "files": files}), encoding="utf-8")
    missing = sum(each.size for each in info.values()) - kept
    # While an archive is unpacked, it takes its size twice.
    needed = missing + (info[ARCHIVE].size if ARCHIVE in info else 0)
    if needed > (free := shutil.disk_usage(part).free):
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(part))
    return kept


class _ProgressSum:
    """Adds up the progress of all threads."""

    def __init__(self, progress: Progress | None, done: int, total: int) -> None:
        self._progress, self._done, self._total = progress, done, total
        self._lock = threading.Lock()
        self.on_bytes(0)

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self._total)


# -- unpacking -----------------------------------------------------------------------------------


class _Member(tarfile.TarInfo):
    """A member of an archive whose headers have a usual size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        found = super().frombuf(buf, encoding, errors)
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError(f"{found.name} is a sparse file")
        if not found.isreg() and not found.isdir() and found.size > MAX_TAR_HEADER:
            raise tarfile.ReadError(f"a header has {found.size:,} bytes")
        return found


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack regular files only, none outside the folder, and not more than an adapter has."""
    folder.mkdir()
    left = max(MIN_UNPACKED_BYTES, MAX_EXPANSION * archive.stat().st_size)
    try:
        with tarfile.open(archive, tarinfo=_Member) as tar:
            for member in tar:
                if member.isdir():
                    continue
                target = folder / safe_path(member.name)
                left -= member.size
                if left < 0:
                    raise tarfile.ReadError(
                        f"it unpacks to more than {MAX_EXPANSION} times its size"
                    )
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise DownloadFailed(
                        f"The archive has {member.name!r}, which is not a regular file. Nothing "
                        "was unpacked."
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                if target.stat().st_size != member.size:
                    raise tarfile.ReadError(f"{member.name} is cut short")
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        archive.unlink()
        raise DownloadFailed(
            f"The downloaded archive is damaged ({error}). It was deleted; download it again."
        ) from error


@contextlib.contextmanager
def _exclusive(part: Path) -> Iterator[None]:
    """Lock the folder: two downloads would write into the same files."""
    with (part / "lock").open("wb") as file:
        if not file_locks.try_lock(file):
            raise RuntimeError(
                f"Another download is writing to {part}. Wait for it, or choose another folder."
            )
        yield
