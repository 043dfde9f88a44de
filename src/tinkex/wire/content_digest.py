"""
The `Content-Digest` header of RFC 9530: `sha-256=:...:`.

Protobuf that is truncated between two fields still parses. The digest detects a result that a
broken proxy cut short.
"""

import base64
import hashlib

_PREFIX = "sha-256=:"


def content_digest(body: bytes) -> str:
    return f"{_PREFIX}{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def is_intact(body: bytes, header: str | None) -> bool:
    """False if the header's SHA-256 does not match; no header or another digest is ignored."""
    if header is None or not header.startswith(_PREFIX) or "," in header:
        return True
    return header == content_digest(body)
