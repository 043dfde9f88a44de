"""API keys of several owners on one server, and clients with a them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from server.hosting import Api
from tinkex.server.store import open_store


async def new_key(folder: Path, owner: str, **options: object) -> str:
    """Create a key in the data folder of a running server, as `tinkex key create` does."""
    store = open_store(
        db_url=f"sqlite:///{folder / 'tinkex.db'}", storage_url=str(folder), folder=folder
    )
    try:
        _, secret = await store.keys.create(owner=owner, **options)  # type: ignore[arg-type]
        return secret
    finally:
        store.close()


async def revoke(folder: Path, key_id: int) -> None:
    store = open_store(
        db_url=f"sqlite:///{folder / 'tinkex.db'}", storage_url=str(folder), folder=folder
    )
    try:
        await store.keys.revoke(key_id)
    finally:
        store.close()


@asynccontextmanager
async def with_key(
    api: Api, key: str | None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Api]:
    """A client of the same server sends this key."""
    sent = {**({} if key is None else {"X-API-Key": key}), **(headers or {})}
    url = str(api.http._base_url)
    async with aiohttp.ClientSession(url, headers=sent) as http:
        yield Api(http=http, base_model=api.base_model)


def secrets_in(folder: Path) -> Mapping[str, bytes]:
    """What the server of a data folder signs links and tokens with."""
    url = f"sqlite:///{folder / 'tinkex.db'}"
    store = open_store(db_url=url, storage_url=str(folder), folder=folder)
    store.close()
    return store.secrets


def everything_kept(folder: Path) -> bytes:
    """The bytes of all files in a data folder."""
    return b"\n".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def is_private(file: Path) -> bool:
    """Whether only its owner of the file can read it."""
    return file.stat().st_mode & 0o077 == 0
