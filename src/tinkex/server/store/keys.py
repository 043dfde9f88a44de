"""
API keys: shown once, stored as hashes. So are the cookies of browsers that signed in with one.

A server without keys accepts everyone on its machine. If the database is lost, so are its keys, and
a new database has none. A marker shows that keys were created, so that the server does not start
without them. It is outside of the database: in the data folder and in the storage, so that it is also
found by a server on another machine that has neither this folder nor the lost database.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import string
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from tinkex.server.store.blobs import Files
from tinkex.server.store.connections import any_key
from tinkex.server.store.database import Database, every, execute, note_audit, one
from tinkex.server.store.schema import api_keys, console_sessions
from tinkex.server.store.storage_health import DatabaseRefused

log = logging.getLogger("tinkex.server.store")

BASE62 = string.digits + string.ascii_letters
PREFIX = "tml-"
# 32 base-62 digits are 190 random bits: too many to guess, so one fast hash is enough.
DIGITS = 32
HINT_LENGTH = len(PREFIX) + 4
#: How long a browser stays signed in to the console.
SIGNED_IN_S = 7 * 24 * 3600.0
#: Browsers that are signed in with one key. The oldest is signed out when there are more.
MAX_BROWSERS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """The row of a key."""

    key_id: int
    hash: str
    hint: str
    owner: str
    project_id: str | None
    name: str
    limits: Mapping[str, int]
    created_s: float
    expires_s: float | None
    used_s: float | None
    revoked_s: float | None
    #: Whether it may manage the keys of all owners in the console.
    is_admin: bool = False

    def state(self, now_s: float) -> str:
        """`active`, or why the key is not accepted."""
        return key_state(self, now_s)


class _Ends(Protocol):
    @property
    def expires_s(self) -> float | None: ...
    @property
    def revoked_s(self) -> float | None: ...


def key_state(key: _Ends, now_s: float) -> str:
    """`active`, or why a key is not accepted."""
    if key.revoked_s is not None:
        return "revoked"
    if key.expires_s is not None and key.expires_s <= now_s:
        return "expired"
    return "active"


_KEY = tuple(api_keys.c)


def new_secret() -> str:
    return PREFIX + "".join(secrets.choice(BASE62) for _ in range(DIGITS))


def random_id() -> str:
    """128 random bits as 22 base-62 characters, which need no escaping in a path."""
    number = secrets.randbits(128)
    digits = []
    for _ in range(22):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(digits)


def hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _audit_details(key: ApiKey) -> dict[str, object]:
    """What the audit log stores about a key; nothing secret."""
    return {"key_id": key.key_id, "name": key.name, "hint": key.hint}


class Keys:
    """The API key rows."""

    def __init__(self, database: Database, folder: Path, files: Files) -> None:
        self._database = database
        self._folder = folder
        self._files = files

    async def create(
        self,
        *,
        owner: str,
        project_id: str | None = None,
        name: str = "",
        limits: Mapping[str, int] | None = None,
        expires_s: float | None = None,
        is_admin: bool = False,
    ) -> tuple[ApiKey, str]:
        """A new key: its row, and the secret, which is not stored."""
        secret = new_secret()
        values = {
            "hash": hashed(secret),
            "hint": secret[:HINT_LENGTH],
            "owner": owner,
            "project_id": project_id,
            "name": name,
            "limits": dict(limits or {}),
            "created_s": time.time(),
            "expires_s": expires_s,
            "is_admin": is_admin,
        }

        def operation(connection: sa.Connection) -> ApiKey:
            connection.execute(api_keys.insert(), values)
            mine = sa.select(*_KEY).where(api_keys.c.hash == values["hash"])
            key = ApiKey(**connection.execute(mine).one()._mapping)
            note_audit(connection, owner=owner, event="key.created", details=_audit_details(key))
            return key

        key = await self._database.write(operation)
        await asyncio.to_thread(write_marker, self._folder, self._files)
        return key, secret

    async def all(self) -> list[ApiKey]:
        statement = sa.select(*_KEY).order_by(api_keys.c.key_id)
        return await self._database.read(every(ApiKey, statement))

    async def any(self) -> bool:
        """Whether a key was ever created; from then on the server requires one."""
        return await self._database.read_key(any_key)

    async def by_secret(self, secret: str) -> ApiKey | None:
        wanted = hashed(secret)
        key = await self._one(api_keys.c.hash == wanted)
        # Compared again in constant time.
        return key if key is not None and hmac.compare_digest(key.hash, wanted) else None

    async def by_id(self, key_id: int) -> ApiKey | None:
        return await self._one(api_keys.c.key_id == key_id)

    async def revoke(self, key_id: int) -> None:
        """Revoke a key. The time of the first call stays."""
        statement = (
            api_keys.update()
            .where(api_keys.c.key_id == key_id, api_keys.c.revoked_s.is_(None))
            .values(revoked_s=time.time())
            .returning(*_KEY)
        )

        def operation(connection: sa.Connection) -> None:
            if (row := connection.execute(statement).first()) is not None:
                key = ApiKey(**row._mapping)
                note_audit(
                    connection, owner=key.owner, event="key.revoked", details=_audit_details(key)
                )

        await self._database.write(operation, reserve=True)

    async def of_owner(self, owner: str | None, *, limit: int) -> list[ApiKey]:
        """The newest keys of an owner, or of all owners."""
        statement = sa.select(*_KEY).order_by(api_keys.c.key_id.desc()).limit(limit)
        if owner is not None:
            statement = statement.where(api_keys.c.owner == owner)
        return await self._database.read_report(every(ApiKey, statement))

    def mark_used(self, key_id: int) -> None:
        """Record, with a deferred write, that a key was used."""
        statement = api_keys.update().where(api_keys.c.key_id == key_id).values(used_s=time.time())
        self._database.write_deferred(execute(statement), key=("key", key_id))

    async def sign_in(self, key: ApiKey) -> str:
        """A new cookie for a browser; it is not stored. Expired ones of the key are deleted."""
        cookie = secrets.token_urlsafe(32)
        now_s = time.time()
        of_key = console_sessions.c.key_id == key.key_id
        newest = (
            sa.select(console_sessions.c.hash)
            .where(of_key)
            .order_by(console_sessions.c.created_s.desc())
            .limit(MAX_BROWSERS - 1)
        )
        over = sa.or_(console_sessions.c.expires_s <= now_s, console_sessions.c.hash.not_in(newest))
        row = {
            "hash": hashed(cookie),
            "key_id": key.key_id,
            "created_s": now_s,
            "expires_s": now_s + SIGNED_IN_S,
        }

        def operation(connection: sa.Connection) -> None:
            connection.execute(console_sessions.delete().where(of_key, over))
            connection.execute(console_sessions.insert(), row)
            note_audit(
                connection, owner=key.owner, event="key.signed_in", details=_audit_details(key)
            )

        await self._database.write(operation)
        return cookie

    async def by_cookie(self, cookie: str) -> ApiKey | None:
        """The key of a browser that is signed in. The key itself may be revoked."""
        statement = (
            sa.select(*_KEY)
            .join(console_sessions, console_sessions.c.key_id == api_keys.c.key_id)
            .where(
                console_sessions.c.hash == hashed(cookie),
                console_sessions.c.expires_s > time.time(),
            )
        )
        return await self._database.read_key(one(ApiKey, statement))

    async def sign_out(self, cookie: str) -> None:
        statement = console_sessions.delete().where(console_sessions.c.hash == hashed(cookie))
        await self._database.write(execute(statement), reserve=True)

    async def _one(self, which: sa.ColumnElement[bool]) -> ApiKey | None:
        statement = sa.select(*_KEY).where(which)
        return await self._database.read_key(one(ApiKey, statement))


MARKER = "keys.made"
_MARKER_TEXT = (
    b"API keys were created for the server of this data folder. If its database has none, the "
    b"server does not start. Delete this file to let it start without keys.\n"
)


def write_marker(folder: Path, files: Files) -> None:
    """Create the marker in the data folder and in the storage; safe to repeat."""
    for place in _marker_places(folder, files):
        try:
            if not place.exists(MARKER):
                place.write(MARKER, _MARKER_TEXT)
        except OSError as error:
            # The next start of the server tries again.
            log.warning("%s cannot be written: %s", place.name(MARKER), error)


def refuse_lost_keys(database: Database, folder: Path, files: Files) -> None:
    """Raise if keys were created and the database has none; otherwise create a missing marker."""
    if database.read_sync(any_key):
        write_marker(folder, files)
        return
    markers = [
        place.name(MARKER) for place in _marker_places(folder, files) if place.exists(MARKER)
    ]
    if markers:
        marker = " and ".join(markers)
        raise DatabaseRefused(
            f"API keys were created for this server (see {marker}), but its database has none: the "
            "database was lost or truncated, or --db names another one. Without keys the server "
            "would accept everyone on this machine. Check --db, or restore a backup with `tinkex "
            "restore`. To continue with this database, create a new key with `tinkex key create`; "
            f"to continue without keys, delete {marker}."
        )


def _marker_places(folder: Path, files: Files) -> list[Files]:
    """The data folder, and the storage if that is elsewhere."""
    local = Files(str(folder))
    return [local] if files.local == local.local else [local, files]
