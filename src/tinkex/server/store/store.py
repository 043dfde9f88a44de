"""The store as one thing to open and close: database, files, and the rooms over them."""

from pathlib import Path

from tinkex.server.store.audit import Audit
from tinkex.server.store.catalog import Catalog
from tinkex.server.store.checkpoints import Checkpoints
from tinkex.server.store.database import Database
from tinkex.server.store.files import Files
from tinkex.server.store.history import History
from tinkex.server.store.keys import Keys
from tinkex.server.store.requests import Requests
from tinkex.server.store.retention import Retention
from tinkex.server.store.runs import Runs
from tinkex.server.store.snapshots import Snapshots
from tinkex.server.store.telemetry import Telemetry
from tinkex.server.store.usage import Usage


class Store:
    """Everything a server must not forget. Close it once nothing uses it; safe to repeat."""

    def __init__(self, *, database: Database, files: Files, folder: Path) -> None:
        self._database = database
        self.files = files
        self.keys = Keys(database)
        self.requests = Requests(database, files)
        self.runs = Runs(database)
        self.history = History(database)
        self.usage = Usage(database)
        self.audit = Audit(database)
        self.telemetry = Telemetry(database)
        self.checkpoints = Checkpoints(database, files, folder)
        self.catalog = Catalog(database)
        self.snapshots = Snapshots(database, files, folder)
        self.retention = Retention(database, files, folder)

    @property
    def commits(self) -> int:
        """Transactions committed since opening."""
        return self._database.writer.commits

    def close(self) -> None:
        self._database.close()


def open_store(*, db_url: str, storage_url: str, folder: Path, alone: bool = False) -> Store:
    """Open, or make, the store; its schema is brought up to date. Servers are `alone` on it."""
    folder.mkdir(parents=True, exist_ok=True)
    return Store(database=Database(db_url, alone=alone), files=Files(storage_url), folder=folder)
