"""
A fingerprint of a body, as RFC 9530 sends it: `Content-Digest: sha-256=:...:`.

Protobuf that was cut between two fields is still protobuf: without this, a result that lost its end
on a broken proxy would be taken for a whole one.
"""

import base64
import hashlib

_PREFIX = "sha-256=:"


def content_digest(body: bytes) -> str:
    return f"{_PREFIX}{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def is_intact(body: bytes, told: str | None) -> bool:
    """False only where another body was announced; other fingerprints than ours are not read."""
    if told is None or not told.startswith(_PREFIX) or "," in told:
        return True
    return told == content_digest(body)
