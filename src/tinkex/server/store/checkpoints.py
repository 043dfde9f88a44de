"""
Checkpoints: immutable versions, and the names that refer to them.

A save writes the files first, then adds the version, its name and the request's result in one
transaction, which also checks the quota.
"""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from tinkex.durable_files import fingerprint
from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.store import request_rows
from tinkex.server.store.blob_cache import BlobCache
from tinkex.server.store.blobs import Files, folder_problem
from tinkex.server.store.database import (
    Database,
    columns,
    name_is,
    not_expired,
    note_audit,
    one,
    scalar,
    values,
)
from tinkex.server.store.models import Sampler, insert_sampler
from tinkex.server.store.ownership import check_terms
from tinkex.server.store.quotas import Quotas
from tinkex.server.store.schema import (
    checkpoint_names,
    checkpoint_versions,
)
from tinkex.server.store.storage_health import FILES, Damaged, StorageError
from tinkex.wire.checkpoints import ParsedCheckpointTinkerPath, tinker_path
from tinkex.wire.errors import UserFailure

T = TypeVar("T")

#: Versions remembered as verified, and as opened.
MAX_CACHED_VERSIONS = 4096


class NameTaken(Exception):
    """A checkpoint already has this name, and the request does not overwrite."""


class SamplerTaken(Exception):
    """Another sampler of the session already has this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One save: files that never change."""

    version_id: str
    owner: str
    model_id: str
    kind: str
    name: str | None
    place: str
    size_bytes: int
    created_s: float

    @property
    def tinker_path(self) -> str:
        """Its path; a version without a name has its id there."""
        return tinker_path(self.model_id, self.kind, self.name or f".{self.version_id}")

    def with_size(self, size_bytes: int) -> "Version":
        """The same version with the size of its written files."""
        return replace(self, size_bytes=size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """The name options of a save."""

    overwrite: bool
    expires_s: float | None
    user_metadata: Mapping[str, Any] | None


VERSION_COLUMNS = columns(Version, checkpoint_versions)


class Checkpoints:
    """The rows and files of checkpoint versions."""

    def __init__(
        self, database: Database, files: Files, folder: Path, quotas: Quotas, cache: BlobCache
    ) -> None:
        self._database = database
        self._files = files
        self._quotas = quotas
        self._cache = cache
        #: Where the engine writes and reads; the storage root itself if that is local.
        self._folder = files.local or str(folder)
        #: Versions whose files this process has verified; they never change.
        self._verified: set[str] = set()
        #: Folders of recently opened versions.
        self._opened: dict[str, str] = {}

    def new_version(self, *, owner: str, model_id: str, kind: str, name: str | None) -> Version:
        """A new version with its own key, not saved yet."""
        version_id = secrets.token_hex(12)
        # Unnamed saves get a name that users cannot give.
        return Version(
            version_id=version_id,
            owner=owner,
            model_id=model_id,
            kind=kind,
            name=name,
            place=f"checkpoints/{model_id}/{kind}/{name or '.unnamed'}/{version_id}",
            size_bytes=0,
            created_s=time.time(),
        )

    def folder(self, version: Version) -> str:
        """The folder where the engine writes this version."""
        return f"{self._folder}/{version.place}"

    async def open(self, version_id: str, *, required: bool = False) -> str:
        """
        The folder of a saved version on this machine, verified.

        While an object store is unavailable this raises StorageError, or waits if `required`. It
        waits for the database in accepted work only (see `Database.read`).
        """
        version = await self.version(version_id)
        if version is None:
            raise UserFailure(
                f"the files of checkpoint version {version_id} are gone: the checkpoint was "
                "deleted or has expired."
            )
        folder = self.folder(version)
        # With local storage this check is fast, so it does not queue behind hashes and uploads.
        local = self._files.local is not None
        run = self._database.with_file if local else self._database.with_folder
        if not await run(lambda: self._download(version, folder), required=required):
            raise _damaged(version, f"is missing: there is no folder {version.place}")
        if self._cache.enabled:
            self._cache.touch(folder)
        if version.version_id not in self._verified:
            await self._check(version, folder)
        return folder

    async def open_cached(self, version_id: str) -> str:
        """
        Like `open`, cached, for accepted samples.

        Versions never change, and one that an unfinished request uses is not deleted. The cleanup
        clears the cache regularly, because files may be deleted by hand.
        """
        if (folder := self._opened.get(version_id)) is None:
            folder = await self.open(version_id, required=True)
            if len(self._opened) >= MAX_CACHED_VERSIONS:
                self._opened.clear()
            self._opened[version_id] = folder
        return folder

    def clear_open_cache(self) -> None:
        self._opened.clear()

    def forget_copies(self, keys: Collection[str]) -> None:
        """The local copies of these folders were deleted: the next use downloads and verifies them."""
        self._opened.clear()
        self._verified.difference_update(key.rpartition("/")[2] for key in keys)

    def in_use(self, version_id: str) -> AbstractContextManager[None]:
        """A local copy of this version is not deleted inside of the `with` block."""
        return self._cache.held(version_id) if self._cache.enabled else contextlib.nullcontext()

    def _download(self, version: Version, folder: str) -> bool:
        """Download the files if necessary; whether the folder exists."""
        with contextlib.suppress(FileNotFoundError):
            self._files.download(version.place, folder)
        return os.path.isdir(folder)

    async def _check(self, version: Version, folder: str) -> None:
        """Raise Damaged unless the files are what was saved. They are verified once per process."""
        written = await self._fingerprint(version)
        problem = await self._database.with_folder(
            lambda: folder_problem(folder, version.place, written)
        )
        if problem is not None:
            raise _damaged(version, problem)
        if len(self._verified) >= MAX_CACHED_VERSIONS:
            self._verified.clear()  # verifying again costs one read
        self._verified.add(version.version_id)

    async def _fingerprint(self, version: Version) -> str | None:
        """The fingerprint that was stored when the version was saved."""
        statement = sa.select(checkpoint_versions.c.fingerprint).where(
            checkpoint_versions.c.version_id == version.version_id
        )
        return await self._database.read(scalar(statement))

    async def is_taken(self, *, model_id: str, kind: str, name: str) -> bool:
        version, _ = await self._named(model_id, kind, name)
        return version is not None

    async def store_files(self, version: Version) -> str:
        """Upload the files that the engine wrote; returns their fingerprint, for `save`."""
        folder = self.folder(version)
        written = await self._database.with_folder(lambda: fingerprint(folder), required=True)
        if self._files.local is None:
            await self._database.with_folder(
                lambda: self._files.upload(folder, version.place), required=True
            )
        return written

    async def save(
        self,
        version: Version,
        *,
        fingerprint: str,
        request: QueuedRequest,
        outcome: Outcome,
        naming: Naming | None = None,
        sampler: tuple[Sampler, int] | None = None,
    ) -> None:
        """Add the version, its name or sampler, and the outcome of the request in one transaction."""

        def operation(connection: sa.Connection) -> None:
            if request.term is not None:
                check_terms(connection, {version.model_id: request.term})
            insert_version(connection, version, fingerprint)
            named = naming is not None and _assign_name(connection, version, naming)
            self._quotas.check(
                connection, version.owner, size_bytes=version.size_bytes, checkpoints=int(named)
            )
            if sampler is not None and insert_sampler(connection, *sampler) != sampler[0]:
                raise SamplerTaken
            note_saved(connection, version, "checkpoint.saved")
            request_rows.finish(connection, request, outcome)

        await self._database.write(operation, required=True)

    async def discard(self, version: Version) -> None:
        """Delete the files of a version that was not saved; the cleanup deletes what remains."""
        folder = self.folder(version)
        with contextlib.suppress(StorageError):
            await self._database.with_folder(lambda: shutil.rmtree(folder, ignore_errors=True))
            await self._database.with_folder(lambda: self._files.remove(version.place))

    async def find(self, path: str, *, readers: Collection[str]) -> Version | None:
        """
        The version of a tinker path: a checkpoint of one of the `readers`, or a published one.

        Raises UserFailure if it is not a tinker path.
        """
        try:
            parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        except ValueError as error:
            raise UserFailure(str(error)) from None
        kind, _, name = parsed.checkpoint_id.partition("/")
        public = False
        if name.startswith("."):
            # An unnamed save: its path contains the version id.
            version = await self.version(name[1:])
            if version is None or (version.model_id, version.kind) != (
                parsed.training_run_id,
                kind,
            ):
                return None
        else:
            version, public = await self._named(parsed.training_run_id, kind, name)
        if version is not None and (public or version.owner in readers):
            return version
        return None

    async def _named(self, model_id: str, kind: str, name: str) -> tuple[Version | None, bool]:
        """The version of a name, and whether it is published; None if it has expired."""
        statement = (
            sa.select(*VERSION_COLUMNS, checkpoint_names.c.public)
            .join(
                checkpoint_names,
                checkpoint_names.c.version_id == checkpoint_versions.c.version_id,
            )
            .where(name_is(model_id, kind, name), not_expired(time.time()))
        )

        def operation(connection: sa.Connection) -> tuple[Version | None, bool]:
            row = connection.execute(statement).first()
            if row is None:
                return None, False
            found = dict(row._mapping)
            public = bool(found.pop("public"))
            return Version(**found), public

        return await self._database.read(operation)

    async def version(self, version_id: str) -> Version | None:
        """A version whose files are not discarded."""
        statement = sa.select(*VERSION_COLUMNS).where(
            checkpoint_versions.c.version_id == version_id,
            checkpoint_versions.c.discarded_s.is_(None),
        )
        return await self._database.read(one(Version, statement))

    async def fingerprint(self, version: Version) -> str:
        """The fingerprint of a saved version; raises Damaged if its files differ."""
        folder = await self.open(version.version_id)
        written = await self._fingerprint(version)
        if written is None:  # saved by an old version
            written = await self._database.with_folder(lambda: fingerprint(folder))
        return written

    async def copy_files(self, source: Version, target: Version) -> None:
        """
        Copy the files of a version, by hard links if possible.

        Call `fingerprint` first: it verifies that the source is not damaged.
        """
        health = self._database.health
        health.refuse_new_data()
        await self._database.with_folder(lambda: self._files.copy(source.place, target.place))
        health.clear(FILES)


def insert_version(connection: sa.Connection, version: Version, fingerprint: str) -> None:
    row = {**values(version), "fingerprint": fingerprint}
    connection.execute(checkpoint_versions.insert(), row)


def insert_name(
    connection: sa.Connection,
    version: Version,
    *,
    saved_s: float,
    expires_s: float | None,
    user_metadata: Mapping[str, Any] | None,
) -> None:
    """Give a version its name, which is not published."""
    connection.execute(
        checkpoint_names.insert(),
        {
            "model_id": version.model_id,
            "kind": version.kind,
            "name": version.name,
            "version_id": version.version_id,
            "saved_s": saved_s,
            "expires_s": expires_s,
            "user_metadata": user_metadata,
            "public": False,
        },
    )


def _damaged(version: Version, problem: str) -> Damaged:
    return Damaged(f"checkpoint {version.tinker_path} cannot be read: its folder {problem}")


def note_saved(connection: sa.Connection, version: Version, event: str) -> None:
    """Add a new checkpoint to the audit log, inside a transaction."""
    details = {
        "model_id": version.model_id,
        "tinker_path": version.tinker_path,
        "size_bytes": version.size_bytes,
    }
    note_audit(connection, owner=version.owner, event=event, details=details)


def _assign_name(connection: sa.Connection, version: Version, naming: Naming) -> bool:
    """Make a name refer to a version; whether this adds a checkpoint."""
    is_new = True
    mine = name_is(version.model_id, version.kind, version.name)
    now_s = time.time()
    known = connection.execute(sa.select(checkpoint_names.c.expires_s).where(mine)).first()
    if known is not None:
        expired = known.expires_s is not None and known.expires_s <= now_s
        if not naming.overwrite and not expired:
            raise NameTaken
        is_new = expired
        connection.execute(checkpoint_names.delete().where(mine))
    insert_name(
        connection,
        version,
        saved_s=now_s,
        expires_s=naming.expires_s,
        user_metadata=naming.user_metadata,
    )
    return is_new
