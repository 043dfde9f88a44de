"""
Links that open one thing until a time, for whoever holds them: no key travels with them.

    signer = Signer.of_folder(settings.folder)
    query = signer.sign("/api/v1/signed/trace/ID", lasts_s=900)    # "expires=...&signature=..."
    signer.opens(path, expires, signature)                         # in the route that answers it
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.server.api.errors import Refusal, storage_trouble, told
from tinkex.server.settings import is_loopback
from tinkex.server.store import ApiKey, Keys, StorageError

log = logging.getLogger("tinkex.server.api.auth")

LINK_KEY_FILE = "signing.key"
KEY_BYTES = 32


class Signer:
    """Signs paths with a key of this server. Query parts other than the two are not covered."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """With the key of a data folder, made there the first time; links outlive a restart."""
        return cls(folder_key(folder))

    def sign(self, path: str, *, lasts_s: float) -> str:
        """The query that makes this path a link for so many seconds."""
        expires_s = int(time.time() + lasts_s)
        return f"expires={expires_s}&signature={self._signature(path, expires_s)}"

    def opens(self, path: str, expires: str, signature: str) -> bool:
        """Whether a link was made here and has not run out; takes as long for a near miss."""
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            return False
        expected = self._signature(path, int(expires))
        return hmac.compare_digest(expected.encode(), signature.encode()) and (
            int(expires) > time.time()
        )

    def _signature(self, path: str, expires_s: int) -> str:
        signed = f"{expires_s}\n{path}".encode()
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def folder_key(folder: Path, name: str = LINK_KEY_FILE) -> bytes:
    """The secret of a data folder, readable by its owner alone; made when it is not there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / name
    with contextlib.suppress(FileNotFoundError):
        if len(found := file.read_bytes()) >= KEY_BYTES:
            return found
        # With an empty key anybody could sign. Links and tokens of the old one are over.
        log.error("%s was cut short and is made anew; who has a token fetches another", file)
        file.unlink()
    part = folder / f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as written:
        written.write(secrets.token_bytes(KEY_BYTES))
        written.flush()
        os.fsync(written.fileno())
    try:
        # Whole or not at all, and the first of two wins.
        os.link(part, file)
    except FileExistsError:
        pass
    finally:
        part.unlink()
    return file.read_bytes()


# MERGED: Tokens that stand for a key for a while: JSON web tokens, signed and known again by this server. The secret is a file of the data folder, readable by its owner alone. Deleting it, and starting again, makes every token worthless; clients fetch new ones for their keys.


TOKEN_KEY_FILE = "tokens.key"
# Tokens are read before anybody is known: no more than this is looked at.
LONGEST_TOKEN = 4096


class BadToken(Exception):
    """Not signed here, changed, or over."""


class Tokens:
    """HS256, and nothing else: what a token says about its own algorithm is not asked."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        return cls(folder_key(folder, TOKEN_KEY_FILE))

    def make(self, claims: Mapping[str, Any]) -> str:
        head = _encode(b'{"alg":"HS256","typ":"JWT"}')
        body = _encode(json.dumps(dict(claims), separators=(",", ":")).encode())
        return f"{head}.{body}.{self._signature(head, body)}"

    def read(self, token: str, *, now_s: float) -> dict[str, Any]:
        """What one of our own tokens says, while it lasts."""
        parts = token.split(".")
        if len(token) > LONGEST_TOKEN or len(parts) != 3 or not token.isascii():
            raise BadToken("it is not a token")
        head, body, signature = parts
        if not hmac.compare_digest(self._signature(head, body), signature):
            raise BadToken("it was not signed by this server")
        try:
            claims: dict[str, Any] = json.loads(_decode(body))
        except (ValueError, binascii.Error):
            raise BadToken("it is not a token") from None
        if claims["exp"] <= now_s:
            raise BadToken("it has expired")
        return claims

    def _signature(self, head: str, body: str) -> str:
        return _encode(hmac.new(self._secret, f"{head}.{body}".encode(), hashlib.sha256).digest())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


# MERGED: Who asks. Every request passes here before any route, and every look-up uses the owner found here. A server that never had a key is bound to loopback, and everybody on the machine is the owner `local`. Once there is a key, each request needs one, or a token that was given for one.


LOCAL_OWNER = "local"
WEIGHTS_TOKEN = "X-Tinker-Weights-Access-Token"

#: What needs no key: it says nothing of anybody, or carries a signature of its own.
OPEN_PATHS = frozenset({"/api/v1/healthz", "/api/unauthed/auth-config", "/docs", "/openapi.json"})
#: Below these, a path is its own permission: links that the server signed.
SIGNED_PREFIXES: tuple[str, ...] = ("/api/v1/signed/", "/api/v1/downloads/")
#: Needs no key where only this machine can ask.
LOCAL_PATHS = frozenset({"/metrics"})

# How long an answer of the database is believed: a revoked key opens nothing after this.
BELIEVED_S = 2.0
# While the database cannot be asked, a key that was good is good for this much longer: polls that
# are refused once are not sent again by some clients. Nothing new is taken in meanwhile.
BELIEVED_AWAY_S = 300.0
# When a key was last used is noted this often.
NOTED_S = 30.0
# Credentials that were found good. Those of strangers have a memory of their own, or anybody could
# fill this one.
MOST_CACHED = 10_000
MOST_REFUSED_CACHED = 1_000
# A refused body is read to its end up to here, or its sender would see a broken connection.
MOST_SWALLOWED = 64 * 2**20

ASK = "Ask whoever runs this server for one: `tinkex key create` makes it."


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who is behind a request."""

    owner: str
    #: None on a server without keys.
    key_id: int | None = None
    name: str = ""
    project_id: str | None = None
    #: Limits of this key that differ from the server's.
    limits: Mapping[str, int] = field(default_factory=dict)
    #: The request came with a token instead of the key.
    by_token: bool = False


LOCAL = Caller(owner=LOCAL_OWNER)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What was found for a credential, and until when that is believed."""

    #: By the monotonic clock: a system clock that is set back must not make it last longer.
    until_s: float
    caller: Caller | None
    problem: str
    #: When the key, or the token for it, ends by itself; a moment of the system clock.
    ends_s: float = float("inf")

    def lasts(self, now_s: float, moment_s: float, *, longer_s: float = 0.0) -> bool:
        """Whether it is still believed: by its age, and because it has not ended by itself."""
        return now_s < self.until_s + longer_s and moment_s < self.ends_s


class Gate:
    """From credentials to callers, with a short memory."""

    def __init__(
        self,
        keys: Keys,
        tokens: Tokens,
        *,
        clock: Callable[[], float] = time.monotonic,
        moment: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self.tokens = tokens
        #: How old something is.
        self._clock = clock
        #: Whether a key or a token has expired.
        self._moment = moment
        self._callers: dict[bytes, _Known] = {}
        self._refused: dict[bytes, _Known] = {}
        self._noted: dict[int, float] = {}
        self._needs_keys = False
        self._asked_s = float("-inf")
        #: The database has said once whether there is a key: only then nobody may be believed.
        self._told = False

    async def needs_keys(self) -> bool:
        """Whether there ever was a key. One that is made while the server runs counts soon."""
        now_s = self._clock()
        due = now_s - self._asked_s >= BELIEVED_S or not self._told
        if due and not self._needs_keys:
            self._asked_s = now_s
            try:
                self._needs_keys = await self._keys.any() or self._needs_keys
                self._told = True
            except StorageError:
                if not self._told:
                    raise
        return self._needs_keys

    async def caller(self, credential: str | None) -> Caller:
        """Who this is; a 401 that says what to do when that is nobody."""
        if not (self._needs_keys or await self.needs_keys()):
            return LOCAL
        if not credential:
            raise Refusal(
                401,
                "this server needs an API key, and the request came without one. Set "
                f"TINKER_API_KEY, or pass api_key. {ASK}",
            )
        return await self._known_caller(credential, "the API key")

    async def foreign(self, token: str) -> Caller:
        """Who lends a right to read; a 403 when nobody does."""
        if not await self.needs_keys():
            return LOCAL
        try:
            return await self._known_caller(token, "the weights access token")
        except Refusal as refusal:
            raise Refusal(403, refusal.detail) from None

    def forget(self) -> None:
        """Something about keys has changed here."""
        self._callers.clear()
        self._refused.clear()

    async def _known_caller(self, credential: str, what: str) -> Caller:
        # The memory holds no secrets.
        digest = hashlib.sha256(credential.encode(errors="surrogateescape")).digest()
        now_s, moment_s = self._clock(), self._moment()
        known = self._callers.get(digest) or self._refused.get(digest)
        if known is None or not known.lasts(now_s, moment_s):
            try:
                known = await self._look_up(credential, now_s, moment_s)
            except StorageError:
                if known is None or known.caller is None:
                    raise
                if not known.lasts(now_s, moment_s, longer_s=BELIEVED_AWAY_S):
                    raise
            else:
                self._remember(digest, known)
        if known.caller is None:
            raise Refusal(401, f"{what} {known.problem}. {ASK}")
        return known.caller

    def _remember(self, digest: bytes, known: _Known) -> None:
        """The oldest make room."""
        for memory in (self._callers, self._refused):
            memory.pop(digest, None)
        is_good = known.caller is not None
        memory, most = (
            (self._callers, MOST_CACHED) if is_good else (self._refused, MOST_REFUSED_CACHED)
        )
        memory[digest] = known
        if len(memory) > most:
            del memory[next(iter(memory))]

    async def _look_up(self, credential: str, now_s: float, moment_s: float) -> _Known:
        until_s, ends_s = now_s + BELIEVED_S, float("inf")
        by_token = credential.startswith("eyJ")
        if by_token:
            try:
                claims = self.tokens.read(credential, now_s=moment_s)
            except BadToken as bad:
                return _Known(until_s=until_s, caller=None, problem=f"is a token, and {bad}")
            ends_s = claims["exp"]
            key = await self._keys.by_id(int(claims.get("key_id") or 0))
        else:
            key = await self._keys.by_secret(credential)
        if key is None:
            problem = "is not known on this server. It may belong to another one"
            return _Known(until_s=until_s, caller=None, problem=problem)
        if (state := key.state(moment_s)) != "active":
            problem = f"{key.hint}… ({key.name or key.owner}) is {state}"
            return _Known(until_s=until_s, caller=None, problem=problem)
        self._note(key, now_s)
        ends_s = min(ends_s, key.expires_s or ends_s)
        caller = _caller(key, by_token=by_token)
        return _Known(until_s=until_s, caller=caller, problem="", ends_s=ends_s)

    def _note(self, key: ApiKey, now_s: float) -> None:
        if now_s - self._noted.get(key.key_id, float("-inf")) >= NOTED_S:
            if len(self._noted) >= MOST_CACHED:
                self._noted.clear()  # each is noted once more than needed
            self._noted[key.key_id] = now_s
            self._keys.mark_used(key.key_id)


def _caller(key: ApiKey, *, by_token: bool) -> Caller:
    return Caller(
        owner=key.owner,
        key_id=key.key_id,
        name=key.name,
        project_id=key.project_id,
        limits=key.limits,
        by_token=by_token,
    )


class Authentication:
    """In front of every route: a request that gets past it has a caller."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._local_paths = LOCAL_PATHS if is_loopback(host) else frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            request = HTTPConnection(scope)
            try:
                if scope["path"] in self._local_paths:
                    refuse_other_sites(request.headers)
                else:
                    scope.setdefault("state", {})["caller"] = await _caller_of(request)
            except Refusal as refusal:
                await _swallow(receive)
                await told({"detail": refusal.detail}, refusal.status)(scope, receive, send)
                return
            except StorageError as trouble:
                await _swallow(receive)
                await storage_trouble(request, trouble)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(SIGNED_PREFIXES)


async def _caller_of(request: HTTPConnection) -> Caller:
    caller = await gate_of(request).caller(request.headers.get("x-api-key"))
    if caller.key_id is None:
        refuse_other_sites(request.headers)
    return caller


def refuse_other_sites(headers: Mapping[str, str]) -> None:
    """
    Without keys, being on this machine is the permission; a web page in its browser is not.

    A page of another site says so in `Origin`, and one that had its own name pointed here says
    so in `Host`. A page without a site, such as a file or a frame in a sandbox, says `null`.
    """
    for name, url in (("Host", f"//{headers.get('host', '')}"), ("Origin", headers.get("origin"))):
        try:
            site = (urlsplit(url).hostname or url.strip("/")) if url else None
        except ValueError:
            site = url
        if site and not is_loopback(site):
            raise Refusal(
                403,
                f"without a key only this machine is answered, and {name} is {site[:200]!r}. Use "
                "http://127.0.0.1 or localhost, or make a key with `tinkex key create`.",
            )


async def _swallow(receive: Receive) -> None:
    left = MOST_SWALLOWED
    while left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def gate_of(request: HTTPConnection) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


def caller_of(request: HTTPConnection) -> Caller:
    """Who is behind a request; only the gate decides that."""
    caller: Caller = request.state.caller
    return caller


def owner_of(request: HTTPConnection) -> str:
    """The owner behind a request."""
    return caller_of(request).owner


async def reader_owners(request: HTTPConnection, token: str | None = None) -> tuple[str, ...]:
    """
    Whose checkpoints this request may read: its owner's, then those of whoever lent it a key.

    The key travels in the body or in the header `X-Tinker-Weights-Access-Token`. It lets this one
    request read, and nothing more.
    """
    own = owner_of(request)
    token = token or request.headers.get(WEIGHTS_TOKEN)
    if not token:
        return (own,)
    lender = await gate_of(request).foreign(token)
    return (own,) if lender.owner == own else (own, lender.owner)
