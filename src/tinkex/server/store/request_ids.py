"""The ids of requests: secret, and each tells when it was given."""

import base64
import secrets

# Of a request id: milliseconds since 1970 in this many bytes, then random ones.
TIME_BYTES = 6
ID_BYTES = 18


def new_request_id(now_s: float) -> str:
    """Nobody can guess it, and it tells when it was given long after its row is gone."""
    time_part = int(now_s * 1000).to_bytes(TIME_BYTES)
    return base64.urlsafe_b64encode(time_part + secrets.token_bytes(ID_BYTES - TIME_BYTES)).decode()


def given_s(request_id: str) -> float | None:
    """When a server gave out this id; None for what is no such id."""
    try:
        data = base64.b64decode(request_id, altchars=b"-_", validate=True)
    except ValueError:
        return None
    return int.from_bytes(data[:TIME_BYTES]) / 1000 if len(data) == ID_BYTES else None
