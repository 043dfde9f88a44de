"""
The secrets that sign links, tokens and notifications, shared by all processes of a database.

They are in the database, so they are also in each dump and backup of it. Deleting a row and restarting
the server makes a new secret; links and tokens of the old one are invalid then.

Older servers had them in files of the data folder. These move into the database at the first start.
"""

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinkex.server.store.schema import server_secrets

log = logging.getLogger("tinkex.server.store")

SECRET_BYTES = 32
#: What each secret signs.
LINKS, TOKENS, NOTIFICATIONS = "links", "tokens", "notifications"
#: The files of secrets in a data folder of an older server.
OLD_FILES = {LINKS: "signing.key", TOKENS: "tokens.key"}

_SELECT = sa.select(server_secrets.c.name, server_secrets.c.value)
# With a short secret, anyone could sign.
_DELETE_SHORT = server_secrets.delete().where(sa.func.length(server_secrets.c.value) < SECRET_BYTES)
_INSERT = {
    # If two processes start at once, the first one wins.
    "sqlite": sqlite.insert(server_secrets).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(server_secrets).on_conflict_do_nothing(),
}


def ensure_secrets(reading: sa.Engine, writing: sa.Engine, folder: Path) -> Mapping[str, bytes]:
    """The secrets of a database by name; missing ones are created, or moved from the data folder."""
    found = _read(reading)
    missing = {LINKS, TOKENS, NOTIFICATIONS} - found.keys()
    if missing:
        rows = [
            {"name": name, "value": _from_file(folder, name), "created_s": time.time()}
            for name in sorted(missing)
        ]
        with writing.begin() as connection:
            connection.execute(_DELETE_SHORT)
            connection.execute(_INSERT[connection.dialect.name], rows)
        found = _read(reading)
    for name, file in OLD_FILES.items():
        _delete_old(folder / file, found[name])
    return found


def _read(engine: sa.Engine) -> dict[str, bytes]:
    with engine.connect() as connection:
        rows = connection.execute(_SELECT)
        return {row.name: bytes(row.value) for row in rows if len(row.value) >= SECRET_BYTES}


def _from_file(folder: Path, name: str) -> bytes:
    """The secret of an older server, or a new one."""
    if name not in OLD_FILES:
        return secrets.token_bytes(SECRET_BYTES)
    file = folder / OLD_FILES[name]
    try:
        if len(found := file.read_bytes()) >= SECRET_BYTES:
            return found
    except FileNotFoundError:
        return secrets.token_bytes(SECRET_BYTES)
    except OSError as error:
        log.error("%s cannot be read: %s. Links and tokens of it are invalid", file, error.strerror)
        return secrets.token_bytes(SECRET_BYTES)
    log.error("%s was truncated; links and tokens that it signed are invalid", file)
    return secrets.token_bytes(SECRET_BYTES)


def _delete_old(file: Path, secret: bytes) -> None:
    """Delete a file whose secret is in the database, so that it has one place."""
    try:
        if file.read_bytes() == secret:
            file.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is in the database now and cannot be deleted: %s", file, error.strerror)
