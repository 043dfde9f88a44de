"""
Import of another data folder: its sessions, runs, logs, checkpoints and usage.

    imported = import_folder(settings, source)

Ids are unique, so rows and files of two folders do not collide, and an import can be repeated: it
adds only what is missing. The source is not changed, except for a note that it was imported. API
keys, the server's secrets, the audit log and telemetry are not imported.
"""

import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tinkex.durable_files import write_file
from tinkex.server.folder_lock import lock_database, lock_folder
from tinkex.server.maintenance.backup import DATABASE, BackupFailed, copy_key, local_storage
from tinkex.server.registration import IMPORTED_FILE, take_over
from tinkex.server.settings import Settings
from tinkex.server.store.database import Database
from tinkex.server.store.database_copy import (
    CopyFailed,
    add_missing_rows,
    copy_database,
    forget_keys,
    invalid_keys,
)
from tinkex.server.store.inspection import referenced_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import added."""

    runs: int
    checkpoints: int
    #: Keys of files that the source's rows refer to and the source does not have.
    missing: tuple[str, ...]


def import_folder(settings: Settings, source: Path) -> Imported:
    """Add everything of another data folder to that of the settings. BackupFailed if it cannot."""
    source = source.expanduser().absolute()
    if not (source / DATABASE).is_file():
        raise BackupFailed(
            f"{source} is not a data folder: it has no {DATABASE}.",
            hint="Give the folder that `tinkex serve` or base_url='local' named.",
        )
    if source.resolve() == settings.folder.resolve():
        raise BackupFailed(f"{source} is the data folder itself.", hint="Give another folder.")
    take_over(settings)
    with ExitStack() as stack:
        stack.enter_context(lock_folder(source))
        stack.enter_context(lock_folder(settings.folder))
        stack.enter_context(lock_database(settings))
        # Creates or upgrades the tables.
        Database(settings.db_url, exclusive=True).close()
        database, root = local_storage(settings)
        scratch = Path(tempfile.mkdtemp(prefix=".import-", dir=settings.folder))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        copy = _upgraded_copy(source, scratch)
        # Sessions come first: a server refuses a storage none of whose sessions it knows, so an
        # interrupted import must not leave one.
        add_missing_rows(copy, database, only="sessions")
        keys = sorted(referenced_keys(f"sqlite:///{copy}"))
        missing = tuple(key for key in keys if not copy_key(source, root, key))
        added = add_missing_rows(copy, database)
        note = {"into": str(settings.folder), "at_s": time.time()}
        write_file(source / IMPORTED_FILE, json.dumps(note).encode())
    return Imported(runs=added["models"], checkpoints=added["checkpoint_names"], missing=missing)


def _upgraded_copy(source: Path, scratch: Path) -> Path:
    """A copy of the source's database with the newest tables."""
    copy = scratch / DATABASE
    try:
        copy_database(source / DATABASE, copy)
        outside = invalid_keys(copy)
    except CopyFailed as error:
        raise BackupFailed(
            f"the database of {source} cannot be read: {error}.",
            hint=f"Run `tinkex doctor --data {source}` to see what is wrong with it.",
        ) from error
    if outside:
        raise BackupFailed(
            f"{source} has {len(outside)} rows that lead out of it; the first is {outside[0]!r}.",
            hint="No server writes these: the database was changed. Nothing was imported.",
        )
    Database(f"sqlite:///{copy}", exclusive=True).close()
    forget_keys(copy)
    return copy
