"""
Back-ups of a data folder, also of one that a server works on, and back again.

    manifest = take(settings, target)     # a folder like the data folder, of one moment
    restore(target, folder)

The database is copied first, by SQLite itself, as it is at one moment. Files never change once they
have their name, so they are copied after it; what the server deleted meanwhile is no part of a
newer copy of the database, which is then manifest instead.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tinkex.server.api.auth import LINK_KEY_FILE as SIGNING_KEY
from tinkex.server.api.auth import TOKEN_KEY_FILE as TOKENS_KEY
from tinkex.server.settings import CONFIG_FILE, Settings
from tinkex.server.store.blobs import Files
from tinkex.server.store.inspection import (
    CopyFailed,
    copy_database,
    referenced_keys,
    invalid_keys,
    schema_version,
)
from tinkex.server.store.keys import MARKER
from tinkex.server.store.storage_health import os_error_in

DATABASE = "tinkex.db"
MANIFEST = "backup.json"
FORMAT = 1
# Beside the database and the files.
OTHER_FILES = (SIGNING_KEY, TOKENS_KEY, CONFIG_FILE)
# A server deletes in small steps, minutes apart.
MAX_ROUNDS = 5


class BackupFailed(Exception):
    """Nothing was written; the text says why."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a back-up says of itself."""

    format: int
    tinkex: str
    taken_s: float
    database_version: str | None
    files: int
    bytes: int
    #: What was missing in the data folder itself.
    missing: tuple[str, ...]


def create(settings: Settings, target: Path) -> Manifest:
    """Everything a server needs to go on from this moment, in a new folder."""
    database, root = _local(settings)
    target = target.absolute()
    if target.exists():
        raise BackupFailed(f"{target} exists already.", hint="Give a folder that does not.")
    with _whole_or_not(target) as part:
        manifest = _fill(part, database, root, settings.folder)
        (part / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


@contextlib.contextmanager
def _whole_or_not(target: Path) -> Iterator[Path]:
    """A folder to fill, which then has its name; of one that could not be filled nothing is left."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
        yield part
        _make_private(part)
        # Once for all files, and then the name that says that they are there.
        os.sync()
        if target.exists():
            target.rmdir()
        part.rename(target)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise _failed(error, target) from error
        raise


def _make_private(part: Path) -> None:
    """Every file by itself: what is copied out of the folder stays its owner's alone."""
    for path in part.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _failed(error: OSError, target: Path) -> BackupFailed:
    file = error.filename
    if isinstance(error, shutil.Error):  # of several files, each with its reason in words
        file, _, reason = error.args[0][0]
        error = os_error_in(str(reason))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = (
        f"Make room on the disk of {target.parent}, or choose another place. Nothing was left there."
        if full
        else "Use the user that runs the server. `tinkex doctor` says what cannot be read."
    )
    return BackupFailed(f"{file or target} cannot be copied: {error.strerror}.", hint=hint)


def _fill(part: Path, database: Path, root: Path, folder: Path) -> Manifest:
    # Before the database is copied: the copy has the keys that this marker speaks of.
    alongside = [name for name in (*OTHER_FILES, MARKER) if (folder / name).exists()]
    places: set[str] = set()
    missing: list[str] = []
    try:
        for _ in range(MAX_ROUNDS):
            copy_database(database, part / DATABASE)
            places = referenced_keys(f"sqlite:///{part / DATABASE}")
            missing = [place for place in sorted(places) if not _copied(root, part, place)]
            if not missing:
                break
    except CopyFailed as error:
        if error.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(database)) from error
        raise BackupFailed(
            f"the database cannot be copied: {error}.",
            hint="`tinkex doctor` says what is wrong with it.",
        ) from error
    _prune(part, keep=places)
    for name in alongside:
        shutil.copy2(folder / name, part / name)
    files = [file for file in part.rglob("*") if file.is_file()]
    return Manifest(
        format=FORMAT,
        tinkex=version("tinkex"),
        taken_s=time.time(),
        database_version=schema_version(f"sqlite:///{part / DATABASE}"),
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
        missing=tuple(missing),
    )


def _copied(root: Path, part: Path, place: str) -> bool:
    """Whether a file or folder is in the copy now; False when it is gone from where it was."""
    source, target = root / place, part / place
    if target.exists():
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if source.is_dir():
            unfinished.mkdir()
            for file in filter(Path.is_file, source.iterdir()):
                shutil.copyfile(file, unfinished / file.name)
        else:
            shutil.copyfile(source, unfinished)
    except FileNotFoundError:
        # Deleted just now, or while it was being copied.
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    unfinished.rename(target)
    return True


def _prune(part: Path, *, keep: Iterable[str]) -> None:
    """Copies that only an earlier round needed."""
    files, wanted = Files(str(part)), set(keep)
    for place in files.all_keys():
        if place not in wanted:
            files.remove(place)


def read_manifest(source: Path) -> Manifest:
    """What a back-up says of itself; raises when it is none."""
    try:
        told = json.loads((source / MANIFEST).read_text())
        found = Manifest(**{**told, "missing": tuple(told["missing"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackupFailed(
            f"{source} is no back-up: {MANIFEST} in it cannot be read ({error}).",
            hint="Name a folder that `tinkex backup` has written.",
        ) from error
    if found.format != FORMAT:
        raise BackupFailed(
            f"{source} was written by tinkex {found.tinkex} in a form that is not known here.",
            hint="Use that version, or a newer one.",
        )
    return found


def restore(source: Path, folder: Path) -> Manifest:
    """A new data folder from a back-up, which stays as it is."""
    found = read_manifest(source)
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise BackupFailed(
            f"the data folder {folder} is not empty.",
            hint="Restore into a new folder, or move this one away first.",
        )
    _refuse_strange(source)
    _check_whole(source, found)
    with _whole_or_not(folder) as part:
        # A link that came in meanwhile stays a link.
        shutil.copytree(source, part, symlinks=True, dirs_exist_ok=True)
        # However it was carried here.
        part.chmod(0o700)
        (part / MANIFEST).unlink()
    return found


def _refuse_strange(source: Path) -> None:
    """A back-up may come from anywhere: nothing in it may lead out of it."""
    strange = [
        path
        for path in source.rglob("*")
        if path.is_symlink() or not (path.is_dir() or path.is_file())
    ]
    try:
        strange += [Path(place) for place in invalid_keys((source / DATABASE).absolute())]
    except CopyFailed as error:
        raise BackupFailed(
            f"the database of {source} cannot be read: {error}.",
            hint="Take another back-up.",
        ) from error
    if strange:
        raise BackupFailed(
            f"{source} has {len(strange)} links, or places outside of it; the first is "
            f"{str(strange[0])!r}.",
            hint="`tinkex backup` writes no such thing: somebody has changed it. Take another one.",
        )


def _check_whole(source: Path, found: Manifest) -> None:
    """Refuse a copy of a back-up that did not come over whole."""
    files = [file for file in source.rglob("*") if file.is_file() and file.name != MANIFEST]
    size = sum(file.stat().st_size for file in files)
    if (len(files), size) != (found.files, found.bytes):
        raise BackupFailed(
            f"{source} has {len(files)} files of {size:,} bytes, and was written with "
            f"{found.files} of {found.bytes:,}: it is not whole, or was changed.",
            hint=f"Copy it again from where it was. `tinkex doctor --data {source}` says what is "
            "missing; what is there can be served as it is: `tinkex serve --data` a copy of it.",
        )


def _local(settings: Settings) -> tuple[Path, Path]:
    """The database file and the root of the files, where both are on this machine."""
    root = Files(settings.storage_url).local
    if root is None or not settings.db_url.startswith("sqlite:///"):
        raise BackupFailed(
            "only a SQLite database and a local folder can be copied here.",
            hint="Take the database's own back-up first (pg_dump), then copy the storage: files "
            "never change once they are written.",
        )
    database = Path(settings.db_url.removeprefix("sqlite:///"))
    if not database.is_file():
        raise BackupFailed(f"there is no database {database}.", hint="Check --data and --db.")
    return database, Path(root)
