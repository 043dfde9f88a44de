"""`tinkex.RetryConfig`, under the import path of the official client."""

from __future__ import annotations

from tinkex.client.http.retry import RetryConfig

__all__ = ["RetryConfig"]
