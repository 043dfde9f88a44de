"""
API keys stored in `~/.tinker/credentials.json`, a file shared with the official client.

Entries also record the service that a key belongs to (`base_url`), so that the key is never sent to
another; the official client ignores that field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tinkex.client.auth.credentials import ApiKey
from tinkex.client.errors import TinkerError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StoredKey:
    """One stored key and its metadata."""

    key: ApiKey
    #: `generated` keys were created for this machine, and are revoked at logout.
    type: Literal["manual", "generated"] = "manual"
    name: str = ""
    note: str | None = None
    #: {"org_details": {"name"}, "user_details": {"email"}}
    details: Mapping[str, Any] | None = None
    #: The service that it belongs to; None means any that is not on this machine.
    base_url: str | None = None

    def fits(self, service: str, *, is_local: bool) -> bool:
        return not is_local if self.base_url is None else self.base_url == service


@dataclass(frozen=True, kw_only=True)
class StoredKeys:
    """The contents of the file. Changes return a new object, for `write`."""

    default: str | None = None
    keys: Mapping[str, StoredKey] = field(default_factory=dict)

    def key_for(self, service: str, *, is_local: bool) -> str | None:
        """The id of the key for a service: the default key if it fits, else the first that fits."""
        first = [self.default] if self.default is not None else []
        fitting = (
            key_id
            for key_id in [*first, *self.keys]
            if self.keys[key_id].fits(service, is_local=is_local)
            # A key without a service is used only if it is the default.
            and (key_id == self.default or self.keys[key_id].base_url is not None)
        )
        return next(fitting, None)

    def with_key(self, key_id: str, key: StoredKey) -> StoredKeys:
        return replace(self, keys={**self.keys, key_id: key})

    def without(self, key_id: str) -> StoredKeys:
        """Removes the key, and the default if it was that key. KeyError if there is no such key."""
        keys = dict(self.keys)
        del keys[key_id]
        return StoredKeys(default=None if self.default == key_id else self.default, keys=keys)

    def with_default(self, key_id: str) -> StoredKeys:
        """KeyError if there is no such key."""
        self.keys[key_id]
        return replace(self, default=key_id)


def default_path(home: Path | None = None) -> Path:
    return (home or Path.home()) / ".tinker" / "credentials.json"


def read(path: Path) -> StoredKeys:
    """The stored keys; empty if there is no file. TinkerError if the file is invalid."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if (version := stored.get("version", VERSION)) != VERSION:
            raise ValueError(f"version {version!r}, but this client supports version {VERSION}")
        keys = {str(key_id): _key(entry) for key_id, entry in stored.get("keys", {}).items()}
        default = stored.get("default")
        if default is not None and default not in keys:
            raise ValueError("the default is not one of its keys")
        return StoredKeys(default=default, keys=keys)
    except FileNotFoundError:
        return StoredKeys()
    except json.JSONDecodeError as error:
        # Without the surrounding text, which may be a key.
        problem = f"not JSON at line {error.lineno}: {error.msg}"
    except KeyError as error:
        problem = f"a key without {error}"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise TinkerError(
        f"{path} is not a valid credentials file ({problem}). Fix or delete it, or pass api_key=..."
    )


def write(path: Path, stored: StoredKeys) -> None:
    """Write the file atomically, readable by its owner only."""
    from tinkex.durable_files import write_file  # imported here: only needed at login

    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        path.parent.chmod(0o700)
    write_file(path, (json.dumps(_plain(stored), indent=2) + "\n").encode())


def _key(entry: Any) -> StoredKey:
    kind = entry["type"]
    if kind not in ("manual", "generated"):
        raise ValueError("a key whose type is neither 'manual' nor 'generated'")
    return StoredKey(
        key=ApiKey(str(entry["key"])),
        type=kind,
        name=str(entry.get("name", "")),
        note=entry.get("note"),
        details=entry.get("details"),
        base_url=entry.get("base_url"),
    )


def _plain(stored: StoredKeys) -> dict[str, Any]:
    def entry(key: StoredKey) -> dict[str, Any]:
        told = {
            "type": key.type,
            "key": key.key.value,
            "name": key.name,
            "note": key.note,
            "details": None if key.details is None else dict(key.details),
            "base_url": key.base_url,
        }
        return {name: value for name, value in told.items() if value is not None}

    keys = {key_id: entry(key) for key_id, key in stored.keys.items()}
    default = {} if stored.default is None else {"default": stored.default}
    return {"version": VERSION, **default, "keys": keys}
