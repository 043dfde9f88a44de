"""
Moves the data of a server to another database, another storage, or both, and back.

    moved = move_data(source, target)      # two settings of one data folder

The files come first, so that no row refers to a file that is not there. Each file is read again from
the target, and rows are compared at the end. The source is not changed. A move that was interrupted
goes on where it was: what the target has and is intact is not copied again. A target that was used
since is refused before anything is written: its rows may be newer.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.durable_files import atomic_folder
from tinkex.server.folder_lock import database_file, lock_database, lock_folder
from tinkex.server.maintenance.backup import BackupFailed
from tinkex.server.registration import take_over
from tinkex.server.settings import Settings
from tinkex.server.store import Damaged
from tinkex.server.store.blobs import Files, folder_problem
from tinkex.server.store.connections import any_key
from tinkex.server.store.inspection import PAYLOAD, RESULT, references
from tinkex.server.store.keys import write_marker
from tinkex.server.store.row_copy import changed_tables, contents, copy_rows, opened_alone

if TYPE_CHECKING:
    from sqlalchemy import Connection

log = logging.getLogger("tinkex.server.maintenance.move_data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a move copied."""

    rows: int
    #: Files and folders, and how many of them the target had already.
    files: int
    present: int
    #: Names of what is missing or damaged in the source, each with its problem.
    missing: tuple[str, ...]


def move_data(
    source: Settings, target: Settings, *, progress: Callable[[int, int], None] = lambda *_: None
) -> Moved:
    """
    Copy everything of one server; BackupFailed if that is not possible.

    `progress` gets the number of files that are done, and of all.
    """
    old, new = Files(source.storage_url), Files(target.storage_url)
    file = database_file(source.db_url)
    same_db = source.db_url == target.db_url or (
        file is not None and file == database_file(target.db_url)
    )
    same_storage = old.is_same(new)
    if same_db and same_storage:
        raise BackupFailed(
            "the data is there already: the source and the target are the same.",
            hint="Name another database with --db, another storage with --storage, or both.",
        )
    if file is not None and not file.is_file():
        raise BackupFailed(
            f"there is nothing to move: {file} does not exist.",
            hint="Name the data folder with --data, or another source with --from-db.",
        )
    take_over(source)
    with ExitStack() as stack:
        stack.enter_context(lock_folder(source.folder))
        stack.enter_context(lock_database(source))
        reading = writing = stack.enter_context(opened_alone(source.db_url))
        if not same_db:
            stack.enter_context(lock_database(target))
            writing = stack.enter_context(opened_alone(target.db_url))
        if not same_db and (changed := changed_tables(reading, writing)):
            raise BackupFailed(
                "the target was used since, or for something else: it has rows in "
                f"{', '.join(changed)} that the source does not have.",
                hint="Start the server on it. To move again, use an empty database (or rename the "
                "old tinkex.db).",
            )
        counts: tuple[int, int, tuple[str, ...]] = (0, 0, ())
        if not same_storage:
            with tempfile.TemporaryDirectory(prefix=".move-", dir=source.folder) as scratch:
                counts = _copy_files(old, new, reading, Path(scratch), progress)
        rows = 0
        if not same_db:
            rows = copy_rows(reading, writing)
            before, after = contents(reading), contents(writing)
            if wrong := [name for name in before if before[name] != after[name]]:
                raise BackupFailed(
                    f"the rows of {', '.join(wrong)} differ after the copy.",
                    hint="Something else writes to one of the databases. Stop it, and run this "
                    "again with an empty database.",
                )
        if any_key(writing):
            write_marker(target.folder, new)
    files, present, missing = counts
    return Moved(rows=rows, files=files, present=present, missing=missing)


def _copy_files(
    old: Files,
    new: Files,
    connection: "Connection",
    scratch: Path,
    progress: Callable[[int, int], None],
) -> tuple[int, int, tuple[str, ...]]:
    """How many files there are, how many were present, and what the source does not have."""
    wanted = list(references(connection))
    present, missing = 0, []
    for number, (what, name, key, written) in enumerate(wanted, 1):
        copy = _copy_file if what in (PAYLOAD, RESULT) else _copy_folder
        try:
            present += copy(old, new, key, written, scratch)
        except Damaged as damaged:
            missing.append(f"the {what} of {name} {damaged}")
        progress(number, len(wanted))
    return len(wanted), present, tuple(missing)


def _copy_file(old: Files, new: Files, key: str, _written: str | None, _scratch: Path) -> bool:
    """Copy a payload or result, whose key has its fingerprint; True if it was there."""
    with contextlib.suppress(Damaged):
        new.get(key)
        return True
    new.write(key, old.get(key))
    new.get(key)
    return False


def _copy_folder(old: Files, new: Files, key: str, written: str | None, scratch: Path) -> bool:
    """Copy a checkpoint or snapshot; True if it was there."""
    if new.exists(key):
        with _local(new, key, scratch) as folder:
            if folder_problem(folder, key, written) is None:
                return True
    with _local(old, key, scratch) as folder:
        if (problem := folder_problem(folder, key, written)) is not None:
            raise Damaged(problem)
        # Only now: nothing is deleted before an intact copy was seen.
        new.remove(key)
        if new.local is None:
            new.upload(folder, key)
        else:
            with atomic_folder(Path(new.local, key)) as part:
                for name in os.listdir(folder):
                    shutil.copyfile(f"{folder}/{name}", part / name)
    with _local(new, key, scratch) as folder:
        if (problem := folder_problem(folder, key, written)) is not None:
            raise BackupFailed(
                f"the target storage does not return what was written: {key} {problem}.",
                hint="Check the storage, and run this again.",
            )
    return False


@contextlib.contextmanager
def _local(files: Files, key: str, scratch: Path) -> Iterator[str]:
    """A folder as it is stored; from an object store, it is downloaded each time."""
    if files.local is not None:
        yield f"{files.local}/{key}"
        return
    folder = scratch / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with contextlib.suppress(FileNotFoundError):  # `folder_problem` says that it is missing
            files.download(key, str(folder))
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
