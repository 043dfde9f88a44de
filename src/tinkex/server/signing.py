"""
Links that open one thing until a time, for whoever holds them: no key travels with them.

    signer = Signer.of_folder(settings.folder)
    query = signer.sign("/api/v1/signed/trace/ID", lasts_s=900)    # "expires=...&signature=..."
    signer.opens(path, expires, signature)                         # in the route that answers it
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Self

log = logging.getLogger("tinkex.server.signing")

KEY_FILE = "signing.key"
KEY_BYTES = 32


class Signer:
    """Signs paths with a key of this server. Query parts other than the two are not covered."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """With the key of a data folder, made there the first time; links outlive a restart."""
        return cls(folder_key(folder))

    def sign(self, path: str, *, lasts_s: float) -> str:
        """The query that makes this path a link for so many seconds."""
        expires_s = int(time.time() + lasts_s)
        return f"expires={expires_s}&signature={self._signature(path, expires_s)}"

    def opens(self, path: str, expires: str, signature: str) -> bool:
        """Whether a link was made here and has not run out; takes as long for a near miss."""
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            return False
        expected = self._signature(path, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode()) and (
            int(expires) > time.time()
        )

    def _signature(self, path: str, expires_s: int) -> str:
        signed = f"{expires_s}\n{path}".encode()
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def folder_key(folder: Path, name: str = KEY_FILE) -> bytes:
    """The secret of a data folder, readable by its owner alone; made when it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / name
    with contextlib.suppress(FileNotFoundError):
        if len(found := file.read_bytes()) >= KEY_BYTES:
            return found
        # With an empty key anybody could sign. Links and tokens of the old one are over.
        log.error("%s was cut short and is made anew; who has a token fetches another", file)
        file.unlink()
    part = folder / f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as written:
        written.write(secrets.token_bytes(KEY_BYTES))
        written.flush()
        os.fsync(written.fileno())
    try:
        # Whole or not at all, and the first of two wins.
        os.link(part, file)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return file.read_bytes()
