"""
What this server signs and later knows again: tokens instead of keys, links that expire.

One secret of the data folder, made at the first start and readable by its owner only. Who can
read it can be anybody; deleting it makes everything signed so far worthless.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "signing.key"
SECRET_BYTES = 32
# Tokens are read before anybody is known: no more than this is looked at.
LONGEST_TOKEN = 4096


class BadToken(Exception):
    """Not signed here, changed, or over."""


class SigningKey:
    """HMAC-SHA256 with the server's secret; `purpose` keeps signatures of one kind from another."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of(cls, folder: Path) -> "SigningKey":
        """The secret of a data folder; made, whole or not at all, when there is none."""
        file = folder / FILE
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            mine = folder / f"{FILE}.{secrets.token_hex(8)}"
            descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as written:
                written.write(secrets.token_bytes(SECRET_BYTES))
                written.flush()
                os.fsync(written.fileno())
            # Two servers that start at once must end with one secret: the first link counts.
            with contextlib.suppress(FileExistsError):
                os.link(mine, file)
            mine.unlink()
        return cls(file.read_bytes())

    def sign(self, purpose: str, text: str) -> str:
        """A signature fit for a URL."""
        return _encode(self._digest(f"{purpose}\n{text}".encode()))

    def is_signed(self, purpose: str, text: str, signature: str) -> bool:
        return hmac.compare_digest(self.sign(purpose, text).encode(), signature.encode())

    def token(self, claims: Mapping[str, Any]) -> str:
        """A JSON web token (HS256)."""
        head = _encode(b'{"alg":"HS256","typ":"JWT"}')
        body = _encode(json.dumps(dict(claims), separators=(",", ":")).encode())
        return f"{head}.{body}.{_encode(self._digest(f'{head}.{body}'.encode()))}"

    def claims(self, token: str, *, now_s: float) -> dict[str, Any]:
        """What one of our own tokens says, while it lasts; only HS256 is ever looked at."""
        parts = token.split(".")
        if len(token) > LONGEST_TOKEN or len(parts) != 3:
            raise BadToken("it is not a token")
        head, body, signature = parts
        expected = _encode(self._digest(f"{head}.{body}".encode()))
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise BadToken("it was not signed by this server")
        try:
            header, claims = json.loads(_decode(head)), json.loads(_decode(body))
        except (ValueError, binascii.Error):
            raise BadToken("it is not a token") from None
        if header.get("alg") != "HS256" or not isinstance(claims.get("exp"), int | float):
            raise BadToken("it is not a token")
        if claims["exp"] <= now_s:
            raise BadToken("it has expired")
        return dict(claims)

    def _digest(self, data: bytes) -> bytes:
        return hmac.new(self._secret, data, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
