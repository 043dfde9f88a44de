"""From what the user gave to what the service wants: the key itself, or a token for it."""

from __future__ import annotations

import contextlib

from tinkex.client.calls import Calls
from tinkex.client.credentials import ApiKey, Credential, Fixed
from tinkex.client.errors import APIResponseValidationError, TinkerError
from tinkex.client.settings import Settings
from tinkex.client.tokens import Exchanged, is_passport
from tinkex.wire.runs import AuthTokenResponse, ClientConfigResponse


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
