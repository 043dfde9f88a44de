"""Exchanges an API key for a short-lived token (JWT), and renews the token before it expires."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tinkex.client.auth.credentials import ApiKey, Credential, StaticCredential
from tinkex.client.background_loop import SingleFlight
from tinkex.client.errors import APIResponseValidationError, AuthenticationError, TinkerError
from tinkex.client.http.typed_requests import Calls
from tinkex.client.settings import Settings
from tinkex.wire.client_config import AuthTokenResponse, ClientConfigResponse

log = logging.getLogger("tinkex.tokens")

#: A token with less than this left is renewed before it is sent.
MIN_LEFT_S = 60.0
#: The background task renews a token this long before it expires.
RENEW_AHEAD_S = 300.0
#: Delay of the background task after a failed renewal.
RENEW_RETRY_S = 60.0
#: Assumed lifetime of a token without an expiry time.
DEFAULT_LIFETIME_S = 120.0


def read_claims(token: str) -> dict[str, Any]:
    """The claims of a token; the service verifies them. ValueError if it is not a JWT."""
    parts = token.split(".")
    if len(parts) != 3:
        raise ValueError(f"a JWT has three parts, but this has {len(parts)}.")
    claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    if not isinstance(claims, dict):
        raise ValueError("the payload of this JWT is not a JSON object.")  # noqa: TRY004
    return claims


def is_service_token(token: str) -> bool:
    """Whether the service issued this token, so that it need not be exchanged."""
    try:
        return str(read_claims(token).get("iss", "")).startswith("passport-")
    except ValueError:
        return False


def lifetime_s(token: str, *, now_s: float) -> float:
    """
    The lifetime of a token that was just fetched.

    If the clocks disagree, use the smaller of `exp - iat` and `exp - now`.
    """
    try:
        claims = read_claims(token)
        ends_s = float(claims["exp"])
        begun_s = float(claims.get("iat", now_s))
    except (ValueError, KeyError, TypeError):
        return DEFAULT_LIFETIME_S
    return min(ends_s - begun_s, ends_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedToken:
    """A token and its expiry time."""

    text: str = field(repr=False)
    until_s: float
    #: At the time of issue; short-lived tokens are renewed closer to their expiry.
    lifetime_s: float

    def is_fresh(self, now_s: float) -> bool:
        return self.until_s - now_s > min(MIN_LEFT_S, self.lifetime_s / 5)

    def renew_in_s(self, now_s: float) -> float:
        """Seconds until the background task should renew the token."""
        return max(self.until_s - now_s - min(RENEW_AHEAD_S, self.lifetime_s / 2), 1.0)


class ExchangedToken(Credential):
    """
    A token from the service in place of the key.

    `exchange` fetches one; its argument says whether to retry. Only the first fetch is retried:
    later, the request that needs the token is itself retried.
    """

    def __init__(
        self, exchange: Callable[[bool], Awaitable[str]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._cached: CachedToken | None = None
        self._fetching = SingleFlight(self._fetch)
        self._warned_s = float("-inf")

    async def token(self) -> str:
        cached = self._cached
        if cached is not None and cached.is_fresh(self._clock()):
            return cached.text
        try:
            return (await self._fetching.get()).text
        except TinkerError as error:
            if cached is None:
                raise
            # The old token may still be valid; if not, the service rejects it.
            if self._clock() - self._warned_s >= RENEW_RETRY_S:
                self._warned_s = self._clock()
                log.warning("the token was not renewed, so the old one is used: %s", error.summary)
            return cached.text

    async def renew(self, refused: str) -> bool:
        cached = self._cached
        if cached is not None and cached.text != refused:  # another request has renewed it
            return True
        try:
            return (await self._fetching.get()).text != refused
        except AuthenticationError:
            raise  # the key itself is refused: a clearer error than an expired token
        except TinkerError:
            return False

    async def keep_fresh(self) -> None:
        """Renew the token before it expires, until this task is cancelled."""
        while True:
            cached = self._cached
            wait_s = RENEW_RETRY_S if cached is None else cached.renew_in_s(self._clock())
            await asyncio.sleep(wait_s)
            if self._cached is not cached:  # a request has renewed it
                continue
            try:
                await self._fetching.get()
            except TinkerError as error:
                log.warning(
                    "the token was not renewed; retrying in %.0f s: %s", RENEW_RETRY_S, error
                )
                await asyncio.sleep(RENEW_RETRY_S)

    async def _fetch(self) -> CachedToken:
        text = await self._exchange(self._cached is None)
        now_s = self._clock()
        span_s = lifetime_s(text, now_s=now_s)
        self._cached = CachedToken(text=text, until_s=now_s + span_s, lifetime_s=span_s)
        return self._cached


async def sign_in(settings: Settings, calls: Calls, config: ClientConfigResponse) -> Credential:
    """Choose what requests carry: the key, or a token for it, whichever the service expects."""
    if not config.pjwt_auth_enabled:
        return calls.credential
    key = settings.api_key
    if key is not None and is_service_token(key.value):
        return StaticCredential(key)  # already a token of the service
    source = settings.credential(enforce_cmd=config.credential_default_source == "credential_cmd")
    source_calls = calls.with_credential(source)

    async def fetch(retry: bool) -> str:
        return await exchange(source_calls, retry=retry)

    exchanged = ExchangedToken(fetch)
    await exchanged.token()
    return exchanged


async def with_other_key(calls: Calls, config: ClientConfigResponse, token: str) -> Calls:
    """The same service, with the key of another owner (`weights_access_token`)."""
    foreign = calls.with_credential(StaticCredential(ApiKey(token)))
    if not config.pjwt_auth_enabled or is_service_token(token):
        return foreign
    return calls.with_credential(StaticCredential(ApiKey(await exchange(foreign, retry=True))))


async def exchange(calls: Calls, *, retry: bool) -> str:
    """A token for the credential of `calls`."""
    with contextlib.suppress(APIResponseValidationError):
        answer = await calls.call(
            "POST",
            "auth/token",
            {},
            answer=AuthTokenResponse,
            give_up_s=None if retry else 0.0,
            about="exchanging the key for a token",
        )
        return answer.jwt
    # Not the original error: it quotes the response, which may contain a token.
    raise TinkerError(
        "exchanging the key for a token: the response to POST auth/token has no field `jwt`. "
        "Is base_url the address of a Tinker service?"
    )
