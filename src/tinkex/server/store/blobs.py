"""Payloads, results and checkpoints outside the database: durable before a row points to them."""

import contextlib
import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tinkex.server.store.storage_health import Damaged, ObjectStoreUnavailable
from tinkex.wire.errors import UserFailure

#: How a problem begins that is one of rights, or of the disk, and says nothing of what is there.
UNREADABLE = "cannot be read"

# Errors of one file that say nothing of the disk as a whole.
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.EIO)

# Files of which is known that they are sound; more are read again.
MAX_KNOWN = 10_000

# Of the fingerprint in a file's name.
FINGERPRINT_DIGITS = 32


#: Where files and folders are that rows point to, and how many names deep below that.
PREFIX_DEPTHS = {"payloads": 2, "results": 2, "checkpoints": 4, "snapshots": 2}


def is_key(text: str) -> bool:
    """Whether it leads to something in one of the rooms, and nowhere else."""
    room, *names = text.split("/")
    return room in PREFIX_DEPTHS and names != [] and not {"", ".", ".."} & set(names) and "\0" not in text


#: An object store has this long to take a connection, and to send the next bytes.
CONNECT_S, SILENT_S = 10, 30
_S3 = {
    "connect_timeout": CONNECT_S,
    "read_timeout": SILENT_S,
    # Once more for a connection that the store had closed. Longer waits are the caller's choice:
    # new work is refused meanwhile, accepted work is tried until it succeeds.
    "retries": {"total_max_attempts": 2},
}

_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


#: An object store says by these that one object is too large: it never takes it, and takes others.
_TOO_LARGE = ("EntityTooLarge", 413)


class ObjectTooLarge(UserFailure):
    """One object that the object store never takes; waiting does not help."""


class Files:
    """CheckpointName bytes below one root: a local folder, or any fsspec URL."""

    def __init__(self, root_url: str) -> None:
        # A listing that was kept would not show what other processes have written since.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        is_s3 = root_url.startswith(("s3://", "s3a://"))
        if is_s3:
            options.update(_s3_options())
        filesystem, root = fsspec.core.url_to_fs(root_url, **options)
        if is_s3:
            filesystem.retries = 1  # see _S3
        self._filesystem: fsspec.AbstractFileSystem = filesystem
        self._root: str = root
        #: Local payloads whose bytes are known to be what was put there, by their place.
        self._known: dict[str, tuple[int, int, int]] = {}
        #: The folder, where it is one on this machine. Places below it are joined as texts: a
        #: `Path` puts each part of a name into a table of the interpreter, which only grows.
        self.local: str | None = root if isinstance(filesystem, LocalFileSystem) else None

    def put(self, room: str, data: bytes) -> str:
        """Write `data` for good and answer its place below the root, which tells what is in it."""
        name = f"{secrets.token_hex(16)}.{hashlib.sha256(data).hexdigest()[:FINGERPRINT_DIGITS]}"
        place = f"{room}/{name[:2]}/{name}"
        if self.local is None:
            with _store_errors():
                self._filesystem.pipe_file(f"{self._root}/{place}", data)
        else:
            write_durably(f"{self.local}/{place}", data)
            self._remember(place, os.stat(f"{self.local}/{place}"))
        return place

    def known(self, place: str) -> bool:
        """Whether a local file is still the one that was written here, or read and found sound."""
        if (identity := self._known.get(place)) is None:
            return False
        try:
            with open(f"{self.local}/{place}", "rb") as file:
                return _identity(os.fstat(file.fileno())) == identity
        except OSError:
            return False  # who reads it says what is wrong

    def _remember(self, place: str, facts: os.stat_result) -> None:
        if not place.startswith("payloads/"):
            return  # nobody asks for these without reading them
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[place] = _identity(facts)

    def get(self, place: str) -> bytes:
        """What was put there, and nothing else: raises Damaged."""
        try:
            if self.local is not None:
                with open(f"{self.local}/{place}", "rb") as file:
                    facts = os.fstat(file.fileno())
                    data = file.read()
            else:
                with _store_errors(may_be_missing=True):
                    data = self._filesystem.cat_file(f"{self._root}/{place}")
        except FileNotFoundError:
            raise Damaged(f"is missing: there is no file {place}") from None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise Damaged(f"is damaged: {place} is no file ({error.strerror})") from None
        except ObjectStoreUnavailable:
            raise
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            raise Damaged(f"{UNREADABLE}: {error.strerror} ({place})") from error
        # Names from before there were fingerprints have no such part.
        fingerprint = place.rpartition("/")[2].partition(".")[2]
        if fingerprint and not hashlib.sha256(data).hexdigest().startswith(fingerprint):
            raise Damaged(f"is damaged: the {len(data)} bytes of {place} are not what was written")
        if self.local is not None and fingerprint:
            self._remember(place, facts)
        return data

    def exists(self, place: str) -> bool:
        if self.local is not None:
            return os.path.exists(f"{self.local}/{place}")
        return bool(self._inside(place))

    def path(self, place: str) -> Path | None:
        """The file itself, where it is one on this machine."""
        return None if self.local is None else Path(self.local, place)

    def copy(self, source: str, target: str) -> None:
        """The files of a folder under another place too, whole or not at all."""
        if self.local is None:
            self._copy_objects(self._inside(source), source, target)
            return
        folder = Path(self.local, target)
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
        part.mkdir()
        try:
            for file in Path(self.local, source).iterdir():
                _link_or_copy(file, part / file.name)
            sync(part)
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync(folder.parent)

    def move(self, place: str, target: str) -> None:
        """Another place for what is there, if anything is."""
        if self.local is None:
            if names := self._inside(place):
                self._copy_objects(names, place, target)
                with _store_errors():
                    self._filesystem.rm(names)
        elif self.exists(place):
            Path(self.local, target).parent.mkdir(parents=True, exist_ok=True)
            os.rename(f"{self.local}/{place}", f"{self.local}/{target}")

    def remove(self, place: str) -> None:
        """Delete a file or a folder; nothing happens when it is not there."""
        if self.local is not None:
            path = f"{self.local}/{place}"
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        elif names := self._inside(place):
            with _store_errors():
                self._filesystem.rm(names)

    def list_older(self, room: str, depth: int, *, before_s: float) -> list[str]:
        """What lies so many names below a room and was last written before then."""
        found: dict[str, float] = {}
        if self.local is not None:
            for place, entry in _entries_below(self.local, room, depth):
                with contextlib.suppress(FileNotFoundError):
                    found[place] = entry.stat(follow_symlinks=False).st_mtime
        else:
            root = self._root.strip("/")
            with _store_errors():
                listed = self._filesystem.find(f"{self._root}/{room}", detail=True)
            for name, facts in listed.items():
                below = name.strip("/").removeprefix(root).strip("/").split("/")
                place = "/".join(below[: depth + 1])
                found[place] = max(found.get(place, 0.0), _written_s(facts))
        return [place for place, at_s in found.items() if at_s < before_s]

    def top_names(self, room: str) -> set[str]:
        """The first names below a room under which there is something."""
        if self.local is not None:
            # Folders stay behind empty.
            places = self.list_older(room, PREFIX_DEPTHS[room], before_s=math.inf)
            return {place.split("/")[1] for place in places}
        try:
            with _store_errors(may_be_missing=True):
                listed = self._filesystem.ls(f"{self._root}/{room}", detail=False)
        except FileNotFoundError:
            return set()
        return {name.rstrip("/").rpartition("/")[2] for name in listed}

    def all_keys(self) -> list[str]:
        """Everything that rows may point to, or have pointed to."""
        return [
            place
            for room, depth in PREFIX_DEPTHS.items()
            for place in self.list_older(room, depth, before_s=math.inf)
        ]

    def upload(self, folder: str, place: str) -> None:
        """Copy a finished folder to a root that is not local; the local copy is a cache."""
        if self.local is None:
            names = os.listdir(folder)
            with _store_errors():
                # File by file: a folder that is copied a second time would land inside the first.
                self._filesystem.put(
                    [f"{folder}/{name}" for name in names],
                    [f"{self._root}/{place}/{name}" for name in names],
                )

    def download(self, place: str, folder: str) -> None:
        """Bring a folder back from a root that is not local, whole or not at all."""
        if self.local is not None or os.path.exists(folder):
            return
        if not (names := self._inside(place)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        parent, name = os.path.split(folder)
        part = f"{parent}/.{name}.{secrets.token_hex(4)}"
        os.makedirs(part)
        try:
            with _store_errors():
                self._filesystem.get(names, [f"{part}/{os.path.basename(one)}" for one in names])
            os.rename(part, folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            # Somebody else may have brought it first: the same immutable files.
            if not os.path.exists(folder):
                raise

    def _inside(self, place: str) -> list[str]:
        """The full names of the objects of a folder, or of the one that is there."""
        with _store_errors():
            return list(self._filesystem.find(f"{self._root}/{place}"))

    def _copy_objects(self, names: list[str], source: str, target: str) -> None:
        """Each object of a folder, so that it lands beside what may be there from an earlier try."""
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
    # A store that is silent is waited for without an end before it says "100 Continue".
    session.unregister("before-call.s3", add_expect_header)
    return {"session": session, "config_kwargs": _S3}


@contextlib.contextmanager
def _store_errors(*, may_be_missing: bool = False) -> Iterator[None]:
    """
    Whatever an object store raises becomes `ObjectStoreUnavailable`, which is waited for.

    That is right for missing rights or a missing bucket too: they concern all objects, and only
    the operator can mend them. What concerns one object, missing or too large, is raised as such.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL:
            raise  # the disk that it was brought to
        # A whole bucket that is missing says nothing about what was in it.
        missing = isinstance(error, FileNotFoundError) and "NoSuchBucket" not in _s3_error_codes(error)
        if missing and may_be_missing:
            raise
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        if not _s3_error_codes(error).isdisjoint(_TOO_LARGE):
            raise ObjectTooLarge(
                f"the object store of this server does not take an object of this size ({told}). "
                "Send less in one request, or ask whoever runs the server to allow larger objects."
            ) from error
        raise ObjectStoreUnavailable(told) from error


def _s3_error_codes(error: Exception) -> set[str | int]:
    """Code and status of an answer of S3, which s3fs keeps behind its own errors; else nothing."""
    response = getattr(error.__cause__ or error, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return {response.get("Error", {}).get("Code"), status}


def _identity(facts: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file is written again, cut off, or replaced."""
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _entries_below(root: str, place: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """
    What lies so many names below a place, with the place of each.

    A link there is none of ours: what it leads to is not to be deleted.
    """
    try:
        with os.scandir(f"{root}/{place}") as entries:
            found = [entry for entry in entries if not entry.is_symlink()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in found:
        if depth == 1:
            yield f"{place}/{entry.name}", entry
        else:
            yield from _entries_below(root, f"{place}/{entry.name}", depth - 1)


def fingerprint(folder: str) -> str:
    """Of all files of a folder, names and bytes."""
    whole = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        with open(f"{folder}/{name}", "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{name}\0{digest}\0".encode())
    return whole.hexdigest()


def folder_problem(folder: str, place: str, written: str | None) -> str | None:
    """What is wrong with the files of a folder; None when they are what was written."""
    try:
        return _folder_problem(folder, place, written)
    except OSError as error:
        if error.errno not in _UNREADABLE:
            raise
        return f"{UNREADABLE}: {error.strerror} ({error.filename or place})"


def _folder_problem(folder: str, place: str, written: str | None) -> str | None:
    if not os.path.isdir(folder):
        return f"is missing: there is no folder {place}"
    for name in sorted(os.listdir(folder)):
        file = f"{folder}/{name}"
        if not os.path.isfile(file):
            return f"is damaged: {place}/{name} is no file"
        if name.endswith(".safetensors") and (problem := safetensors_problem(file)) is not None:
            return f"is damaged: {place}/{name} {problem}"
    if written is not None and fingerprint(folder) != written:
        return f"is damaged: the files in {place} are not what was written"
    return None


def safetensors_problem(file: str) -> str | None:
    """What is wrong with a safetensors file, by its head and its length."""
    size = os.path.getsize(file)
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size:
            return f"ends after {size} bytes, within its head"
        try:
            head = json.loads(opened.read(length))
            end = max(
                (about["data_offsets"][1] for key, about in head.items() if key != "__metadata__"),
                default=0,
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "has a head that cannot be read"
    if not isinstance(end, int):
        return "has a head that cannot be read"
    if 8 + length + end != size:
        return f"has {size} bytes instead of {8 + length + end}"
    return None


def _link_or_copy(file: Path, target: Path) -> None:
    """The same bytes under a second name; not every file system has links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
        sync(target)


def _written_s(facts: Mapping[str, Any]) -> float:
    """When a file of another store was written; in the future when it does not tell."""
    for key in ("mtime", "LastModified", "created", "updated"):
        at = facts.get(key)
        if isinstance(at, datetime):
            return at.timestamp()
        if isinstance(at, int | float):
            return float(at)
    return math.inf


def write_durably(path: str, data: bytes) -> None:
    """A file that is whole and on disk once it has its name."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    part = f"{folder}/.{name}.part"
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)
    sync(folder)


def sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# MERGED: Files that only the holders of some age keys can read. Needs `tinkex[age]`.


MAX_RECIPIENTS = 10


def check_recipients(recipients: Sequence[str]) -> None:
    """Refuse before the work what could not be locked after it."""
    if len(recipients) > MAX_RECIPIENTS:
        raise UserFailure(
            f"age_encryption_recipients has {len(recipients)} keys; {MAX_RECIPIENTS} are allowed."
        )
    if recipients:
        _parse_recipients(recipients)


def encrypt_files(folder: Path, locked: Path, recipients: Sequence[str]) -> int:
    """Every file of `folder` as NAME.age in `locked`, whole or not at all; bytes of the result."""
    import pyrage  # type: ignore[import-untyped]

    keys = _parse_recipients(recipients)
    part = locked.with_name(f".{locked.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    size_bytes = 0
    try:
        for file in folder.iterdir():
            target = part / f"{file.name}.age"
            pyrage.encrypt_file(str(file), str(target), keys)
            _sync(target)
            size_bytes += target.stat().st_size
        _sync(part)
        part.rename(locked)
        _sync(locked.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return size_bytes


def _parse_recipients(recipients: Sequence[str]) -> list[Any]:
    try:
        import pyrage
    except ImportError:
        raise UserFailure(
            "this server cannot encrypt: pyrage is not installed there. Install tinkex[age] on "
            "the server, or export without age_encryption_recipients."
        ) from None
    keys = []
    for recipient in recipients:
        kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
        try:
            keys.append(kind.Recipient.from_str(recipient))
        except pyrage.RecipientError as error:
            raise UserFailure(
                f"age_encryption_recipients has {recipient[:80]!r}, which is no age key ({error}). "
                "Keys begin with age1, or are SSH public keys."
            ) from None
    return keys


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
