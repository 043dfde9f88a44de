"""Options of single requests, as in the official client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypedDict

if TYPE_CHECKING:
    Seconds = float | None
    Parts = tuple[Seconds, Seconds, Seconds, Seconds]


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


_UNSET: Final = _Unset()


class Timeout:
    """
    Time limits of the parts of an exchange in seconds; None means no limit.

        Timeout(60)
        Timeout(60, connect=5)
        Timeout(connect=5, read=60, write=60, pool=1)

    Behaves like the httpx class that the official client re-exports, without httpx.
    """

    __slots__ = ("connect", "pool", "read", "write")

    def __init__(
        self,
        timeout: Seconds | Parts | Timeout | _Unset = _UNSET,
        *,
        connect: Seconds | _Unset = _UNSET,
        read: Seconds | _Unset = _UNSET,
        write: Seconds | _Unset = _UNSET,
        pool: Seconds | _Unset = _UNSET,
    ) -> None:
        given = {"connect": connect, "read": read, "write": write, "pool": pool}
        defaults: dict[str, Seconds | _Unset]
        if isinstance(timeout, Timeout):
            defaults = {**timeout.as_dict()}
        elif isinstance(timeout, tuple):
            defaults = dict(zip(("connect", "read", "write", "pool"), timeout, strict=True))
        else:
            defaults = dict.fromkeys(given, timeout)
        missing = []
        for name, value in given.items():
            chosen = defaults[name] if isinstance(value, _Unset) else value
            if isinstance(chosen, _Unset):
                missing.append(name)
            setattr(self, name, chosen)
        if missing:
            raise ValueError(
                f"Timeout() lacks {', '.join(missing)}: pass a default as the first "
                "argument, or all four of connect, read, write and pool."
            )

    if TYPE_CHECKING:
        connect: Seconds
        read: Seconds
        write: Seconds
        pool: Seconds

    def as_dict(self) -> dict[str, Seconds]:
        """
        The limits by name.

        Returns:
            `connect`, `read`, `write` and `pool`, in seconds; None means no limit.

        Example:
            limits = tinkex.Timeout(60, connect=5).as_dict()
        """
        return {name: getattr(self, name) for name in ("connect", "read", "write", "pool")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeout) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.as_dict().values()))

    def __repr__(self) -> str:
        parts = self.as_dict()
        if len(set(parts.values())) == 1:
            return f"Timeout(timeout={self.connect})"
        return f"Timeout({', '.join(f'{name}={value}' for name, value in parts.items())})"


class RequestOptions(TypedDict, total=False):
    """Options of one low-level call; see `tinkex.resources`."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, Any]
    extra_json: Mapping[str, Any]
    idempotency_key: str
    follow_redirects: bool
