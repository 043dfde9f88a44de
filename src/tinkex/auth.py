"""Checks whether this machine can use a service: credentials, and the service itself."""

from __future__ import annotations

from tinkex.client.errors import TinkerError
from tinkex.client.settings import Settings

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The key or token from the environment or the key store; None if none. Runs no command."""
    try:
        key = Settings.resolve().api_key
    except TinkerError:
        return None
    return None if key is None or key.problem else key.value


def tinker_has_credentials() -> bool:
    """Whether a client would find a credential; a configured command counts, and is not run."""
    try:
        Settings.resolve()
    except TinkerError:
        return False
    return True


def raise_if_tinker_not_accessible() -> None:
    """Send one request to the service. Raises `TinkerError` with the reason if that fails."""
    from tinkex.client.auth.sessionless_requests import ask, capabilities
    from tinkex.client.futures import refuse_to_block

    refuse_to_block(
        "raise_if_tinker_not_accessible", "asyncio.to_thread(raise_if_tinker_not_accessible)"
    )
    try:
        ask(Settings.resolve(), capabilities)
    except TinkerError:
        raise
    except Exception as error:
        raise TinkerError(f"The service cannot be used: {type(error).__name__}: {error}") from error
