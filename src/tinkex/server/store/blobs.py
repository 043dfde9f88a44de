"""
Blob storage: payloads, results, checkpoints and snapshots as files in a folder or an object store.

A file or folder has a key: its path below the storage root. It is durable before a row refers to
its key. Also here: fingerprints that detect damage.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tinkex.durable_files import atomic_folder, fingerprint, write_file
from tinkex.server.store.storage_health import Damaged, ObjectStoreUnavailable
from tinkex.wire.errors import UserFailure

#: The prefix of a problem that is caused by permissions or the disk: the file itself may be intact.
UNREADABLE = "cannot be read"

# Errors of reading a single file that do not mean that the whole disk fails.
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)

# Files remembered as intact.
MAX_KNOWN = 10_000

# Hex digits of the fingerprint in a file name.
FINGERPRINT_DIGITS = 32


#: The key prefixes, and how many path components a key has below its prefix.
PREFIX_DEPTHS = {"payloads": 2, "results": 2, "checkpoints": 4, "snapshots": 2}


def is_key(text: str) -> bool:
    """Whether a text is a key below one of the prefixes; it cannot lead outside the root."""
    prefix, *names = text.split("/")
    return (
        prefix in PREFIX_DEPTHS
        and names != []
        and not {"", ".", ".."} & set(names)
        and "\0" not in text
    )


#: Object store timeouts: to connect, and between two parts of a response.
CONNECT_S, READ_S = 10, 30
_S3 = {
    "connect_timeout": CONNECT_S,
    "read_timeout": READ_S,
    # One retry, for a connection that the store had closed. The callers decide about longer waits:
    # new work is refused meanwhile, accepted work is retried until it succeeds.
    "retries": {"total_max_attempts": 2},
}

# Errors of the local disk while an object is downloaded.
_LOCAL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


#: Error codes of an object store for an object that is too large: a retry does not help.
_TOO_LARGE = ("EntityTooLarge", 413)


class ObjectTooLarge(UserFailure):
    """The object store does not accept an object of this size."""


class Files:
    """Files and folders by key, below one root: a local folder or any fsspec URL."""

    def __init__(self, root_url: str) -> None:
        # A cached listing would miss what other processes write.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        is_s3 = root_url.startswith(("s3://", "s3a://"))
        if is_s3:
            options.update(_s3_options())
        filesystem, root = fsspec.core.url_to_fs(root_url, **options)
        if is_s3:
            filesystem.retries = 1  # see _S3
        self._filesystem: fsspec.AbstractFileSystem = filesystem
        self._root: str = root
        #: Local payloads that are known to be intact: key -> identity of the file.
        self._known: dict[str, tuple[int, int, int]] = {}
        #: The root, if it is a local folder. Paths below it are built as strings, because `Path`
        #: interns every component, and the interpreter never frees those.
        self.local: str | None = root if isinstance(filesystem, LocalFileSystem) else None

    def is_same(self, other: "Files") -> bool:
        """Whether both have the same root, however it was named."""
        if self.local is not None and other.local is not None:
            return os.path.realpath(self.local) == os.path.realpath(other.local)
        return type(self._filesystem) is type(other._filesystem) and self._root == other._root

    def put(self, prefix: str, data: bytes) -> str:
        """Write `data` durably; returns its key, which contains its fingerprint."""
        name = f"{secrets.token_hex(16)}.{hashlib.sha256(data).hexdigest()[:FINGERPRINT_DIGITS]}"
        key = f"{prefix}/{name[:2]}/{name}"
        self.write(key, data)
        if self.local is not None:
            self._remember(key, os.stat(f"{self.local}/{key}"))
        return key

    def known(self, key: str) -> bool:
        """Whether a local file is unchanged since it was written here, or read and verified."""
        if (identity := self._known.get(key)) is None:
            return False
        try:
            with open(f"{self.local}/{key}", "rb") as file:
                return _identity(os.fstat(file.fileno())) == identity
        except OSError:
            return False  # `get` reports what is wrong

    def _remember(self, key: str, stats: os.stat_result) -> None:
        if not key.startswith("payloads/"):
            return  # only payloads are used without `get`
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = _identity(stats)

    def get(self, key: str) -> bytes:
        """The bytes that were written; raises Damaged if they are missing or differ."""
        try:
            if self.local is not None:
                with open(f"{self.local}/{key}", "rb") as file:
                    stats = os.fstat(file.fileno())
                    data = file.read()
            else:
                with _store_errors(may_be_missing=True):
                    data = self._filesystem.cat_file(f"{self._root}/{key}")
        except FileNotFoundError:
            raise Damaged(f"is missing: there is no file {key}") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise Damaged(f"is damaged: {key} is not a file ({error.strerror})") from None
        except ObjectStoreUnavailable:
            raise
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            raise Damaged(f"{UNREADABLE}: {error.strerror} ({key})") from error
        # File names of old versions have no fingerprint.
        fingerprint = key.rpartition("/")[2].partition(".")[2]
        if fingerprint and not hashlib.sha256(data).hexdigest().startswith(fingerprint):
            raise Damaged(f"is damaged: the {len(data)} bytes of {key} are not what was written")
        if self.local is not None and fingerprint:
            self._remember(key, stats)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Write a file with a fixed key durably; it may exist."""
        if self.local is None:
            with _store_errors():
                self._filesystem.pipe_file(f"{self._root}/{key}", data)
        else:
            write_file(f"{self.local}/{key}", data)

    def name(self, key: str) -> str:
        """The path or URL of a key, for messages."""
        return (
            f"{self.local}/{key}"
            if self.local
            else self._filesystem.unstrip_protocol(f"{self._root}/{key}")
        )

    def exists(self, key: str) -> bool:
        if self.local is not None:
            return os.path.exists(f"{self.local}/{key}")
        return bool(self._objects(key))

    def path(self, key: str) -> Path | None:
        """The path of a file, if the root is local."""
        return None if self.local is None else Path(self.local, key)

    def copy(self, source: str, target: str) -> None:
        """Copy a folder to another key, completely or not at all."""
        if self.local is None:
            self._copy_objects(self._objects(source), source, target)
            return
        with atomic_folder(Path(self.local, target)) as part:
            for file in Path(self.local, source).iterdir():
                _link_or_copy(file, part / file.name)

    def move(self, key: str, target: str) -> None:
        """Move a file or folder to another key, if it exists."""
        if self.local is None:
            if names := self._objects(key):
                self._copy_objects(names, key, target)
                with _store_errors():
                    self._filesystem.rm(names)
        elif self.exists(key):
            Path(self.local, target).parent.mkdir(parents=True, exist_ok=True)
            os.rename(f"{self.local}/{key}", f"{self.local}/{target}")

    def remove(self, key: str) -> None:
        """Delete a file or folder, if it exists."""
        if self.local is not None:
            path = f"{self.local}/{key}"
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        elif names := self._objects(key):
            with _store_errors():
                self._filesystem.rm(names)

    def list_older(self, prefix: str, depth: int, *, before_s: float) -> list[str]:
        """Keys this many components below a prefix that were last written before `before_s`."""
        found: dict[str, float] = {}
        if self.local is not None:
            for key, entry in _entries_below(self.local, prefix, depth):
                with contextlib.suppress(FileNotFoundError):
                    found[key] = entry.stat(follow_symlinks=False).st_mtime
        else:
            root = self._root.strip("/")
            with _store_errors():
                listed = self._filesystem.find(f"{self._root}/{prefix}", detail=True)
            for name, stats in listed.items():
                below = name.strip("/").removeprefix(root).strip("/").split("/")
                key = "/".join(below[: depth + 1])
                found[key] = max(found.get(key, 0.0), _written_s(stats))
        return [key for key, at_s in found.items() if at_s < before_s]

    def top_names(self, prefix: str) -> set[str]:
        """The first path components below a prefix, without empty folders."""
        if self.local is not None:
            # Empty folders remain after deletions.
            keys = self.list_older(prefix, PREFIX_DEPTHS[prefix], before_s=math.inf)
            return {key.split("/")[1] for key in keys}
        try:
            with _store_errors(may_be_missing=True):
                listed = self._filesystem.ls(f"{self._root}/{prefix}", detail=False)
        except FileNotFoundError:
            return set()
        return {name.rstrip("/").rpartition("/")[2] for name in listed}

    def all_keys(self) -> list[str]:
        """The keys of everything that is stored."""
        return [
            key
            for prefix, depth in PREFIX_DEPTHS.items()
            for key in self.list_older(prefix, depth, before_s=math.inf)
        ]

    def upload(self, folder: str, key: str) -> None:
        """Copy a finished folder to the object store, if any; the local copy is a cache."""
        if self.local is None:
            names = os.listdir(folder)
            with _store_errors():
                # File by file: fsspec would copy a folder into an existing one of an earlier try.
                self._filesystem.put(
                    [f"{folder}/{name}" for name in names],
                    [f"{self._root}/{key}/{name}" for name in names],
                )

    def download(self, key: str, folder: str) -> None:
        """Download a folder from the object store, if there is one, completely or not at all."""
        if self.local is not None or os.path.exists(folder):
            return
        if not (names := self._objects(key)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        try:
            with atomic_folder(Path(folder)) as part, _store_errors():
                self._filesystem.get(names, [f"{part}/{os.path.basename(one)}" for one in names])
        except BaseException:
            # Another task may have downloaded the same immutable files first.
            if not os.path.exists(folder):
                raise

    def _objects(self, key: str) -> list[str]:
        """The full names of the objects below a key, or of the object itself."""
        with _store_errors():
            return list(self._filesystem.find(f"{self._root}/{key}"))

    def _copy_objects(self, names: list[str], source: str, target: str) -> None:
        """Copy object by object: fsspec would copy a folder into one that an earlier try left."""
        old, new = f"{self._root}/{source}".strip("/"), f"{self._root}/{target}"
        targets = [f"{new}{name.strip('/').removeprefix(old)}" for name in names]
        with _store_errors():
            self._filesystem.copy(names, targets)


def _s3_options() -> dict[str, Any]:
    try:
        from aiobotocore.session import get_session  # type: ignore[import-untyped]
        from botocore.handlers import add_expect_header  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise ObjectStoreUnavailable(
            f"it needs {error.name}, which is not installed: run `pip install 'tinkex[s3]'`"
        ) from None
    session = get_session()
    # Without this, botocore waits forever for "100 Continue" from a store that does not respond.
    session.unregister("before-call.s3", add_expect_header)
    return {"session": session, "config_kwargs": _S3}


@contextlib.contextmanager
def _store_errors(*, may_be_missing: bool = False) -> Iterator[None]:
    """
    Turns the errors of an object store into `ObjectStoreUnavailable`, after which callers retry.

    Missing permissions or a missing bucket count too: they concern all objects, and the operator
    can fix them. An error of one object (missing, too large) is raised as such.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_DISK:
            raise
        # A missing bucket does not mean that the object is missing.
        missing = isinstance(error, FileNotFoundError) and "NoSuchBucket" not in _s3_error_codes(
            error
        )
        if missing and may_be_missing:
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if not _s3_error_codes(error).isdisjoint(_TOO_LARGE):
            raise ObjectTooLarge(
                f"the object store of this server does not accept an object of this size "
                f"({reason}). Send less in one request, or ask the operator of the server to "
                "allow larger objects."
            ) from error
        raise ObjectStoreUnavailable(reason) from error


def _s3_error_codes(error: Exception) -> set[str | int]:
    """Error code and HTTP status of an S3 response, which s3fs hides as the cause of its errors."""
    response = getattr(error.__cause__ or error, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return {response.get("Error", {}).get("Code"), status}


def _identity(stats: os.stat_result) -> tuple[int, int, int]:
    """Values that change when a file is rewritten, truncated or replaced."""
    return stats.st_ino, stats.st_size, stats.st_mtime_ns


def _entries_below(root: str, key: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """
    Entries this many components below a key, each with its key.

    Symbolic links are skipped: the server never creates them, so it must not delete their targets.
    """
    try:
        with os.scandir(f"{root}/{key}") as entries:
            found = [entry for entry in entries if not entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in found:
        if depth == 1:
            yield f"{key}/{entry.name}", entry
        else:
            yield from _entries_below(root, f"{key}/{entry.name}", depth - 1)


def folder_problem(folder: str, key: str, written: str | None) -> str | None:
    """What is wrong with a folder; None if it matches its fingerprint (`written`)."""
    try:
        return _folder_problem(folder, key, written)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return f"{UNREADABLE}: {error.strerror} ({error.filename or key})"


def _folder_problem(folder: str, key: str, written: str | None) -> str | None:
    if not os.path.isdir(folder):
        return f"is missing: there is no folder {key}"
    for name in sorted(os.listdir(folder)):
        file = f"{folder}/{name}"
        if not os.path.isfile(file):
            return f"is damaged: {key}/{name} is not a file"
        if name.endswith(".safetensors") and (problem := safetensors_problem(file)) is not None:
            return f"is damaged: {key}/{name} {problem}"
    if written is not None and fingerprint(folder) != written:
        return f"is damaged: the files in {key} are not what was written"
    return None


def safetensors_problem(file: str) -> str | None:
    """What is wrong with the header or the length of a safetensors file."""
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            return f"ends after {size} bytes, within its header"
        try:
            head = json.loads(opened.read(length))
            end = max(
                (about["data_offsets"][1] for key, about in head.items() if key != "__metadata__"),
                default=0,
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "has a header that cannot be read"
    if not isinstance(end, int):
        return "has a header that cannot be read"
    if 8 + length + end != size:
        return f"has {size} bytes instead of {8 + length + end}"
    return None


def _link_or_copy(file: Path, target: Path) -> None:
    """A hard link, or a copy if the file system has none."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _written_s(stats: Mapping[str, Any]) -> float:
    """When an object was written; infinity if the object store does not say."""
    for name in ("mtime", "LastModified", "created", "updated"):
        at = stats.get(name)
        if isinstance(at, datetime):
            return at.timestamp()
        if isinstance(at, int | float):
            return float(at)
    return math.inf
