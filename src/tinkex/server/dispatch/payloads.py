"""What requests carry, kept in memory between their acceptance and their turn."""

import asyncio
from pathlib import Path

from tinkex.server.store import Store
from tinkex.server.store.requests import INLINE_BYTES

# Up to this much is kept; the rest is read back.
PAYLOADS_BYTES = 128 * 2**20


class Payloads:
    """Bytes, or the file that holds them: large ones are files already, and engines read those."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def keep(self, request_id: str, payload: bytes) -> None:
        """Keep this for its turn if it is small and there is room."""
        fits = self._kept_bytes + len(payload) <= PAYLOADS_BYTES
        if len(payload) <= INLINE_BYTES and fits:
            self._kept[request_id] = payload
            self._kept_bytes += len(payload)

    async def get(self, request_id: str) -> bytes | Path:
        if (payload := self._kept.get(request_id)) is not None:
            return payload
        return await self._store.requests.payload(request_id)

    async def read(self, request_id: str) -> bytes:
        """The bytes themselves, wherever they are."""
        payload = await self.get(request_id)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def forget(self, request_id: str) -> None:
        if (payload := self._kept.pop(request_id, None)) is not None:
            self._kept_bytes -= len(payload)
