"""
Authentication: API keys, tokens that stand for a key, and signed links.

`Authentication` is the middleware in front of all routes; it finds the owner of each request, and
every look-up uses that owner. A server without API keys listens on loopback only, and every request
belongs to the owner `local`. Once a key exists, each request needs a key or a token.

A browser that has signed in to the console sends a cookie instead (`Keys.sign_in`). Browsers add
it to every request, so a change also needs the `Origin` of this server: no other page can cause one.

Links to files carry no key. They are signed for one path until a time:

    signer = Signer(store.secrets[LINKS])
    query = signer.sign("/api/v1/signed/trace/ID", lasts_s=900)    # "expires=...&signature=..."
    signer.verifies(path, expires, signature)                      # in the route behind the link
"""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import jwt
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.api.errors import Refusal, refused, storage_trouble
from tinkex.server.settings import is_loopback
from tinkex.server.store import ApiKey, Keys, StorageError

log = logging.getLogger("tinkex.server.api.auth")

LOCAL_OWNER = "local"
WEIGHTS_TOKEN = "X-Tinker-Weights-Access-Token"

#: The pages of the console, with the names that the hosted console has. They are one and the same
#: HTML file without data.
CONSOLE_PAGES = (
    *("training_runs", "sessions", "checkpoints", "samplers", "playground", "server", "usage"),
    "keys",
)
#: Paths that need no key: they reveal nothing about any owner.
OPEN_PATHS = frozenset(
    {
        *(f"/{page}" for page in CONSOLE_PAGES),
        # Signs in with a key in its body.
        "/api/v1/console/sign_in",
        "/",
        "/readyz",
        "/docs",
        "/openapi.json",
        "/api/v1/healthz",
        "/api/unauthed/auth-config",
    }
)
#: Routes that check something else than a key: the signature of a link, or for local administration
#: the token of the server's file (`api/local.py`).
OWN_CHECK_PREFIXES: tuple[str, ...] = ("/api/v1/signed/", "/api/v1/downloads/", "/api/v1/local/")
OPEN_PREFIXES = ("/console/", *(f"/{page}/" for page in CONSOLE_PAGES))
#: Paths that need no key on a server that only this machine can reach.
LOCAL_PATHS = frozenset({"/metrics"})

# How long a looked-up key is cached: a revoked key is refused after at most this time.
KEY_CACHE_TTL_S = 2.0
# While the database is unavailable, a cached key stays valid for this much longer, because some
# clients do not repeat a poll that was refused. No new requests are accepted during that time.
KEY_CACHE_OUTAGE_TTL_S = 300.0
# How often the last use of a key is written to the database.
LAST_USED_INTERVAL_S = 30.0
# Unknown keys have a cache of their own; otherwise they could fill the cache of valid keys.
MAX_CACHED_KEYS = 10_000
MAX_CACHED_UNKNOWN_KEYS = 1_000
# The body of a refused request is read up to this size; otherwise its sender would see a broken
# connection instead of the response.
MAX_DRAINED_BYTES = 64 * 2**20
# Tokens are parsed before the caller is known, so longer ones are refused without parsing.
MAX_JWT_BYTES = 4096
# Official clients accept tokens whose issuer begins with `passport-`.
ISSUER = "passport-tinkex"
# Before a cookie where credentials are looked up: no header can contain this character.
_COOKIE = "\n"
# A signature of 32 bytes ends with a character that has two unused bits. Versions of PyJWT ignore
# these bits, and padding; refuse other spellings of the same signature.
_ONE_SPELLING = re.compile(r"\.[\w-]{42}[AEIMQUYcgkosw048]\Z", re.ASCII)

GET_KEY = "Ask the administrator of this server for one: `tinkex key create` creates it."


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The owner and key of a request."""

    owner: str
    #: None on a server without keys.
    key_id: int | None = None
    name: str = ""
    project_id: str | None = None
    #: Limits of this key that override the server's.
    limits: Mapping[str, int] = field(default_factory=dict)
    #: Whether the request came with a token or the console's cookie instead of the key.
    by_token: bool = False
    #: Whether it was the cookie, which only the key itself gets.
    by_cookie: bool = False
    #: Whether the key may manage the keys of all owners.
    is_admin: bool = False


LOCAL = Caller(owner=LOCAL_OWNER)


class Authentication:
    """Middleware in front of all routes: finds the caller, or responds with an error."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._local_paths = LOCAL_PATHS if is_loopback(host) else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope["path"]):
            request = HTTPConnection(scope)
            try:
                if scope["path"] in self._local_paths:
                    refuse_cross_site(request.headers)
                else:
                    scope.setdefault("state", {})["caller"] = await find_caller(request)
            except Refusal as refusal:
                await _drain(receive)
                await refused(request, refusal)(scope, receive, send)
                return
            except StorageError as trouble:
                await _drain(receive)
                await storage_trouble(request, trouble)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    """Whether a path needs no key, or checks something else."""
    return path in OPEN_PATHS or path.startswith((*OWN_CHECK_PREFIXES, *OPEN_PREFIXES))


async def find_caller(request: HTTPConnection) -> Caller:
    """The caller by the credentials of a request; a 401 or 403 without valid ones."""
    authenticator = authenticator_of(request)
    credential = _credential(request.headers)
    cookie = None if credential else request.cookies.get(cookie_name(request))
    if cookie and await authenticator.needs_keys():
        if request.scope["method"] not in ("GET", "HEAD"):
            require_own_origin(request)
        return await authenticator.cookie_caller(cookie)
    caller = await authenticator.caller(credential)
    if caller.key_id is None:
        refuse_cross_site(request.headers)
    return caller


def cookie_name(request: HTTPConnection) -> str:
    """The cookie of the console. Servers on other ports of a host share its cookies."""
    return f"tinkex_console_{request.url.port or 'default'}"


def require_own_origin(request: HTTPConnection) -> None:
    """Refuse a change that a page of another site may have caused with a browser's cookie."""
    origin = request.headers.get("origin", "")
    own = {f"{request.url.scheme}://{request.headers.get('host', '')}"}
    if public_url := request.app.state.context.settings.public_url:
        public = urlsplit(public_url)
        own.add(f"{public.scheme}://{public.netloc}")
    if origin not in own:
        raise Refusal(
            403,
            f"a change from the console needs the Origin of this server, and it is "
            f"{origin[:200]!r}. Behind a proxy, start the server with --public-url.",
        )


def _credential(headers: Mapping[str, str]) -> str | None:
    """The key or token of a request: `X-API-Key`, or `Authorization: Bearer` as OpenAI's clients."""
    if key := headers.get("x-api-key"):
        return key
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def refuse_cross_site(headers: Mapping[str, str]) -> None:
    """
    Refuse web pages of other sites on a server without keys.

    Such a server accepts every request from this machine. A web page that runs in a browser on this
    machine must not get that access. `Origin` shows the site of the page; `Host` shows it if the
    site's own name resolves to this machine (DNS rebinding). A page without a site, such as a local
    file or a sandboxed frame, sends the origin `null`.
    """
    for name, url in (("Host", f"//{headers.get('host', '')}"), ("Origin", headers.get("origin"))):
        try:
            site = (urlsplit(url).hostname or url.strip("/")) if url else None
        except ValueError:
            site = url
        if site and not is_loopback(site):
            raise Refusal(
                403,
                "a server without keys accepts requests from this machine only, and the header "
                f"{name} is {site[:200]!r}. Use http://127.0.0.1 or localhost, or create a key "
                "with `tinkex key create`.",
            )


async def _drain(receive: Receive) -> None:
    """Read the rest of a body that is refused."""
    left = MAX_DRAINED_BYTES
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def authenticator_of(request: HTTPConnection) -> "Authenticator":
    authenticator: Authenticator = request.app.state.authenticator
    return authenticator


def caller_of(request: HTTPConnection) -> Caller:
    """The caller that the middleware found."""
    caller: Caller = request.state.caller
    return caller


def owner_of(request: HTTPConnection) -> str:
    return caller_of(request).owner


async def reader_owners(request: HTTPConnection, token: str | None = None) -> tuple[str, ...]:
    """
    The owners whose checkpoints this request may read: its own, and one who shared a key with it.

    The shared key is in the body or in the header `X-Tinker-Weights-Access-Token`. It gives this
    one request read access, and nothing more.
    """
    own = owner_of(request)
    token = token or request.headers.get(WEIGHTS_TOKEN)
    if not token:
        return (own,)
    shared = await authenticator_of(request).shared_key_caller(token)
    return (own,) if shared.owner == own else (own, shared.owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class _CachedLookup:
    """The result of looking up a credential."""

    #: By the monotonic clock: setting the system clock back must not extend it.
    until_s: float
    #: None when the credential is not valid; then `problem` says why.
    caller: Caller | None
    problem: str
    #: When the key or token itself expires, by the system clock.
    expires_s: float = float("inf")

    def is_valid(self, now_s: float, moment_s: float, *, longer_s: float = 0.0) -> bool:
        """Whether neither this entry nor the key itself has expired."""
        return now_s < self.until_s + longer_s and moment_s < self.expires_s


class Authenticator:
    """Finds the caller of a credential, with a short cache."""

    def __init__(
        self,
        keys: Keys,
        tokens: "Tokens",
        *,
        clock: Callable[[], float] = time.monotonic,
        moment: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self.tokens = tokens
        #: The monotonic clock, for the age of cache entries.
        self._clock = clock
        #: The system clock, for the expiry of keys and tokens.
        self._moment = moment
        self._callers: dict[bytes, _CachedLookup] = {}
        self._refused: dict[bytes, _CachedLookup] = {}
        #: When the last use of each key was written.
        self._last_used: dict[int, float] = {}
        self._needs_keys = False
        self._checked_s = float("-inf")
        #: Whether the database was read successfully once. Before that, all requests are refused,
        #: because keys may exist.
        self._checked = False

    async def needs_keys(self) -> bool:
        """Whether a key was ever created. A key created while the server runs is noticed soon."""
        now_s = self._clock()
        due = now_s - self._checked_s >= KEY_CACHE_TTL_S or not self._checked
        if due and not self._needs_keys:
            self._checked_s = now_s
            try:
                self._needs_keys = await self._keys.any() or self._needs_keys
                self._checked = True
            except StorageError:
                if not self._checked:
                    raise
        return self._needs_keys

    async def caller(self, credential: str | None) -> Caller:
        """The caller of a request; raises a 401 with advice for an invalid credential."""
        if not (self._needs_keys or await self.needs_keys()):
            return LOCAL
        if not credential:
            raise Refusal(
                401,
                "this server needs an API key, and the request came without one. Set "
                f"TINKER_API_KEY, or pass api_key. {GET_KEY}",
            )
        return await self._cached_caller(credential, "the API key")

    async def cookie_caller(self, cookie: str) -> Caller:
        """The caller of the console's cookie; a 401 if it has ended, or its key has."""
        return await self._cached_caller(f"{_COOKIE}{cookie}", "the key of this browser")

    async def key_to_sign_in(self, secret: str) -> ApiKey:
        """The key with which a person signs in to the console; raises a 401."""
        key = await self._keys.by_secret(secret)
        if key is None:
            raise Refusal(401, f"this key is not known on this server. {GET_KEY}")
        if (state := key.state(self._moment())) != "active":
            raise Refusal(401, f"the key {key.hint}… ({key.name or key.owner}) is {state}.")
        return key

    async def shared_key_caller(self, token: str) -> Caller:
        """The caller of a key that another owner shared for reading; a 403 if it is not valid."""
        if not await self.needs_keys():
            return LOCAL
        try:
            return await self._cached_caller(token, "the weights access token")
        except Refusal as refusal:
            raise Refusal(403, refusal.detail) from None

    def forget(self) -> None:
        """Clear the cache after a change of keys."""
        self._callers.clear()
        self._refused.clear()

    async def _cached_caller(self, credential: str, what: str) -> Caller:
        # The cache contains no secrets.
        digest = hashlib.sha256(credential.encode(errors="surrogateescape")).digest()
        now_s, moment_s = self._clock(), self._moment()
        found = self._callers.get(digest) or self._refused.get(digest)
        if found is None or not found.is_valid(now_s, moment_s):
            try:
                found = await self._look_up(credential, now_s, moment_s)
            except StorageError:
                if found is None or found.caller is None:
                    raise
                if not found.is_valid(now_s, moment_s, longer_s=KEY_CACHE_OUTAGE_TTL_S):
                    raise
            else:
                self._remember(digest, found)
        if found.caller is None:
            raise Refusal(401, f"{what} {found.problem}. {GET_KEY}")
        return found.caller

    def _remember(self, digest: bytes, found: _CachedLookup) -> None:
        """Add an entry; evict the oldest one of a full cache."""
        for cache in (self._callers, self._refused):
            cache.pop(digest, None)
        cache, max_size = (
            (self._callers, MAX_CACHED_KEYS)
            if found.caller is not None
            else (self._refused, MAX_CACHED_UNKNOWN_KEYS)
        )
        cache[digest] = found
        if len(cache) > max_size:
            del cache[next(iter(cache))]

    async def _look_up(self, credential: str, now_s: float, moment_s: float) -> _CachedLookup:
        until_s, expires_s = now_s + KEY_CACHE_TTL_S, float("inf")
        is_cookie = credential.startswith(_COOKIE)
        by_token = is_cookie or credential.startswith("eyJ")
        if is_cookie:
            key = await self._keys.by_cookie(credential.removeprefix(_COOKIE))
            if key is None:
                problem = "was signed out, or signed in more than a week ago. Sign in again"
                return _CachedLookup(until_s=until_s, caller=None, problem=problem)
        elif by_token:
            try:
                claims = self.tokens.read(credential, now_s=moment_s)
            except BadToken as bad:
                return _CachedLookup(until_s=until_s, caller=None, problem=f"is a token, and {bad}")
            expires_s = claims["exp"]
            key = await self._keys.by_id(int(claims.get("key_id") or 0))
        else:
            key = await self._keys.by_secret(credential)
        if key is None:
            problem = "is not known on this server. It may belong to another one"
            return _CachedLookup(until_s=until_s, caller=None, problem=problem)
        if (state := key.state(moment_s)) != "active":
            problem = f"{key.hint}… ({key.name or key.owner}) is {state}"
            return _CachedLookup(until_s=until_s, caller=None, problem=problem)
        self._write_last_used(key, now_s)
        expires_s = min(expires_s, key.expires_s or expires_s)
        caller = _caller_for(key, by_token=by_token, by_cookie=is_cookie)
        return _CachedLookup(until_s=until_s, caller=caller, problem="", expires_s=expires_s)

    def _write_last_used(self, key: ApiKey, now_s: float) -> None:
        if now_s - self._last_used.get(key.key_id, float("-inf")) >= LAST_USED_INTERVAL_S:
            if len(self._last_used) >= MAX_CACHED_KEYS:
                self._last_used.clear()  # costs one extra write per key
            self._last_used[key.key_id] = now_s
            self._keys.mark_used(key.key_id)


def _caller_for(key: ApiKey, *, by_token: bool, by_cookie: bool) -> Caller:
    return Caller(
        owner=key.owner,
        key_id=key.key_id,
        name=key.name,
        project_id=key.project_id,
        limits=key.limits,
        by_token=by_token,
        by_cookie=by_cookie,
        is_admin=key.is_admin,
    )


class BadToken(Exception):
    """A token that this server did not sign, or that was changed or has expired."""


class Tokens:
    """
    JSON web tokens (HS256 only) that stand for a key until they expire.

    With a new secret (`store.server_secrets`) all tokens are invalid, and clients exchange their keys
    for new ones.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, claims: Mapping[str, Any]) -> str:
        return jwt.encode({"iss": ISSUER, **claims}, self._secret, algorithm="HS256")

    def read(self, token: str, *, now_s: float) -> dict[str, Any]:
        """The claims of a valid token; raises BadToken."""
        if len(token) > MAX_JWT_BYTES or token.count(".") != 2 or not token.isascii():
            raise BadToken("it is not a token")
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=["HS256"],
                issuer=ISSUER,
                # The caller's clock decides about `exp`. A clock that was set back must not refuse
                # new tokens, so `iat` is not compared.
                options={"require": ["exp"], "verify_exp": False, "verify_iat": False},
            )
        except jwt.PyJWTError:
            claims = None
        if claims is None or not _ONE_SPELLING.search(token):
            raise BadToken("it was not signed by this server")
        if claims["exp"] <= now_s:
            raise BadToken("it has expired")
        return claims


class Signer:
    """Signs paths with an HMAC key. Other query parameters are not covered by the signature."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def sign(self, path: str, *, lasts_s: float) -> str:
        """The query string that makes this path a valid link for `lasts_s` seconds."""
        expires_s = int(time.time() + lasts_s)
        return f"expires={expires_s}&signature={self._signature(path, expires_s)}"

    def verifies(self, path: str, expires: str, signature: str) -> bool:
        """Whether this server signed the link and it has not expired; compares in constant time."""
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            return False
        expected = self._signature(path, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode()) and (
            int(expires) > time.time()
        )

    def _signature(self, path: str, expires_s: int) -> str:
        signed = f"{expires_s}\n{path}".encode()
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()
