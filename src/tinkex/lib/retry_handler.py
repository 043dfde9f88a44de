"""`tinkex.RetryConfig`, where the official client hides it."""

from __future__ import annotations

from tinkex.client.http.retry import RetryConfig

__all__ = ["RetryConfig"]
