"""
The store: database rows and stored files. The only package that uses SQL.

It does not depend on HTTP or on engines. `open_store` opens everything; `Store` has one attribute
for each group of tables.
"""

import contextlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from tinkex.server.store import server_secrets
from tinkex.server.store.blob_cache import BlobCache
from tinkex.server.store.blobs import Files
from tinkex.server.store.checkpoint_catalog import CheckpointCatalog, NamedCheckpoint
from tinkex.server.store.checkpoints import Checkpoints, Version
from tinkex.server.store.console_reads import ConsoleReads
from tinkex.server.store.database import Database, accepted_work
from tinkex.server.store.database_identity import refuse_wrong_database
from tinkex.server.store.events import Audit, Telemetry
from tinkex.server.store.keys import ApiKey, Keys, refuse_lost_keys
from tinkex.server.store.models import BaseHashes, CustomLoss, Model, Models, RunTaken, Sampler
from tinkex.server.store.ownership import NotOwner, Ownership
from tinkex.server.store.quotas import OverQuota, Quota, Quotas
from tinkex.server.store.request_rows import Completion
from tinkex.server.store.requests import Attempts, Requests
from tinkex.server.store.retention import Retention
from tinkex.server.store.schema import Status
from tinkex.server.store.sessions import Session, Sessions
from tinkex.server.store.snapshots import Snapshots
from tinkex.server.store.step_history import StepHistory
from tinkex.server.store.storage_health import (
    FILES,
    Damaged,
    DatabaseRefused,
    ObjectStoreUnavailable,
    StorageError,
)
from tinkex.server.store.usage import Usage
from tinkex.server.store.workers import Workers

__all__ = [
    "ApiKey",
    "Checkpoints",
    "Completion",
    "CustomLoss",
    "Damaged",
    "DatabaseRefused",
    "Keys",
    "Model",
    "Models",
    "NamedCheckpoint",
    "NotOwner",
    "OverQuota",
    "Ownership",
    "Quota",
    "Requests",
    "RunTaken",
    "Sampler",
    "Session",
    "Sessions",
    "Status",
    "StorageError",
    "Store",
    "Version",
    "accepted_work",
    "open_store",
]

T = TypeVar("T")

# Size of the file that `probe` writes: large enough to show that a disk has free space again.
PROBE = bytes(2**20)


class Store:
    """All persistent data of a server. Closing is safe to repeat."""

    def __init__(
        self,
        *,
        database: Database,
        files: Files,
        folder: Path,
        signing_secrets: Mapping[str, bytes],
    ) -> None:
        self._database = database
        #: What signs links and tokens, by name.
        self.secrets = signing_secrets
        self.health = database.health
        self.files = files
        self.keys = Keys(database, folder, files)
        self.requests = Requests(database, files)
        self.attempts = Attempts(database)
        cache = BlobCache(files, folder)
        self.retention = Retention(database, files, cache)
        self.quotas = Quotas(database, self.retention)
        self.sessions = Sessions(database)
        self.models = Models(database, self.quotas)
        self.base_hashes = BaseHashes(database)
        self.usage = Usage(database)
        self.audit = Audit(database)
        self.telemetry = Telemetry(database)
        self.checkpoints = Checkpoints(database, files, folder, self.quotas, cache)
        self.checkpoint_catalog = CheckpointCatalog(database, self.quotas)
        self.snapshots = Snapshots(database, files, folder, cache)
        self.step_history = StepHistory(database)
        self.workers = Workers(database)
        self.console_reads = ConsoleReads(database)

    @property
    def commits(self) -> int:
        """Transactions committed since opening."""
        return self._database.writer.commits

    def ownership(self, worker: str) -> Ownership:
        """For a worker that shares the database with others."""
        return Ownership(self._database, worker)

    async def build_report(self, function: Callable[[], T]) -> T:
        """Run `function`, which builds a large response, in a thread."""
        return await self._database.build_report(function)

    def check_database_file(self) -> None:
        """Check that the database file is still the one that was opened; updates `health`."""
        self._database.check_file()

    async def probe(self) -> None:
        """Test whether the database and the files can be written; updates `health`."""
        with contextlib.suppress(StorageError):
            await self._database.write(_touch)
        try:
            await self._database.with_file(self._probe_files)
        except StorageError:
            return
        else:
            self.health.clear(FILES)

    def _probe_files(self) -> None:
        key = self.files.put("probe", PROBE)
        self.files.remove(key)

    def close(self) -> None:
        self._database.close()


def _touch(connection: sa.Connection) -> None:
    if connection.dialect.name == "sqlite":
        # The number is not used; a new value makes SQLite write the page.
        connection.exec_driver_sql(f"PRAGMA user_version = {secrets.randbelow(2**31)}")
    else:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")


def open_store(
    *,
    db_url: str,
    storage_url: str,
    folder: Path,
    exclusive: bool = False,
    role: str = "",
    writer: str = "",
) -> Store:
    """
    Open the store, or create it. Servers open it `exclusive`, which also upgrades its schema.

    Other programs refuse an older schema, because a server that uses it may be running. Several
    processes that serve one database have a `role`, and different names as `writer`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _create_private(db_url)
    signing_secrets: dict[str, bytes] = {}
    database = Database(
        db_url,
        exclusive=exclusive,
        role=role,
        writer=writer,
        prepare=lambda reading, writing: signing_secrets.update(
            server_secrets.ensure_secrets(reading, writing, folder)
        ),
    )
    try:
        files = Files(storage_url)
        if exclusive or role:
            refuse_wrong_database(database, files)
            refuse_lost_keys(database, folder, files)
    except (ObjectStoreUnavailable, ImportError) as error:
        database.close()
        raise DatabaseRefused(
            f"the object store {storage_url} cannot be used: {error}. Check that it runs and "
            "accepts this server, or choose another with --storage."
        ) from error
    except BaseException:
        database.close()
        raise
    return Store(database=database, files=files, folder=folder, signing_secrets=signing_secrets)


def _create_private(db_url: str) -> None:
    """Create a new SQLite database readable by its user only; SQLite copies the mode to its WAL."""
    database = Path(db_url.removeprefix("sqlite:///"))
    if db_url.startswith("sqlite:///") and not database.exists():
        # Opening the database reports the error.
        with contextlib.suppress(OSError):
            database.touch(mode=0o600)
