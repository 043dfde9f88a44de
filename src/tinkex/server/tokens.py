"""
Tokens that stand for a key for a while: JSON web tokens, signed and known again by this server.

The secret is a file of the data folder, readable by its owner alone. Deleting it, and starting
again, makes every token worthless; clients fetch new ones for their keys.
"""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tinkex.server.signing import folder_key

KEY_FILE = "tokens.key"
# Tokens are read before anybody is known: no more than this is looked at.
LONGEST_TOKEN = 4096


class BadToken(Exception):
    """Not signed here, changed, or over."""


class Tokens:
    """HS256, and nothing else: what a token says about its own algorithm is not asked."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        return cls(folder_key(folder, KEY_FILE))

    def make(self, claims: Mapping[str, Any]) -> str:
        head = _encode(b'{"alg":"HS256","typ":"JWT"}')
        body = _encode(json.dumps(dict(claims), separators=(",", ":")).encode())
        return f"{head}.{body}.{self._signature(head, body)}"

    def read(self, token: str, *, now_s: float) -> dict[str, Any]:
        """What one of our own tokens says, while it lasts."""
        parts = token.split(".")
        if len(token) > LONGEST_TOKEN or len(parts) != 3 or not token.isascii():
            raise BadToken("it is not a token")
        head, body, signature = parts
        if not hmac.compare_digest(self._signature(head, body), signature):
            raise BadToken("it was not signed by this server")
        try:
            claims: dict[str, Any] = json.loads(_decode(body))
        except (ValueError, binascii.Error):
            raise BadToken("it is not a token") from None
        if claims["exp"] <= now_s:
            raise BadToken("it has expired")
        return claims

    def _signature(self, head: str, body: str) -> str:
        return _encode(hmac.new(self._secret, f"{head}.{body}".encode(), hashlib.sha256).digest())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
