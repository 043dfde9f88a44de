"""Tokens that stand for a key for a while: read, exchanged at the service, and kept fresh."""

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

from tinkex.client.auth.credentials import ApiKey, Credential, Fixed, Flight
from tinkex.client.errors import APIResponseValidationError, AuthenticationError, TinkerError
from tinkex.client.http.api_calls import Calls
from tinkex.client.settings import Settings
from tinkex.wire.client_config import AuthTokenResponse, ClientConfigResponse

log = logging.getLogger("tinkex.tokens")

#: A token with less than this left is not sent any more.
SPARE_S = 60.0
#: A new one is fetched in the background so long before the end.
AHEAD_S = 300.0
#: After a failure, so long until the next try in the background.
AGAIN_S = 60.0
#: How long a token counts that does not say when it ends.
UNKNOWN_S = 120.0


def read_claims(token: str) -> dict[str, Any]:
    """What a token says. Not verified: that is the service's part. ValueError if it is none."""
    parts = token.split(".")
    if len(parts) != 3:
        raise ValueError(f"a JWT has three parts, and this has {len(parts)}.")
    claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    if not isinstance(claims, dict):
        raise ValueError("the middle of a JWT is an object, and this is not.")  # noqa: TRY004
    return claims


def is_passport(token: str) -> bool:
    """Whether the service itself gave this token, so that it need not be exchanged."""
    try:
        return str(read_claims(token).get("iss", "")).startswith("passport-")
    except ValueError:
        return False


def lifetime_s(token: str, *, now_s: float) -> float:
    """
    How long a token that was just fetched will last.

    Where our clock and the service's differ, its own two times tell, and the shorter span counts.
    """
    try:
        claims = read_claims(token)
        ends_s = float(claims["exp"])
        begun_s = float(claims.get("iat", now_s))
    except (ValueError, KeyError, TypeError):
        return UNKNOWN_S
    return min(ends_s - begun_s, ends_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A token, and until when it counts."""

    text: str = field(repr=False)
    until_s: float
    #: As it was when it came; short-lived ones are renewed sooner.
    lifetime_s: float

    def is_fresh(self, now_s: float) -> bool:
        return self.until_s - now_s > min(SPARE_S, self.lifetime_s / 5)

    def renew_in_s(self, now_s: float) -> float:
        """When the background should fetch the next one."""
        return max(self.until_s - now_s - min(AHEAD_S, self.lifetime_s / 2), 1.0)


class Exchanged(Credential):
    """
    A token from the service in place of the key.

    `exchange` fetches one; it is told whether to insist. It insists for the first token only:
    later, the request that wants the token is itself repeated.
    """

    def __init__(
        self, exchange: Callable[[bool], Awaitable[str]], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._exchange = exchange
        self._clock = clock
        self._held: Held | None = None
        self._fetching: Flight[Held] = Flight()
        self._warned_s = float("-inf")

    async def token(self) -> str:
        held = self._held
        if held is not None and held.is_fresh(self._clock()):
            return held.text
        try:
            return (await self._fetching.join(self._fetch)).text
        except TinkerError as error:
            if held is None:
                raise
            # It may do for a little longer, and if not, the service says so.
            if self._clock() - self._warned_s >= AGAIN_S:
                self._warned_s = self._clock()
                log.warning("the token was not renewed, so the old one is used: %s", error)
            return held.text

    async def renew(self, refused: str) -> bool:
        held = self._held
        if held is not None and held.text != refused:  # another request has renewed it
            return True
        try:
            return (await self._fetching.join(self._fetch)).text != refused
        except AuthenticationError:
            raise  # the key itself is refused: that says more than "the token is too old"
        except TinkerError:
            return False

    async def keep_fresh(self) -> None:
        """Renew the token ahead of time, for as long as this task lives."""
        while True:
            held = self._held
            wait_s = AGAIN_S if held is None else held.renew_in_s(self._clock())
            await asyncio.sleep(wait_s)
            if self._held is not held:  # renewed by a request meanwhile
                continue
            try:
                await self._fetching.join(self._fetch)
            except TinkerError as error:
                log.warning("the token was not renewed; again in %.0f s: %s", AGAIN_S, error)
                await asyncio.sleep(AGAIN_S)

    async def _fetch(self) -> Held:
        text = await self._exchange(self._held is None)
        now_s = self._clock()
        span_s = lifetime_s(text, now_s=now_s)
        self._held = Held(text=text, until_s=now_s + span_s, lifetime_s=span_s)
        return self._held


# MERGED: From what the user gave to what the service wants: the key itself, or a token for it.


async def sign_in(settings: Settings, calls: Calls, config: ClientConfigResponse) -> Credential:
    """What requests carry from now on. A first token is fetched here, under the usual retries."""
    if not config.pjwt_auth_enabled:
        return calls.credential
    key = settings.api_key
    if key is not None and is_passport(key.value):
        return Fixed(key)  # it is what an exchange would give
    source = settings.credential(enforce_cmd=config.credential_default_source == "credential_cmd")
    asking = calls.asking_as(source)

    async def fetch(insist: bool) -> str:
        return await exchange(asking, insist=insist)

    exchanged = Exchanged(fetch)
    await exchanged.token()
    return exchanged


async def lent(calls: Calls, config: ClientConfigResponse, token: str) -> Calls:
    """The same service, asked in the name of whoever lent this key (`weights_access_token`)."""
    foreign = calls.asking_as(Fixed(ApiKey(token)))
    if not config.pjwt_auth_enabled or is_passport(token):
        return foreign
    return calls.asking_as(Fixed(ApiKey(await exchange(foreign, insist=True))))


async def exchange(calls: Calls, *, insist: bool) -> str:
    """A token for the credential that `calls` asks with."""
    with contextlib.suppress(APIResponseValidationError):
        answer = await calls.call(
            "POST",
            "auth/token",
            {},
            answer=AuthTokenResponse,
            give_up_s=None if insist else 0.0,
            about="exchanging the key for a token",
        )
        return answer.jwt
    # Not that error itself: it quotes the answer, which may hold a token all the same.
    raise TinkerError(
        "exchanging the key for a token: the answer to POST auth/token has no field `jwt`. "
        "Is base_url the address of a Tinker service?"
    )
