"""Single requests without a session, for `tinkex.auth` and `tinkex auth`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from tinkex.client.connection import Connection
from tinkex.client.http.typed_requests import Calls
from tinkex.client.session import Session
from tinkex.client.settings import Settings
from tinkex.wire.sessions import GetServerCapabilitiesResponse

T = TypeVar("T")

OWN_KEY = "auth/apikey/me"
DEADLINE_S = 30.0


def ask(settings: Settings, question: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    """Connect, run `question`, and disconnect. Blocks; fails within `first_contact_s`."""
    retry_s = min(settings.give_up_s, settings.first_contact_s)
    session = Session(replace(settings, give_up_s=retry_s, telemetry=False))

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
        about="checking the service",
    )


async def own_key(connection: Connection) -> dict[str, Any]:
    """The service's record of the key in use: `key_id`, `name`, `note`, `details`."""
    answer: dict[str, Any] = await _with_key_itself(connection).call(
        "GET", OWN_KEY, answer=dict, deadline_s=DEADLINE_S, about="looking up the key"
    )
    return answer


async def delete_own_key(connection: Connection) -> None:
    """Revoke the key in use."""
    await _with_key_itself(connection).call(
        "DELETE", OWN_KEY, answer=type(None), deadline_s=DEADLINE_S, about="deleting the key"
    )


def _with_key_itself(connection: Connection) -> Calls:
    """Uses the key even if it was exchanged: a token identifies a user, not a key."""
    return connection.calls.with_credential(connection.calls.settings.credential())
