"""Files and folders that are complete and on disk once they have their names."""

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


def write_file(path: str | Path, data: bytes) -> None:
    """Write or replace a file that only its user can read."""
    folder, name = os.path.split(path)
    folder = folder or os.curdir
    os.makedirs(folder, exist_ok=True)
    part = f"{folder}/{_temporary(name)}"
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise
    # Makes the new name durable.
    sync(folder)


def sync_files(folder: Path) -> None:
    """Flush a folder and the files directly in it."""
    for file in folder.iterdir():
        sync(file)
    sync(folder)


@contextlib.contextmanager
def atomic_folder(
    folder: Path, *, mode: int = 0o777, flush: Callable[[Path], None] = sync_files
) -> Iterator[Path]:
    """A temporary folder that is flushed and renamed on success, and deleted on failure."""
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} already exists and is never overwritten.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(_temporary(folder.name))
    part.mkdir(mode)
    try:
        yield part
        flush(part)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync(folder.parent)


def may_be_replaced(folder: Path) -> bool:
    """Not the current folder, the home of the user, or a folder around one of these."""
    # Without a home folder, "~" stays as it is: a name in the current folder.
    kept = (Path.cwd(), Path(os.path.expanduser("~")).resolve())
    return not any(one.is_relative_to(folder.resolve()) for one in kept)


def replace_folder(ready: Path, folder: Path) -> None:
    """
    Give a complete folder its name; one that has it is deleted when the new one is in its place.

    Nothing is flushed: these are folders that can be made again.
    """
    if not folder.exists():
        ready.rename(folder)
        return
    old = folder.with_name(_temporary(folder.name))
    folder.rename(old)
    try:
        ready.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


def fingerprint(folder: str) -> str:
    """A hash of the names and bytes of all files in a folder."""
    whole = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        with open(f"{folder}/{name}", "rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        whole.update(f"{name}\0{digest}\0".encode())
    return whole.hexdigest()


def sync(path: str | Path) -> None:
    """Flush one file, or the names in one folder. Windows cannot do this."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(name: str) -> str:
    """A hidden name beside the final one."""
    return f".{name}.{secrets.token_hex(4)}.part"
