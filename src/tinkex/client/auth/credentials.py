"""
Which credential is used, and what is sent as `X-API-Key`.

* ApiKey                a key or token that is never printed
* resolve               chooses among the configured credentials; a pure function
* Credential            queried before every attempt
  * StaticCredential    a fixed key or token, or none
  * CommandCredential   the output of a user's command
  * ExchangedToken      a token that the service issues for a key (in `token_exchange.py`)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tinkex.client.background_loop import SingleFlight
from tinkex.client.errors import TinkerError

#: The output of a credential command is cached for this long, since each run costs a process.
COMMAND_CACHE_S = 60.0
JWT = "eyJ"
HOW_TO_GIVE_A_KEY = (
    "Pass api_key=..., set TINKER_API_KEY (or TINKEX_API_KEY), set TINKER_CREDENTIAL_CMD to a "
    "command that prints one, or store one with `tinkex auth login`."
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential that is never printed, and never part of a repr or an error."""

    value: str = field(repr=False)

    def __reduce__(self) -> str:
        raise TypeError(
            "An API key cannot be pickled, because the bytes may be stored or sent anywhere. Set "
            "TINKER_API_KEY in the other process instead."
        )

    def __deepcopy__(self, memo: object) -> ApiKey:
        return self

    @property
    def digest(self) -> str:
        """Identifies a key where the key itself must not be kept."""
        return hashlib.sha256(self.value.encode()).hexdigest()

    @property
    def is_jwt(self) -> bool:
        return self.value.startswith(JWT)

    @property
    def problem(self) -> str | None:
        """Why this cannot be a key; never contains the key."""
        if not _sendable(self.value):
            return "has spaces, line breaks or other characters that a header cannot contain"
        if not self.value.startswith(("tml-", JWT)):
            return f"has {len(self.value)} characters and starts with neither"
        return None


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command that prints a credential. May contain secrets, so it is not printed."""

    text: str = field(repr=False)


def resolve(
    key: ApiKey | None,
    command: str | None,
    *,
    service: str,
    needed: bool = True,
    enforce_cmd: bool = False,
) -> ApiKey | Command | None:
    """
    Choose the credential for a service. None means no credential, if none is needed.

    `key` is the key that was passed, or the stored one if neither a key nor a command was passed.
    """
    if key is not None and key.is_jwt and key.problem is None:
        return key
    if enforce_cmd and command is None:
        raise TinkerError(
            f"The organization at {service} requires credentials from a command and accepts no "
            "static keys. Set TINKER_CREDENTIAL_CMD to a command that prints one."
        )
    if command is not None and (enforce_cmd or key is None or key.problem is not None):
        return Command(command)
    if key is not None:
        if (problem := key.problem) is not None:
            raise TinkerError(
                "The API key must start with 'tml-' (a key) or 'eyJ' (a JWT); the given one "
                f"{problem}. Check api_key=... and TINKER_API_KEY."
            )
        return key
    if needed:
        raise TinkerError(f"No API key for {service}. {HOW_TO_GIVE_A_KEY}")
    return None


class Credential(ABC):
    """A source of the `X-API-Key` header. Belongs to one event loop."""

    @abstractmethod
    async def token(self) -> str | None:
        """The current value of `X-API-Key`; None sends no header."""

    async def renew(self, refused: str) -> bool:
        """Called after a 401: whether there is a new token with which to repeat the request."""
        return False

    async def claims(self) -> dict[str, Any]:
        """The claims of the token about its owner. RuntimeError if it is a plain key."""
        from tinkex.client.auth.token_exchange import is_service_token, read_claims

        token = await self.token()
        # Only tokens of the service itself identify the user.
        if token is None or not is_service_token(token):
            raise RuntimeError(
                "The user can only be read from a token, and this service accepts the key itself. "
                "`tinkex auth whoami` asks the service about the key instead."
            )
        return read_claims(token)


class StaticCredential(Credential):
    """A fixed value, or none."""

    def __init__(self, key: ApiKey | None) -> None:
        self._key = key

    async def token(self) -> str | None:
        return None if self._key is None else self._key.value


class CommandCredential(Credential):
    """The output of the user's command, cached for a minute."""

    def __init__(
        self, command: Command, *, limit_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._command = command
        self._limit_s = limit_s
        self._clock = clock
        self._value: str | None = None
        self._until = 0.0
        self._command_run = SingleFlight(self._run)

    async def token(self) -> str:
        if self._value is not None and self._clock() < self._until:
            return self._value
        return await self._command_run.get()

    async def renew(self, refused: str) -> bool:
        if self._value == refused:
            self._until = 0.0
        return await self.token() != refused

    async def _run(self) -> str:
        value = await run_command(self._command, limit_s=self._limit_s)
        self._value, self._until = value, self._clock() + COMMAND_CACHE_S
        return value


async def run_command(command: Command, *, limit_s: float) -> str:
    """
    Run the command and return the credential that it prints.

    On failure the last line of stderr is quoted; stdout never is.
    """
    process = await asyncio.create_subprocess_shell(
        command.text,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A separate process group, so that child processes of the shell can be killed with it.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    except TimeoutError:
        await _end(process)
        raise TinkerError(
            f"The credential command did not finish within {limit_s:g} s and was stopped. "
            "It cannot prompt: it has no terminal. Check TINKER_CREDENTIAL_CMD, or "
            "set TINKEX_CREDENTIAL_CMD_S to allow more time."
        ) from None
    value = out.decode("utf-8", "replace").strip()
    if process.returncode:
        raise TinkerError(
            f"The credential command exited with status {process.returncode}"
            f"{_last_stderr_line(err, value)} Check TINKER_CREDENTIAL_CMD."
        )
    if not value:
        raise TinkerError(
            f"The credential command printed nothing on stdout{_last_stderr_line(err, value)} "
            "TINKER_CREDENTIAL_CMD must print the credential, and nothing else."
        )
    if not _sendable(value):
        raise TinkerError(
            f"The credential command printed {len(value.splitlines())} line(s) that a header "
            "cannot contain. TINKER_CREDENTIAL_CMD must print the credential, and nothing else."
        )
    return value


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    # Reading to the end closes the pipes, unless a process outside the group keeps them open.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.communicate()


def _last_stderr_line(stderr: bytes, secret: str) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return " and printed nothing on stderr."
    line = lines[-1].strip()[:300]
    return f": {line.replace(secret, '***') if secret else line}"


def _sendable(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value and value != ""
