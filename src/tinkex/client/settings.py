"""Client settings: one frozen object, resolved once from arguments, environment and files."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit, urlunsplit

from tinkex.client.auth import credentials, key_store
from tinkex.client.auth.credentials import ApiKey, Credential
from tinkex.client.errors import TinkerError
from tinkex.client.http.circuit_breaker import BreakerPolicy
from tinkex.client.http.transport import proxy_for, proxy_variables
from tinkex.local import profiles, registry
from tinkex.local.registry import RunningServer

__all__ = [
    "ApiKey",
    "Settings",
    "is_loopback",
    "named_url",
    "normalize_url",
    "service_url",
    "setting",
]

log = logging.getLogger("tinkex.settings")

#: The supported protocol version; servers adapt to it.
PROTOCOL_VERSION = "0.36.0"
DEFAULT_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
#: What is sent to a server without keys: any text that looks like a key.
ANY_KEY = "tml-local"
NO_SERVICE = (
    "No service is named, there is no API key, and no tinkex server of this user runs on this "
    'machine. Do one of these: start a server with `tinkex serve`; pass base_url="local" '
    "(`--base-url local`), which starts one; name one with base_url=..., TINKER_BASE_URL or "
    "`tinkex use URL`; or use the hosted service with TINKER_API_KEY or `tinkex auth login`."
)

_TRUE = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    All settings of a client. In order of precedence: arguments, environment, files, defaults.

        settings = tinkex.Settings.resolve(base_url="local", first_contact_s=5)
        service = tinkex.ServiceClient(settings=settings)

    `resolve` reads the environment once.
    """

    #: Service root without a trailing slash, or "local" for a server on this machine. If no service
    #: and no key is named, a running server of this user is used.
    base_url: str = DEFAULT_URL
    #: The key or token to send. Defaults to the stored one if neither a key nor a command is given.
    api_key: ApiKey | None = None
    #: Shell command that prints a credential. May contain secrets, so it is not printed.
    credential_cmd: str | None = field(default=None, repr=False)
    #: Time limit of that command in seconds.
    credential_cmd_s: float = 30.0
    #: Project of new sessions, and of copies of weights.
    project_id: str | None = None
    #: Tags of new sessions, in order.
    tags: tuple[str, ...] = ()
    #: Names for `SamplingClient.feature_gates`; not used otherwise.
    feature_gates: tuple[str, ...] = ("async_sampling",)
    #: Extra headers on every request; they win over the client's own. May contain secrets, so they
    #: are not printed.
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: HTTP proxy for this service. May contain a password, so it is not printed.
    proxy: str | None = field(default=None, repr=False)
    #: PEM file with the certificates to trust instead of those of the system.
    ca_bundle: str | None = None
    #: Whether the client reports sessions and kinds of errors to the service.
    telemetry: bool = True
    #: Seconds after which a server that has never responded is given up.
    first_contact_s: float = 30.0
    #: Seconds for which a request to a server that responded before is retried.
    give_up_s: float = 300.0
    #: Seconds for which a result is polled while the server cannot be reached.
    reconnect_s: float = 3600.0
    #: Seconds after which a wait is logged as a warning; None (`off`) says nothing.
    wait_notice_s: float | None = 3.0
    #: Circuit breaker: fail immediately while a service keeps failing; None always retries.
    breaker: BreakerPolicy | None = None
    #: Spans and metrics for OpenTelemetry, and `traceparent` on requests (extra `otel`).
    otel: bool = False
    #: Proxy variables at the time of `resolve`, for other hosts that the service links to.
    _proxy_env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    #: The running server that `resolve` found, if no service was named.
    _found: RunningServer | None = field(default=None, repr=False, compare=False)

    @classmethod
    def resolve(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        credential_cmd: str | None = None,
        credential_cmd_s: float | None = None,
        project_id: str | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        telemetry: bool | None = None,
        first_contact_s: float | None = None,
        give_up_s: float | None = None,
        reconnect_s: float | None = None,
        wait_notice_s: float | None = None,
        breaker: BreakerPolicy | None = None,
        otel: bool | None = None,
        env: Mapping[str, str] = os.environ,
        home: Path | None = None,
    ) -> Settings:
        """
        Resolve each setting: argument, else environment, else file, else default.

        Args:
            base_url: Address of the service, or `"local"`.
            api_key: Key of the service.
            credential_cmd: Shell command that prints a key.
            credential_cmd_s: Its time limit in seconds.
            project_id: Project of new sessions, and of copies of weights.
            tags: Tags of new sessions.
            headers: Headers for every request; they win over the client's own.
            proxy: HTTP proxy for the service.
            ca_bundle: PEM file with the certificates to trust.
            telemetry: Whether to report sessions and kinds of errors to the service.
            first_contact_s: Seconds after which a server that never responded is given up.
            give_up_s: Seconds for which a request is retried.
            reconnect_s: Seconds for which a result is polled while the server cannot be reached.
            wait_notice_s: Seconds of waiting after which a warning says what for; 0: never.
            breaker: When to fail immediately; None: always retry.
            otel: Whether to create spans and metrics for OpenTelemetry.
            env: The environment to read.
            home: The home folder, which has the file of keys.

        Returns:
            The settings.

        Raises:
            TinkerError: A setting that cannot be used, or no key for a service on another machine.

        Example:
            settings = tinkex.Settings.resolve(base_url="http://127.0.0.1:8000", give_up_s=60)
        """
        named = named_url(base_url, env, home)
        # A key from an editor or a shell often ends in a line break, which a header cannot contain.
        given = (api_key or setting("API_KEY", env) or "").strip()
        command = credential_cmd or setting("CREDENTIAL_CMD", env)
        key = ApiKey(given) if given else None
        found = None
        if named is None and not (key or command or headers or _stored_key(DEFAULT_URL, home)):
            found = _find_server(env, home)
        url = found.url if found else service_url(named, env)
        if url == LOCAL:
            # A key in the environment belongs to another service.
            key, command = (ApiKey(api_key.strip()) if api_key else None), credential_cmd
        elif found is not None:
            key = _key_for_found(found, home)
        elif key is None and command is None:
            key = _stored_key(url, home)
        cloudflare = {
            header: env[name]
            for header, name in (
                ("CF-Access-Client-Id", "CLOUDFLARE_ACCESS_CLIENT_ID"),
                ("CF-Access-Client-Secret", "CLOUDFLARE_ACCESS_CLIENT_SECRET"),
            )
            if env.get(name) and found is None
        }
        settings = cls(
            base_url=url,
            api_key=key,
            credential_cmd=command,
            credential_cmd_s=_seconds("CREDENTIAL_CMD_S", credential_cmd_s, env, 30.0),
            project_id=project_id or setting("PROJECT_ID", env),
            tags=_names(tags if tags is not None else setting("TAGS", env)),
            feature_gates=_names(setting("FEATURE_GATES", env)) or cls.feature_gates,
            headers=MappingProxyType({**cloudflare, **(headers or {})}),
            proxy=proxy or _proxy_from(env, url),
            ca_bundle=ca_bundle or setting("CA_BUNDLE", env) or env.get("SSL_CERT_FILE") or None,
            telemetry=(setting("TELEMETRY", env) or "1").lower() in _TRUE
            if telemetry is None
            else telemetry,
            first_contact_s=_seconds("FIRST_CONTACT_S", first_contact_s, env, 30.0),
            give_up_s=_seconds("GIVE_UP_S", give_up_s, env, 300.0),
            reconnect_s=_seconds("RECONNECT_S", reconnect_s, env, 3600.0),
            wait_notice_s=_seconds_or_off("WAIT_NOTICE_S", wait_notice_s, env, 3.0),
            breaker=breaker or BreakerPolicy.parse(setting("BREAKER", env) or "off"),
            otel=(setting("OTEL", env) or "0").lower() in _TRUE if otel is None else otel,
            # An explicit proxy is used for all hosts, whatever the environment says.
            _proxy_env=() if proxy else tuple(proxy_variables(env).items()),
            _found=found,
        )
        settings.credential()  # raises now if the key is missing or malformed
        return settings

    def credential(self, *, enforce_cmd: bool = False) -> Credential:
        """
        The source of `X-API-Key`, before any exchange for a token.

        Args:
            enforce_cmd: Whether a command is used although there is a key.

        Returns:
            The key, or the command that prints it.

        Raises:
            TinkerError: A service on another machine, and no key for it.

        Example:
            credential = tinkex.Settings(base_url="http://127.0.0.1:8000").credential()
        """
        found = credentials.resolve(
            self.api_key,
            self.credential_cmd,
            service=self.base_url,
            needed=not is_loopback(self.base_url),
            enforce_cmd=enforce_cmd,
        )
        if isinstance(found, credentials.Command):
            return credentials.CommandCredential(found, limit_s=self.credential_cmd_s)
        return credentials.StaticCredential(found)

    def for_local_server(self, server: RunningServer | None) -> Settings:
        """
        These settings with the key for the server of `base_url="local"`.

        Args:
            server: The server; None: one that is to be started.

        Returns:
            The settings to connect with.

        Example:
            settings = tinkex.Settings(base_url="local").for_local_server(None)
        """
        if server is None or not server.keys:
            return replace(self, api_key=ApiKey(ANY_KEY), credential_cmd=None)
        if self.api_key is not None or self.credential_cmd is not None:
            return self
        return replace(self, api_key=_key_for_found(server, None))

    def proxy_to(self, url: str) -> str | None:
        """
        The proxy for an address that the service links to, possibly on another host.

        Args:
            url: The address.

        Returns:
            The address of the proxy; None: a direct connection.

        Example:
            settings = tinkex.Settings.resolve(base_url="http://127.0.0.1:8000")
            proxy = settings.proxy_to("http://host/file")
        """
        env = dict(self._proxy_env)
        if self.proxy != _proxy_from(env, self.base_url):
            return self.proxy  # it was passed explicitly
        return _proxy_from(env, url)

    @property
    def limits_key(self) -> tuple[str, str]:
        """Identifies what shares limits: the same service with the same credential."""
        if self.api_key is not None:
            return self.base_url, self.api_key.digest
        if self.credential_cmd is not None:
            return self.base_url, hashlib.sha256(self.credential_cmd.encode()).hexdigest()
        return self.base_url, ""


def setting(name: str, env: Mapping[str, str]) -> str | None:
    """`TINKEX_<name>`, else `TINKER_<name>`; empty counts as unset."""
    return env.get(f"TINKEX_{name}") or env.get(f"TINKER_{name}") or None


def service_url(given: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The address of the named service, else of the hosted one; normalized."""
    url = named_url(given, env, None)
    if not url:
        _log_default_service()
    return normalize_url(url or DEFAULT_URL)


def named_url(
    given: str | None, env: Mapping[str, str] = os.environ, home: Path | None = None
) -> str | None:
    """The address that an argument, the environment or a profile names."""
    if url := given or setting("BASE_URL", env):
        return url
    try:
        return profiles.current_url(env, home)
    except profiles.BadProfiles as error:
        raise TinkerError(str(error)) from error


def _find_server(env: Mapping[str, str], home: Path | None) -> RunningServer:
    """The running server of this user. TinkerError if there is none, or no obvious one."""
    try:
        found = registry.choose(registry.running(env, home), registry.data_folder(env))
    except registry.SeveralServers as several:
        listed = "; ".join(f"{one.url} (data folder {one.data})" for one in several.servers)
        raise TinkerError(
            f"Several tinkex servers of this user run on this machine: {listed}. Choose one with "
            "base_url=..., --base-url, TINKER_BASE_URL or `tinkex use URL`."
        ) from None
    if found is None:
        raise TinkerError(NO_SERVICE)
    if not found.ready:
        raise TinkerError(not_ready(found))
    log.info(
        "no service is named: using the server of this user at %s (process %d, data folder %s)",
        found.url,
        found.pid,
        found.data,
    )
    return found


def not_ready(server: RunningServer) -> str:
    """The error for a server that was found and still starts."""
    return (
        f"The tinkex server of this user at {server.url} (process {server.pid}) is starting and not "
        "ready yet. Try again when it is; `tinkex status` shows what it waits for."
    )


def _key_for_found(server: RunningServer, home: Path | None) -> ApiKey:
    """Only a key that was stored for this very server; never one of another service."""
    if not server.keys:
        return ApiKey(ANY_KEY)
    stored = key_store.read(key_store.default_path(home))
    for one in stored.keys.values():
        if one.base_url == server.url:
            return one.key
    raise TinkerError(
        f"The tinkex server at {server.url} needs a key, and none is stored for it. Store one with "
        f"`tinkex auth login --base-url {server.url}`, or pass base_url and api_key. On the "
        f"server's machine, `tinkex key create` makes a key."
    )


@functools.cache
def _log_default_service() -> None:
    """Logged once: without base_url, data for one's own server would go to the default service."""
    host = urlsplit(DEFAULT_URL).hostname
    log.info("base_url is not given and TINKER_BASE_URL is not set: requests go to %s", host)


def normalize_url(url: str) -> str:
    """One spelling for each service: lower-case host, no default port, no trailing slash."""
    url = url.strip()
    if url == LOCAL:
        return url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if "@" in parts.netloc:  # not quoted: addresses appear in logs, handles and errors
        raise TinkerError(
            "base_url contains a user name or password. Remove them, and send them as "
            "default_headers_overrides={'Authorization': 'Basic ...'}."
        )
    if parts.scheme.lower() not in ("http", "https") or not parts.hostname:
        raise TinkerError(
            f"base_url {url!r} is not the address of a service. "
            "Use http://HOST:PORT or https://HOST/PATH, or 'local' for an embedded server."
        )
    scheme, host = parts.scheme.lower(), parts.hostname.lower()
    if ":" in host:
        host = f"[{host}]"
    if port is not None and port != {"http": 80, "https": 443}[scheme]:
        host = f"{host}:{port}"
    return urlunsplit((scheme, host, parts.path.rstrip("/"), "", ""))


def is_loopback(url: str) -> bool:
    """Whether the address is on this machine: such a server needs no key."""
    host = urlsplit(url).hostname or ""
    if url == LOCAL or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy_from(env: Mapping[str, str], url: str) -> str | None:
    # No proxy for loopback addresses.
    return None if is_loopback(url) else proxy_for(url, env)


def _seconds(name: str, given: float | None, env: Mapping[str, str], default: float) -> float:
    text = setting(name, env) if given is None else None
    found: object = given if text is None else text
    if found is None:
        return default
    where = f"TINKEX_{name}" if given is None else name.lower()
    try:
        value = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = -1.0
    if not value > 0:
        raise TinkerError(f"{where}={found!r} is not a number of seconds above zero.")
    return value


def _seconds_or_off(
    name: str, given: float | None, env: Mapping[str, str], default: float
) -> float | None:
    """`off` (or 0) is None; as an argument, 0."""
    text = setting(name, env) if given is None else None
    if given == 0 or (text or "").strip().lower() in _OFF:
        return None
    return _seconds(name, given, env, default)


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names in order, stripped, without duplicates."""
    parts = given.split(",") if isinstance(given, str) else given or ()
    return tuple(dict.fromkeys(name for name in map(str.strip, parts) if name))


def _stored_key(url: str, home: Path | None) -> ApiKey | None:
    if url == LOCAL:
        return None
    stored = key_store.read(key_store.default_path(home))
    # A key stored without a service is never sent to a server on this machine.
    key_id = stored.key_for(url, is_local=is_loopback(url))
    return None if key_id is None else stored.keys[key_id].key
