"""Which addresses are of the same server: what may see a key depends on it."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

_USUAL_PORTS = {"http": 80, "https": 443}


def origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None for what is no http:// or https:// address."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        return None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, _USUAL_PORTS[parts.scheme] if port is None else port


def redirect_url(url: str, location: str | None) -> str | None:
    """Where an answer from `url` redirects to; None if that is no http:// or https:// address."""
    if not location or "\\" in location:  # which some take for a slash, and so for another host
        return None
    try:
        found = urljoin(url, location)
    except ValueError:
        return None
    return None if origin(found) is None else found
