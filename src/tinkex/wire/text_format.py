"""Sizes and times as text for users."""

from datetime import UTC, datetime


def format_bytes(count: int) -> str:
    """A size in the unit in which it has one to three digits before the decimal point."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if abs(amount) < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def memory_text(*, used: int, limit: int, total: int) -> str:
    """What an engine uses now, and its limit: a limit alone reads as if it were in use."""
    return f"{format_bytes(used)} used now, up to {format_bytes(limit)} of {format_bytes(total)}"


def format_binary_bytes(count: int) -> str:
    """A size such as `1.5 MB`, with units that are powers of 1024, as official clients show it."""
    amount = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TB"


def format_utc(seconds: float, *, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """A time in seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime(form)
