"""
A file beside the secrets that says: keys were made for this server.

A server without keys answers everybody on its machine. When a database is lost, with its keys, it
looks like that of such a server. The marker tells the two apart.
"""

import logging
import os
from pathlib import Path

from tinkex.server.store.database import Database, DatabaseRefused, any_key

log = logging.getLogger("tinkex.server.store")

MARKER = "keys.made"
_TEXT = (
    "API keys were made for the server of this data folder. If its database has none, the server "
    "does not start. Delete this file to let it start without keys.\n"
)


def write_marker(folder: Path) -> None:
    """Note that there are keys; safe to repeat."""
    file = folder / MARKER
    if file.exists():
        return
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as written:
            written.write(_TEXT)
            written.flush()
            os.fsync(descriptor)
    except OSError as error:
        # The next start tries again.
        log.warning("%s cannot be written: %s", file, error.strerror)


def refuse_lost_keys(database: Database, folder: Path) -> None:
    """Raises when there were keys and the database has none; notes the keys that it has."""
    if database.read_now(any_key):
        write_marker(folder)
    elif (marker := folder / MARKER).exists():
        raise DatabaseRefused(
            f"keys were made for this server ({marker} says so), and its database has none: it was "
            "lost or cut short, or it is another one. Without keys the server would answer "
            "everybody on this machine. Check --db, or restore a back-up with `tinkex restore`. "
            "To go on with what is there, make a new key with `tinkex key create`; to go on "
            f"without keys, delete {marker}."
        )
