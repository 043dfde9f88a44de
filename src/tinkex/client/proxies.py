"""Which proxy the environment names for an address."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

from tinkex.client.errors import TinkerError


def proxy_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What `proxy_for` reads of an environment."""
    names = [f"{name}_proxy" for name in ("http", "https", "all", "no")]
    names += [*map(str.upper, names), "REQUEST_METHOD"]
    return {name: env[name] for name in names if name in env}


def proxy_for(url: str, env: Mapping[str, str]) -> str | None:
    """The proxy for this address, or None. Small letters win over capitals, as everywhere."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    named = {
        name: env.get(f"{name}_proxy") or env.get(f"{name.upper()}_PROXY") or ""
        for name in (parts.scheme, "all", "no")
    }
    if parts.scheme == "http" and "REQUEST_METHOD" in env:
        # In a CGI program HTTP_PROXY is a header of whoever asks.
        named["http"] = env.get("http_proxy", "")
    proxy = named[parts.scheme] or named["all"]
    if not proxy and sys.platform not in ("darwin", "win32"):
        return None
    import urllib.request

    if proxy:
        # Documented nowhere but in its source, and the rules of NO_PROXY are written down there.
        exempt = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]
        if exempt(host, {"no": named["no"]}):
            return None
    elif not urllib.request.proxy_bypass(host):
        proxy = urllib.request.getproxies().get(parts.scheme, "")  # what the system says
    if not proxy:
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise TinkerError(
            f"The proxy set for {parts.scheme}:// addresses is not an http:// or https:// proxy "
            f"({proxy.split('://')[0]}). Use an HTTP proxy, or exempt {host} with NO_PROXY."
        )
    return proxy
