"""
What is wrong with a data folder, in words, and which of it can be put right without losing anything.

    report = examine(settings)       # changes nothing; also beside a running server
    repaired = repair(settings)      # never beside one

`diagnose` decides, from facts alone.
"""

import asyncio
import enum
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkex.server.api.auth import LINK_KEY_FILE as SIGNING_KEY
from tinkex.server.api.auth import TOKEN_KEY_FILE as TOKENS_KEY
from tinkex.server.maintenance.backup import DATABASE
from tinkex.server.settings import MEBIBYTE, Settings
from tinkex.server.store import Store, open_store
from tinkex.server.store.blobs import PREFIX_DEPTHS, UNREADABLE, Files
from tinkex.server.store.folder_lock import LOCK_FILE, lock_database, lock_folder, lock_holder
from tinkex.server.store.inspection import (
    CHECKPOINT,
    OLDER_SNAPSHOT,
    PAYLOAD,
    RESULT,
    SNAPSHOT,
    DamagedItem,
    Inspection,
    inspect,
    rebuild_indexes,
    remove,
)
from tinkex.server.store.keys import MARKER
from tinkex.server.store.migrations import unsupported
from tinkex.server.store.sql_dialects import log_is_lost

#: What a data folder consists of.
PARTS = (
    *(DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", SIGNING_KEY, TOKENS_KEY, MARKER, LOCK_FILE),
    *PREFIX_DEPTHS,
)
_ALL = os.R_OK | os.W_OK | os.X_OK

# Of many alike, so many are named.
MAX_NAMED = 5
# Beside a running server younger files may be about to be pointed to.
MIN_ORPHAN_AGE_S = 3600.0

_INDEX = re.compile(r"(missing from|wrong # of entries in|non-unique entry in) index")


class Level(enum.StrEnum):
    FINE = "fine"
    NOTE = "note"  # worth knowing, nothing to do
    PROBLEM = "problem"


class Repair(enum.Enum):
    """What can be put right by itself."""

    MIGRATE = enum.auto()
    INDEXES = enum.auto()
    SNAPSHOTS = enum.auto()
    ORPHANS = enum.auto()
    KEYS = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at, and what to do about it."""

    level: Level
    about: str
    text: str
    advice: str = ""
    repair: Repair | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderState:
    """The folder itself."""

    folder: Path
    exists: bool
    writable: bool
    #: The file system as a whole takes nothing.
    read_only: bool = False
    readable: bool = True
    #: What was committed last was in a file that is gone.
    log_lost: bool = False
    #: A file says that keys were made for this server.
    keys_made: bool = False
    free_bytes: int
    #: The process that holds it, if one does.
    holder: str | None
    #: Secrets that others on this machine can read.
    open_secrets: tuple[str, ...]
    #: Parts of it that this user may not read and write, each with its owner.
    closed: tuple[str, ...] = ()


def folder_state(settings: Settings) -> FolderState:
    folder = settings.folder
    exists = folder.is_dir()
    secrets = [folder / name for name in (SIGNING_KEY, TOKENS_KEY)]
    writable = exists and os.access(folder, _ALL)
    readable = exists and os.access(folder, os.R_OK | os.X_OK)
    parts = [folder / name for name in PARTS] if writable else []
    return FolderState(
        folder=folder,
        exists=exists,
        writable=writable,
        read_only=exists and bool(os.statvfs(folder).f_flag & os.ST_RDONLY),
        readable=readable,
        log_lost=readable and log_is_lost(folder / DATABASE),
        keys_made=readable and (folder / MARKER).exists(),
        free_bytes=shutil.disk_usage(folder).free if exists else 0,
        holder=lock_holder(folder) if readable else None,
        open_secrets=tuple(
            file.name
            for file in secrets
            if readable and file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077
        ),
        closed=tuple(
            f"{part.name} (of {_owner(part)})"
            for part in parts
            if part.exists() and not os.access(part, _ALL if part.is_dir() else _ALL ^ os.X_OK)
        ),
    )


def _owner(path: Path) -> str:
    """By name, where the system has one."""
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def diagnose(state: FolderState, facts: Inspection, *, reserve_mb: float) -> Iterator[Finding]:
    """Everything there is to say, most basic first. Pure."""
    yield from _about_folder(state, reserve_mb)
    yield from _about_database(facts, is_full=state.free_bytes < MEBIBYTE)
    if state.log_lost:
        yield Finding(
            level=Level.PROBLEM,
            about="database",
            text=f"{DATABASE}-shm is there without {DATABASE}-wal: a server was ended in the midst "
            "of its work, and the file with what it committed last is gone",
            advice="Put it back if you can, before a server or anything else opens the database. "
            "Without it the database is sound and older: clients hear that their newest requests "
            "are not known.",
        )
    is_known = not facts.damage and facts.version in (None, facts.newest_version)
    if state.keys_made and is_known and not facts.has_keys:
        yield Finding(
            level=Level.PROBLEM,
            about="keys",
            text=f"keys were made for this server ({MARKER} says so), and the database has none",
            advice="It was lost, or it is another one: no server starts so. Check --db, or restore "
            "a back-up: `tinkex restore`. `tinkex key create` makes a new key; deleting "
            f"{MARKER} lets the server start without keys.",
        )
    if facts.version != facts.newest_version or facts.damage or facts.refused or facts.is_wrong_database:
        return
    yield from _about_files(facts)
    yield from _about_logs(facts)


def _about_folder(state: FolderState, reserve_mb: float) -> Iterator[Finding]:
    about = "folder"
    if state.read_only:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"{state.folder} is on a file system that is mounted read-only",
            advice="No server can work on it. After errors of a disk that is how systems mount it: "
            "look at the system's log, then mount it writable. `tinkex backup` can still copy it.",
        )
    elif not state.writable:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"{state.folder}, of {_owner(state.folder)}, cannot be read and written by this "
            "user",
            advice="Run this as the user that runs the server, or make it belong to that user.",
        )
    else:
        yield Finding(level=Level.FINE, about=about, text=f"{state.folder} can be written")
    if state.closed:
        yield Finding(
            level=Level.PROBLEM,
            about="rights",
            text=f"this user may not read and write {_some(state.closed, ', ')}",
            advice="A server needs all of its folder. Run this as the user that runs the server, "
            "or make everything belong to that user.",
        )
    if state.holder is not None:
        yield Finding(
            level=Level.NOTE,
            about="lock",
            text=f"a server (process {state.holder}) runs on it",
            advice="Files of the last hour are not looked at for being left behind.",
        )
    free = f"{state.free_bytes / MEBIBYTE:,.0f} MiB are free"
    if state.free_bytes < reserve_mb * MEBIBYTE:
        yield Finding(
            level=Level.PROBLEM,
            about="room",
            text=f"{free}, and a server takes nothing new in with less than {reserve_mb:g} MiB",
            advice="Make room on the disk, or set reserve_mb.",
        )
    else:
        yield Finding(level=Level.FINE, about="room", text=free)
    if state.open_secrets:
        yield Finding(
            level=Level.PROBLEM,
            about="keys",
            text=f"others on this machine can read {', '.join(state.open_secrets)}",
            advice="They open links and tokens of this server. --repair closes them.",
            repair=Repair.KEYS,
        )


def _about_database(facts: Inspection, *, is_full: bool) -> Iterator[Finding]:
    about = "database"
    if facts.refused is not None and is_full:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"it cannot be opened on a full disk: {facts.refused}",
            advice="Make room first, and look again.",
        )
    elif facts.refused is not None:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"it cannot be opened: {facts.refused}",
            advice="Check --data and --db. If it is lost, restore a back-up: `tinkex restore`.",
        )
    elif facts.damage:
        only_indexes = all(_INDEX.search(line) for line in facts.damage)
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"it is damaged: {_some(facts.damage, '; ')}",
            advice="Only indexes are, and those --repair makes anew."
            if only_indexes
            else "Keep a copy of the folder and restore a back-up: `tinkex restore`.",
            repair=Repair.INDEXES if only_indexes else None,
        )
    elif facts.is_wrong_database:
        empty = "it is empty" if facts.version is None else "it knows nothing of them"
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"there are checkpoints or snapshots in the storage, and {empty}",
            advice="It is not the database of these files. Check --data and --db; if it was lost, "
            "restore a back-up: `tinkex restore`. Nothing was deleted, and no server starts so.",
        )
    elif facts.version == facts.newest_version:
        yield Finding(level=Level.FINE, about=about, text=f"sound, of version {facts.version}")
    elif facts.version is not None and facts.version not in facts.known_versions:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"it {unsupported(facts.version)}",
        )
    elif facts.version is None:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text="it is empty: no server has worked with it",
            advice="--repair, or the first start of a server, makes its tables.",
            repair=Repair.MIGRATE,
        )
    else:
        yield Finding(
            level=Level.PROBLEM,
            about=about,
            text=f"it is of version {facts.version}, and the newest is {facts.newest_version}",
            advice="--repair, or the next start of the server, brings it up to date.",
            repair=Repair.MIGRATE,
        )


_ADVICE = {
    PAYLOAD: "Its request fails, or its model cannot be built again. Restore it from a back-up.",
    RESULT: "Its client hears that the result is lost. Restore it from a back-up.",
    CHECKPOINT: "It cannot be loaded, sampled or downloaded. Restore its folder from a back-up, or "
    "delete the checkpoint.",
    OLDER_SNAPSHOT: "The newest one is used; the next one takes its state.",
    SNAPSHOT: "Its model cannot be built again. Restore the folder from a back-up, or go on from a "
    "checkpoint.",
}


def _advice(broken: DamagedItem, *, mendable: bool) -> str:
    if mendable:
        return "The one before it and the log can take its place: --repair, or the server."
    if broken.problem.startswith(UNREADABLE):
        return (
            "It may be whole: make it readable for the user that runs the server, and look again."
        )
    return _ADVICE[broken.what]


def _about_files(facts: Inspection) -> Iterator[Finding]:
    for broken in facts.damaged:
        mendable = can_fall_back(broken, facts)
        yield Finding(
            level=Level.PROBLEM,
            about=broken.what,
            text=f"that of {broken.name} {broken.problem}",
            advice=_advice(broken, mendable=mendable),
            repair=Repair.SNAPSHOTS if mendable else None,
        )
    if not facts.damaged:
        counted = f"{facts.checked} files and folders are what was written"
        yield Finding(level=Level.FINE, about="files", text=counted)
    if facts.orphans:
        rooms = Counter(state.partition("/")[0] for place in facts.orphans)
        counts = ", ".join(f"{count} in {room}" for room, count in sorted(rooms.items()))
        yield Finding(
            level=Level.NOTE,
            about="left behind",
            text=f"nothing refers to {counts}",
            advice="The server deletes them after an hour; --repair does now.",
            repair=Repair.ORPHANS,
        )
    if facts.unknown_sessions:
        yield Finding(
            level=Level.PROBLEM,
            about="strange files",
            text=f"{len(facts.unknown_sessions)} sessions have checkpoints or snapshots here and are not in "
            f"the database: {_some(facts.unknown_sessions, ', ')}",
            advice="They are of another database, or of a later time than this one. Nothing of "
            "them is deleted by itself. Restore the back-up into a folder of its own, or move them "
            "away.",
        )
    if facts.set_aside:
        yield Finding(
            level=Level.NOTE,
            about="set aside",
            text=f"{facts.set_aside} damaged snapshots lie in set-aside",
            advice="Nothing uses them: delete the folder when nobody wants to look at them.",
        )


def _about_logs(facts: Inspection) -> Iterator[Finding]:
    for gap in facts.log_gaps:
        yield Finding(
            level=Level.PROBLEM,
            about="log",
            text=f"steps {_some([str(number) for number in gap.seq_ids], ', ')} of "
            f"{gap.model_id} are missing",
            advice="The model cannot be built again if its newest snapshot is lost too.",
        )
    if not facts.log_gaps:
        yield Finding(level=Level.FINE, about="logs", text="no step of any model is missing")


def can_fall_back(broken: DamagedItem, facts: Inspection) -> bool:
    """Whether it is a snapshot that can be done without."""
    whole = broken.problem.startswith(UNREADABLE)  # perhaps: nobody could look
    return broken.what == SNAPSHOT and broken.name in facts.has_fallback and not whole


def _some(names: Sequence[str], between: str) -> str:
    shown = between.join(names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _facts(settings: Settings, *, held: bool) -> Inspection:
    return inspect(
        settings.db_url,
        Files(settings.storage_url),
        young_s=MIN_ORPHAN_AGE_S if held else 0.0,
        abandoned_s=settings.abandoned_s,
    )


def examine(settings: Settings) -> list[Finding]:
    """Look at everything, and change nothing."""
    state = folder_state(settings)
    if not state.exists:
        text = f"there is no folder {state.folder}"
        return [Finding(level=Level.PROBLEM, about="folder", text=text, advice="Check --data.")]
    if not state.readable:
        return list(_about_folder(state, settings.reserve_mb))
    facts = _facts(settings, held=state.holder is not None)
    return list(diagnose(state, facts, reserve_mb=settings.reserve_mb))


def repair(settings: Settings) -> list[str]:
    """Put right what can be without losing anything; what was done. Raises beside a server."""
    done: list[str] = []
    state = folder_state(settings)
    if state.holder is None and not any(finding.repair for finding in examine(settings)):
        # Not even a lock is left in a folder that is something else.
        return done
    with lock_folder(settings.folder), lock_database(settings):
        wanted = {finding.repair for finding in examine(settings)}
        if Repair.INDEXES in wanted:
            rebuild_indexes(settings.db_url)
            done.append("made the indexes of the database anew")
        if Repair.MIGRATE in wanted:
            _open(settings).close()
            done.append("brought the database up to date")
        # What was behind it could not be seen before.
        facts = _facts(settings, held=False)
        done += _repair_snapshots(settings, facts)
        if facts.orphans:
            remove(Files(settings.storage_url), facts.orphans)
            done.append(f"deleted {len(facts.orphans)} files and folders that nothing refers to")
        for name in folder_state(settings).open_secrets:
            (settings.folder / name).chmod(0o600)
            done.append(f"made {name} readable for its owner alone")
    return done


def _repair_snapshots(settings: Settings, facts: Inspection) -> list[str]:
    models = [broken.name for broken in facts.damaged if can_fall_back(broken, facts)]
    if not models:
        return []
    store = _open(settings)

    async def act() -> None:
        for model_id in models:
            await store.snapshots.newest_intact(model_id)

    try:
        asyncio.run(act())
    finally:
        store.close()
    return [f"set the damaged snapshot of {model_id} aside" for model_id in models]


def _open(settings: Settings) -> Store:
    return open_store(
        db_url=settings.db_url,
        storage_url=settings.storage_url,
        folder=settings.folder,
        exclusive=True,
    )
