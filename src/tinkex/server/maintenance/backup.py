"""
Backup and restore of a data folder; a server may be running.

    manifest = create(settings, target)   # a consistent copy of the data folder
    restore(target, folder)

SQLite copies a consistent state of the database first. Files never change once they have a name, so
they are copied afterwards. If the server deleted some in between, the database is copied again.
"""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tinkex.durable_files import atomic_folder
from tinkex.server.settings import CONFIG_FILE, Settings
from tinkex.server.store.blobs import Files
from tinkex.server.store.database_copy import CopyFailed, copy_database, invalid_keys
from tinkex.server.store.inspection import referenced_keys, schema_version
from tinkex.server.store.keys import MARKER
from tinkex.server.store.server_secrets import OLD_FILES as OLD_SECRETS
from tinkex.server.store.storage_health import os_error_in

DATABASE = "tinkex.db"
MANIFEST = "backup.json"
FORMAT = 1
# Other files of the data folder.
OTHER_FILES = (*OLD_SECRETS.values(), CONFIG_FILE)
# Maximum attempts to copy the database and all its files. A few are enough, because a server
# deletes files only every few minutes.
MAX_ROUNDS = 5


class BackupFailed(Exception):
    """Nothing was written; the text says why."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of a backup, stored in it as JSON."""

    format: int
    tinkex: str
    taken_s: float
    database_version: str | None
    files: int
    bytes: int
    #: Keys that were missing in the data folder itself.
    missing: tuple[str, ...]


def create(settings: Settings, target: Path) -> Manifest:
    """Copy everything that a server needs to continue from this moment to a new folder."""
    database, root = local_storage(settings)
    target = target.absolute()
    if target.exists():
        raise BackupFailed(f"{target} exists already.", hint="Choose a folder that does not exist.")
    with _private_folder(target) as part:
        manifest = _fill(part, database, root, settings.folder)
        (part / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")
    return manifest


@contextlib.contextmanager
def _private_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that gets its final name at the end, and is deleted on an error."""
    try:
        with atomic_folder(target, mode=0o700, flush=_flush_privately) as part:
            yield part
    except OSError as error:
        raise _failed(error, target) from error


def _flush_privately(part: Path) -> None:
    _make_private(part)
    # All files at once: one by one would take much longer.
    os.sync()


def _make_private(part: Path) -> None:
    """Restrict each file to its owner, so that a copy of a single file is private too."""
    for path in part.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700 if path.is_dir() else 0o600)


def _failed(error: OSError, target: Path) -> BackupFailed:
    file = error.filename
    if isinstance(error, shutil.Error):  # errors of several files, each with its reason as text
        file, _, reason = error.args[0][0]
        error = os_error_in(str(reason))
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    hint = (
        f"Free some space on the disk of {target.parent}, or choose another folder. "
        "The incomplete copy was deleted."
        if full
        else "Run this as the user that runs the server. `tinkex doctor` lists what cannot be read."
    )
    return BackupFailed(f"{file or target} cannot be copied: {error.strerror}.", hint=hint)


def _fill(part: Path, database: Path, root: Path, folder: Path) -> Manifest:
    # Look for the marker before the database is copied: if it exists, the copy has its API keys.
    others = [name for name in (*OTHER_FILES, MARKER) if (folder / name).exists()]
    keys: set[str] = set()
    missing: list[str] = []
    try:
        for _ in range(MAX_ROUNDS):
            copy_database(database, part / DATABASE)
            keys = referenced_keys(f"sqlite:///{part / DATABASE}")
            missing = [key for key in sorted(keys) if not copy_key(root, part, key)]
            if not missing:
                break
    except CopyFailed as error:
        if error.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(database)) from error
        raise BackupFailed(
            f"the database cannot be copied: {error}.",
            hint="Run `tinkex doctor` to see what is wrong with it.",
        ) from error
    _prune(part, keep=keys)
    for name in others:
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


def copy_key(root: Path, part: Path, key: str) -> bool:
    """Copy a file or folder; False if it does not exist any more."""
    source, target = root / key, part / key
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
        # Deleted before or while it was copied.
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    unfinished.rename(target)
    return True


def _prune(part: Path, *, keep: Iterable[str]) -> None:
    """Delete copies that only an earlier round needed."""
    files, wanted = Files(str(part)), set(keep)
    for key in files.all_keys():
        if key not in wanted:
            files.remove(key)


def read_manifest(source: Path) -> Manifest:
    """The manifest of a backup; raises if the folder is not a backup."""
    try:
        fields = json.loads((source / MANIFEST).read_text())
        found = Manifest(**{**fields, "missing": tuple(fields["missing"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackupFailed(
            f"{source} is not a backup: {MANIFEST} in it cannot be read ({error}).",
            hint="Choose a folder that `tinkex backup` has written.",
        ) from error
    if found.format != FORMAT:
        raise BackupFailed(
            f"{source} was written by tinkex {found.tinkex} in an unsupported format.",
            hint="Use that version, or a newer one.",
        )
    return found


def restore(source: Path, folder: Path) -> Manifest:
    """Create a data folder from a backup, which is not changed."""
    found = read_manifest(source)
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        raise BackupFailed(
            f"the data folder {folder} is not empty.",
            hint="Restore into a new folder, or move this folder first.",
        )
    _refuse_links(source)
    _check_complete(source, found)
    with _private_folder(folder) as part:
        # `symlinks`: a link that appeared since the check is not followed.
        shutil.copytree(source, part, symlinks=True, dirs_exist_ok=True)
        # Independent of the file modes in the backup.
        part.chmod(0o700)
        (part / MANIFEST).unlink()
    return found


def _refuse_links(source: Path) -> None:
    """Refuse links and keys that lead out of the backup, which may come from an untrusted place."""
    outside = [
        path
        for path in source.rglob("*")
        if path.is_symlink() or not (path.is_dir() or path.is_file())
    ]
    try:
        outside += [Path(key) for key in invalid_keys((source / DATABASE).absolute())]
    except CopyFailed as error:
        raise BackupFailed(
            f"the database of {source} cannot be read: {error}.",
            hint="Create another backup.",
        ) from error
    if outside:
        raise BackupFailed(
            f"{source} has {len(outside)} links or paths that lead out of it; the first is "
            f"{str(outside[0])!r}.",
            hint="`tinkex backup` never writes these: the backup was changed. Create another one.",
        )


def _check_complete(source: Path, found: Manifest) -> None:
    """Refuse an incomplete copy of a backup."""
    files = [file for file in source.rglob("*") if file.is_file() and file.name != MANIFEST]
    size = sum(file.stat().st_size for file in files)
    if (len(files), size) != (found.files, found.bytes):
        raise BackupFailed(
            f"{source} has {len(files)} files with {size:,} bytes, but was written with "
            f"{found.files} files with {found.bytes:,} bytes: it is incomplete or was changed.",
            hint=f"Copy it again from its origin. `tinkex doctor --data {source}` lists what is "
            "missing. To use it anyway, run `tinkex serve --data` on a copy of it.",
        )


def local_storage(settings: Settings) -> tuple[Path, Path]:
    """The database file and the storage root, if both are on this machine."""
    root = Files(settings.storage_url).local
    if root is None or not settings.db_url.startswith("sqlite:///"):
        raise BackupFailed(
            "only a SQLite database and a local storage folder can be backed up.",
            hint="Back up the database with its own tool first (pg_dump), then copy the storage: "
            "files never change once they are written.",
        )
    database = Path(settings.db_url.removeprefix("sqlite:///"))
    if not database.is_file():
        raise BackupFailed(f"there is no database {database}.", hint="Check --data and --db.")
    return database, Path(root)
