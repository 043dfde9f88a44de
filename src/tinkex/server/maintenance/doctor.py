"""
`tinkex doctor`: finds problems in a data folder, and repairs those that can be repaired safely.

    findings = examine(settings)     # changes nothing; a server may be running
    done = repair(settings)          # refused while a server is running

`diagnose` is a pure function: it turns the collected facts into findings.
"""

import asyncio
import enum
import functools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tinkex.server.folder_lock import LOCK_FILE, lock_database, lock_folder, lock_holder
from tinkex.server.maintenance.backup import DATABASE
from tinkex.server.scheduler.base_model_check import CACHE_FILE as BASE_HASHES
from tinkex.server.settings import MEBIBYTE, NUMERICS, Settings
from tinkex.server.store import Store, open_store
from tinkex.server.store.blobs import PREFIX_DEPTHS, UNREADABLE, Files
from tinkex.server.store.inspection import (
    CHECKPOINT,
    OLDER_SNAPSHOT,
    PAYLOAD,
    RESULT,
    SNAPSHOT,
    DamagedItem,
    Inspection,
    database_holder,
    inspect,
    rebuild_indexes,
    referenced_keys,
)
from tinkex.server.store.keys import MARKER
from tinkex.server.store.migrations import unsupported
from tinkex.server.store.server_secrets import OLD_FILES as OLD_SECRETS
from tinkex.server.store.sql_dialects import is_wal_lost

#: The files and folders of a data folder. A server ignores any others.
PARTS = (
    *(DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}.lock", LOCK_FILE),
    *(*OLD_SECRETS.values(), MARKER),
    *PREFIX_DEPTHS,
    *("running", "isolated", BASE_HASHES),  # `scheduler.crash_files`, `scheduler.base_model_check`
    *("spill", "turn.lock", NUMERICS),  # the engines
)
_ALL = os.R_OK | os.W_OK | os.X_OK

# Maximum number of items that one finding names.
MAX_NAMED = 5
# While a server runs, younger files may belong to a request in progress.
MIN_ORPHAN_AGE_S = 3600.0

_INDEX = re.compile(r"(missing from|wrong # of entries in|non-unique entry in) index")


class Level(enum.StrEnum):
    FINE = "fine"
    NOTE = "note"  # no action needed
    PROBLEM = "problem"


#: Repairs a finding, and returns what was done.
Repair = Callable[[Settings], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, and what to do about it."""

    level: Level
    about: str
    text: str
    advice: str = ""
    #: What `--repair` does about it.
    repair: Repair | None = None


def _fine(about: str, text: str) -> Finding:
    return Finding(level=Level.FINE, about=about, text=text)


def _note(about: str, text: str, advice: str, repair: Repair | None = None) -> Finding:
    return Finding(level=Level.NOTE, about=about, text=text, advice=advice, repair=repair)


def _problem(about: str, text: str, advice: str, repair: Repair | None = None) -> Finding:
    return Finding(level=Level.PROBLEM, about=about, text=text, advice=advice, repair=repair)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderState:
    """The state of the data folder itself."""

    folder: Path
    exists: bool
    writable: bool
    #: Whether its file system is mounted read-only.
    read_only: bool = False
    readable: bool = True
    #: Whether the newest commits are lost with the WAL of the database.
    wal_lost: bool = False
    #: Whether the marker file says that API keys were created.
    keys_created: bool = False
    free_bytes: int
    #: The process that holds it, or a shared database, if one does.
    holder: str | None
    #: Secrets that other users of this machine can read.
    open_secrets: tuple[str, ...]
    #: Parts that this user may not read and write, each with its owner.
    inaccessible: tuple[str, ...] = ()


def folder_state(settings: Settings) -> FolderState:
    folder = settings.folder
    exists = folder.is_dir()
    secrets = [folder / name for name in (DATABASE, *OLD_SECRETS.values())]
    writable = exists and os.access(folder, _ALL)
    readable = exists and os.access(folder, os.R_OK | os.X_OK)
    parts = [folder / name for name in PARTS] if writable else []
    return FolderState(
        folder=folder,
        exists=exists,
        writable=writable,
        read_only=exists and bool(os.statvfs(folder).f_flag & os.ST_RDONLY),
        readable=readable,
        wal_lost=readable and is_wal_lost(folder / DATABASE),
        keys_created=readable and (folder / MARKER).exists(),
        free_bytes=shutil.disk_usage(folder).free if exists else 0,
        holder=_holder(settings) if readable or _is_shared(settings) else None,
        open_secrets=tuple(
            file.name
            for file in secrets
            # Nobody else reaches the files of a private folder.
            if readable and folder.stat().st_mode & 0o011
            if file.exists() and file.stat().st_mode & 0o077
        ),
        inaccessible=tuple(
            f"{part.name} (owned by {_owner(part)})"
            for part in parts
            if part.exists() and not os.access(part, _ALL if part.is_dir() else _ALL ^ os.X_OK)
        ),
    )


def _is_shared(settings: Settings) -> bool:
    """Whether database and storage are elsewhere, as for the processes of a cluster."""
    return settings.db.startswith("postgresql") and bool(settings.storage)


def _holder(settings: Settings) -> str | None:
    """A process that uses the data now."""
    process = lock_holder(settings.folder)
    return database_holder(settings.db_url) if process is None else f"process {process}"


def _owner(path: Path) -> str:
    """The name of the owner, or the user id if it has no name."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def diagnose(state: FolderState, facts: Inspection, *, reserve_mb: float) -> Iterator[Finding]:
    """All findings. Those that other findings depend on come first. A pure function."""
    if state.exists:
        yield from _about_folder(state, reserve_mb)
    yield from _about_lock(state)
    yield from _about_database(facts, is_full=state.exists and state.free_bytes < MEBIBYTE)
    if state.wal_lost:
        yield _problem(
            "database",
            f"{DATABASE}-shm exists without {DATABASE}-wal: a server was killed, and the file "
            "with its newest commits is missing",
            "If you have the file, put it back before a server or any other program opens "
            "the database. Without it, the database is consistent, but the newest commits are lost: "
            "clients are told that their newest requests are unknown.",
        )
    is_known = not facts.damage and facts.version in (None, facts.newest_version)
    if state.keys_created and is_known and not facts.has_keys:
        yield _problem(
            "keys",
            f"API keys were created for this server (see {MARKER}), but the database has none",
            "The database was lost, or --db names another database. The server refuses to "
            "start with it, because without keys it would accept everyone on this machine. Check "
            "--db, or restore a backup with `tinkex restore`. To continue with this database, create "
            f"a new key with `tinkex key create`; to run without keys, delete {MARKER}.",
        )
    if (
        facts.version != facts.newest_version
        or facts.damage
        or facts.refused
        or facts.is_wrong_database
    ):
        return
    yield from _about_files(facts)
    yield from _about_logs(facts)


def _about_folder(state: FolderState, reserve_mb: float) -> Iterator[Finding]:
    about = "folder"
    if state.read_only:
        yield _problem(
            about,
            f"{state.folder} is on a file system that is mounted read-only",
            "A server cannot use it. Systems mount a disk read-only after errors: check the "
            "system log, then mount it writable. `tinkex backup` can still copy the folder.",
        )
    elif not state.writable:
        yield _problem(
            about,
            f"{state.folder}, owned by {_owner(state.folder)}, cannot be read and written by "
            "this user",
            "Run this as the user that runs the server, or change its owner to that user.",
        )
    else:
        yield _fine(about, f"{state.folder} is writable")
    if state.inaccessible:
        yield _problem(
            "permissions",
            f"this user may not read and write {_some(state.inaccessible, ', ')}",
            "A server needs its whole folder. Run this as the user that runs the server, or "
            "change the owner of everything to that user.",
        )
    free = f"{state.free_bytes / MEBIBYTE:,.0f} MiB are free"
    if state.free_bytes < reserve_mb * MEBIBYTE:
        yield _problem(
            "disk",
            f"{free}, and a server refuses new work with less than {reserve_mb:g} MiB",
            "Free some space, or lower the setting reserve_mb.",
        )
    else:
        yield _fine("disk", free)
    if state.open_secrets:
        yield _problem(
            "keys",
            f"other users of this machine can read {', '.join(state.open_secrets)}",
            "They have what signs links and tokens, so nobody else may read them. --repair "
            "makes them readable only by their owner.",
            repair=functools.partial(_hide_secrets, state.open_secrets),
        )


def _about_lock(state: FolderState) -> Iterator[Finding]:
    if state.holder is not None:
        yield _note(
            "lock",
            f"a server ({state.holder}) is using it",
            "Files of the last hour are not reported as orphans.",
        )


def _about_database(facts: Inspection, *, is_full: bool) -> Iterator[Finding]:
    about = "database"
    if facts.refused is not None and is_full:
        yield _problem(
            about,
            f"it cannot be opened on a full disk: {facts.refused}",
            "Free some space first, then run this again.",
        )
    elif facts.refused is not None:
        yield _problem(
            about,
            f"it cannot be opened: {facts.refused}",
            "Check --data and --db. If the database is lost, restore a backup with `tinkex "
            "restore`.",
        )
    elif facts.damage:
        only_indexes = all(_INDEX.search(line) for line in facts.damage)
        yield _problem(
            about,
            f"it is damaged: {_some(facts.damage, '; ')}",
            "Only indexes are damaged; --repair rebuilds them."
            if only_indexes
            else "Keep a copy of the folder, and restore a backup with `tinkex restore`.",
            repair=_rebuild_indexes if only_indexes else None,
        )
    elif facts.is_wrong_database:
        empty = "it is empty" if facts.version is None else "it has none of their sessions"
        yield _problem(
            about,
            f"there are checkpoints or snapshots in the storage, and {empty}",
            "The stored files belong to another database. Check --data and --db. If the "
            "database was lost, restore a backup with `tinkex restore`. Nothing was deleted. A "
            "server refuses to start on this folder.",
        )
    elif facts.version == facts.newest_version:
        yield _fine(about, f"intact, version {facts.version}")
    elif facts.version is not None and facts.version not in facts.known_versions:
        problem, advice = unsupported(facts.version)
        yield _problem(about, f"it {problem}", advice)
    elif facts.version is None:
        yield _problem(
            about,
            "it is empty: no server has used it",
            "--repair, or the first start of a server, creates its tables.",
            repair=_upgrade,
        )
    else:
        yield _problem(
            about,
            f"it has schema version {facts.version}, and the newest is {facts.newest_version}",
            "--repair, or the next start of the server, upgrades it.",
            repair=_upgrade,
        )


_NAMES = {
    PAYLOAD: "the payload of request {}",
    RESULT: "the result of request {}",
    CHECKPOINT: "the folder of {}",
    SNAPSHOT: "the snapshot of model {}",
    OLDER_SNAPSHOT: "the older snapshot of model {}",
}
_ADVICE = {
    PAYLOAD: "Its request fails, or its model cannot be rebuilt. Restore the file from a backup.",
    RESULT: "Its client is told that the result is lost. Restore the file from a backup.",
    CHECKPOINT: "It cannot be loaded, sampled or downloaded. Restore its folder from a backup, or "
    "delete the checkpoint.",
    OLDER_SNAPSHOT: "The newest snapshot is used; the next one replaces this one.",
    SNAPSHOT: "Its model cannot be rebuilt. Restore the folder from a backup, or continue from a "
    "checkpoint.",
}


def _advice(item: DamagedItem, *, repairable: bool) -> str:
    if repairable:
        return (
            "The model can be rebuilt from the snapshot before it and the log. --repair, or the "
            "server, moves the damaged snapshot to set-aside."
        )
    if item.problem.startswith(UNREADABLE):
        return (
            "It may be intact: make it readable for the user that runs the server, then run this "
            "again."
        )
    return _ADVICE[item.what]


def _about_files(facts: Inspection) -> Iterator[Finding]:
    for item in facts.damaged:
        repairable = can_fall_back(item, facts)
        yield _problem(
            item.what,
            f"{_NAMES[item.what].format(item.name)} {item.problem}",
            _advice(item, repairable=repairable),
            repair=functools.partial(_set_aside, item.name) if repairable else None,
        )
    if not facts.damaged:
        counted = f"{facts.checked} files and folders are intact"
        yield _fine("files", counted)
    if facts.orphans:
        prefixes = Counter(key.partition("/")[0] for key in facts.orphans)
        counts = ", ".join(f"{count} in {prefix}" for prefix, count in sorted(prefixes.items()))
        yield _note(
            "orphans",
            f"nothing refers to {counts}",
            "The server deletes them after an hour; --repair deletes them now.",
            repair=functools.partial(_delete_orphans, facts.orphans),
        )
    if facts.unknown_sessions:
        yield _problem(
            "unknown files",
            f"{len(facts.unknown_sessions)} sessions have checkpoints or snapshots here and "
            f"are not in the database: {_some(facts.unknown_sessions, ', ')}",
            "They belong to another database, or are newer than this one. They are never "
            "deleted automatically. Restore a backup into a new folder, or move these files to another "
            "folder.",
        )
    if facts.set_aside:
        yield _note(
            "set aside",
            f"{facts.set_aside} damaged snapshots are in set-aside",
            "Nothing uses them: delete the folder when you do not need them for inspection.",
        )


def _about_logs(facts: Inspection) -> Iterator[Finding]:
    for gap in facts.log_gaps:
        yield _problem(
            "log",
            f"steps {_some([str(number) for number in gap.seq_ids], ', ')} of "
            f"{gap.model_id} are missing",
            "The model cannot be rebuilt if its newest snapshot is lost too.",
        )
    if not facts.log_gaps:
        yield _fine("logs", "no step of any model is missing")


def can_fall_back(item: DamagedItem, facts: Inspection) -> bool:
    """Whether it is a snapshot that has a fallback."""
    may_be_intact = item.problem.startswith(UNREADABLE)
    return item.what == SNAPSHOT and item.name in facts.has_fallback and not may_be_intact


def _some(names: Sequence[str], between: str) -> str:
    shown = between.join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def examine(settings: Settings, *, is_locked: bool = False) -> list[Finding]:
    """Check everything, without changing it. `is_locked`: this process holds the locks."""
    state = folder_state(settings)
    if not state.exists and not _is_shared(settings):
        return [_problem("folder", f"there is no folder {state.folder}", "Check --data.")]
    if state.exists and not state.readable:
        return list(_about_folder(state, settings.reserve_mb))
    if is_locked:
        state = replace(state, holder=None)
    facts = inspect(
        settings.db_url,
        Files(settings.storage_url),
        young_s=0.0 if state.holder is None else MIN_ORPHAN_AGE_S,
        abandoned_s=settings.abandoned_s,
    )
    return list(diagnose(state, facts, reserve_mb=settings.reserve_mb))


def repair(settings: Settings) -> list[str]:
    """Repair what can be repaired safely; returns what was done. Raises if a server runs."""
    done: list[str] = []
    if folder_state(settings).holder is None and not _repairs(settings):
        # Creates no lock file in a folder that is not a data folder.
        return done
    with lock_folder(settings.folder), lock_database(settings):
        # Sound indexes show the version of the tables, and the newest tables show which files
        # are missing or orphaned.
        for _ in range(3):
            repairs = _repairs(settings, is_locked=True)
            done += [each(settings) for each in repairs]
            if not repairs:
                break
    return done


def _repairs(settings: Settings, *, is_locked: bool = False) -> list[Repair]:
    findings = examine(settings, is_locked=is_locked)
    return [finding.repair for finding in findings if finding.repair is not None]


def _rebuild_indexes(settings: Settings) -> str:
    rebuild_indexes(settings.db_url)
    return "rebuilt the indexes of the database"


def _upgrade(settings: Settings) -> str:
    _open(settings).close()
    return "upgraded the database"


def _set_aside(model_id: str, settings: Settings) -> str:
    store = _open(settings)
    try:
        asyncio.run(store.snapshots.newest_intact(model_id))
    finally:
        store.close()
    return f"moved the damaged snapshot of {model_id} to set-aside"


def _delete_orphans(orphans: Sequence[str], settings: Settings) -> str:
    store = _open(settings)  # refused while a process with another folder uses the database
    try:
        # Since they were found, such a process may have stored rows that refer to them, and ended.
        referenced = referenced_keys(settings.db_url)
        gone = [key for key in orphans if key not in referenced]
        for key in gone:
            store.files.remove(key)
    finally:
        store.close()
    return f"deleted {len(gone)} orphaned files and folders"


def _hide_secrets(names: Sequence[str], settings: Settings) -> str:
    for name in names:
        (settings.folder / name).chmod(0o600)
    return f"made {', '.join(names)} readable only by its owner"


def _open(settings: Settings) -> Store:
    return open_store(
        db_url=settings.db_url,
        storage_url=settings.storage_url,
        folder=settings.folder,
        exclusive=True,
    )
