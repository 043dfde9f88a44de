"""Where the service is and who is asking: one frozen object, read once, passed down."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit, urlunsplit

from tinkex.client.errors import TinkerError

#: The version of the protocol we speak; servers choose their dialect by it.
PROTOCOL_VERSION = "0.36.0"
DEFAULT_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential that does not print, and is never part of a repr or an error."""

    value: str = field(repr=False)

    @property
    def digest(self) -> str:
        """Tells keys apart where the key itself must not be kept."""
        return hashlib.sha256(self.value.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a client may be told. Arguments win over environment over files over defaults."""

    #: Service root without a trailing slash, or "local" for an embedded server.
    base_url: str = DEFAULT_URL
    api_key: ApiKey | None = None
    project_id: str | None = None
    #: Tags of new sessions, in the order given.
    tags: tuple[str, ...] = ()
    #: Extra headers on every request; they win over our own. May hold secrets, so not printed.
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: PEM file with the certificates to trust instead of the system's.
    ca_bundle: str | None = None
    telemetry: bool = True
    #: A server that has never answered is given up after this long.
    first_contact_s: float = 30.0
    #: A request to a server that answered before is repeated for this long.
    give_up_s: float = 300.0
    #: A result that was promised is asked for this long while the server cannot be reached.
    reconnect_s: float = 3600.0

    @classmethod
    def resolve(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] = os.environ,
        home: Path | None = None,
    ) -> Settings:
        url = normalise_url(base_url or setting("BASE_URL", env) or DEFAULT_URL)
        key = api_key or setting("API_KEY", env)
        if not key and not is_loopback(url):
            # The stored key belongs to the hosted service; a local one never gets to see it.
            key = _stored_key(home or Path.home())
        cloudflare = {
            header: env[name]
            for header, name in (
                ("CF-Access-Client-Id", "CLOUDFLARE_ACCESS_CLIENT_ID"),
                ("CF-Access-Client-Secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
            )
            if env.get(name)
        }
        return cls(
            base_url=url,
            api_key=_checked_key(key or None, url),
            project_id=project_id or setting("PROJECT_ID", env),
            tags=tuple(
                dict.fromkeys(
                    tag for tag in map(str.strip, (setting("TAGS", env) or "").split(",")) if tag
                )
            ),
            headers=MappingProxyType({**cloudflare, **(headers or {})}),
            ca_bundle=setting("CA_BUNDLE", env) or env.get("SSL_CERT_FILE") or None,
            telemetry=(setting("TELEMETRY", env) or "1").lower() in _TRUE,
            first_contact_s=_seconds("FIRST_CONTACT_S", env, cls.first_contact_s),
            give_up_s=_seconds("GIVE_UP_S", env, cls.give_up_s),
            reconnect_s=_seconds("RECONNECT_S", env, cls.reconnect_s),
        )

    @property
    def lane(self) -> tuple[str, str]:
        """What shares limits: the same service asked with the same credential."""
        return self.base_url, self.api_key.digest if self.api_key else ""


def setting(name: str, env: Mapping[str, str]) -> str | None:
    """`TINKEX_<name>`, else `TINKER_<name>`; empty counts as unset."""
    return env.get(f"TINKEX_{name}") or env.get(f"TINKER_{name}") or None


def normalise_url(url: str) -> str:
    """One spelling for each service: lower-case host, no default port, no trailing slash."""
    url = url.strip()
    if url == LOCAL:
        return url
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname or port == -1:
        raise TinkerError(
            f"base_url {url!r} is not an address of a service. "
            "Write http://HOST:PORT or https://HOST/PATH, or 'local' for an embedded server."
        )
    scheme, host = parts.scheme.lower(), parts.hostname.lower()
    if ":" in host:
        host = f"[{host}]"
    if port is not None and port != {"http": 80, "https": 443}[scheme]:
        host = f"{host}:{port}"
    return urlunsplit((scheme, host, parts.path.rstrip("/"), "", ""))


def is_loopback(url: str) -> bool:
    """Whether only this machine can answer: such a server needs no key."""
    host = urlsplit(url).hostname or ""
    if url == LOCAL or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _seconds(name: str, env: Mapping[str, str], default: float) -> float:
    text = setting(name, env)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise TinkerError(f"TINKEX_{name}={text!r} is not a number of seconds above zero.")
    return value


def _checked_key(key: str | None, url: str) -> ApiKey | None:
    if key is None:
        if is_loopback(url):
            return None
        raise TinkerError(
            f"No API key for {url}. Pass api_key=..., set TINKER_API_KEY (or TINKEX_API_KEY), "
            "or store a default key in ~/.tinker/credentials.json."
        )
    # A key from an editor or a shell often ends in a line break, which no header may hold.
    key = key.strip()
    if not key.startswith(("tml-", "eyJ")):
        raise TinkerError(
            "The API key must start with 'tml-' (a key) or 'eyJ' (a JWT); "
            f"the one given has {len(key)} characters and starts with neither. "
            "Check api_key=... and TINKER_API_KEY."
        )
    return ApiKey(key)


def _stored_key(home: Path) -> str | None:
    path = home / ".tinker" / "credentials.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        default = stored.get("default")
        return None if default is None else str(stored["keys"][default]["key"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TinkerError(
            f"{path} cannot be read as stored credentials ({type(error).__name__}). "
            "Mend or delete it, or pass api_key=..."
        ) from error
