"""One question to a service, without a session: for `tinkex.auth` and `tinkex auth`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from tinkex.client.http.api_calls import Calls
from tinkex.client.session import Connection, Session
from tinkex.client.settings import Settings
from tinkex.wire.sessions import GetServerCapabilitiesResponse

T = TypeVar("T")

OWN_KEY = "auth/apikey/me"
DEADLINE_S = 30.0


def ask(settings: Settings, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Connect, ask, hang up. Fails within `first_contact_s`, and blocks until then."""
    patience_s = min(settings.give_up_s, settings.first_contact_s)
    session = Session(replace(settings, give_up_s=patience_s, telemetry=False))

    async def work() -> T:
        return await question(await session.connect())

    try:
        return session.run(work()).block()
    finally:
        session.close("success").block()


async def capabilities(connection: Connection) -> GetServerCapabilitiesResponse:
    return await connection.calls.call(
        "GET",
        "get_server_capabilities",
        answer=GetServerCapabilitiesResponse,
        give_up_s=0.0,
        about="asking whether the service is there",
    )


async def own_key(connection: Connection) -> dict[str, Any]:
    """What the service knows of the key we ask with: `key_id`, `name`, `note`, `details`."""
    answer: dict[str, Any] = await _by_key(connection).call(
        "GET", OWN_KEY, answer=dict, deadline_s=DEADLINE_S, about="asking about the key"
    )
    return answer


async def delete_own_key(connection: Connection) -> None:
    """From now on the key opens nothing."""
    await _by_key(connection).call(
        "DELETE", OWN_KEY, answer=type(None), deadline_s=DEADLINE_S, about="deleting the key"
    )


def _by_key(connection: Connection) -> Calls:
    """With the key itself, also where it was exchanged: a token stands for a user, not for a key."""
    return connection.calls.asking_as(connection.calls.settings.credential())
