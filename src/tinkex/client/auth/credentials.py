"""
Who is asking: which credential counts, and what is sent as `X-API-Key`.

* ApiKey       a credential that does not print
* resolve      which of the configured ones counts, a pure decision
* Credential   asked for its value before every attempt
  * Fixed      a key or token that stays the same, or nobody
  * Printed    what a command of the user prints
  * Exchanged  a token that the service gives for a key (in `tokens.py`)
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

#: What a command printed is used for this long; it costs a process to ask again.
COMMAND_CACHE_S = 60.0
JWT = "eyJ"
HOW_TO_GIVE_A_KEY = (
    "Pass api_key=..., set TINKER_API_KEY (or TINKEX_API_KEY), name a command that prints one in "
    "TINKER_CREDENTIAL_CMD, or store one with `tinkex auth login`."
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential that does not print, and is never part of a repr or an error."""

    value: str = field(repr=False)

    def __reduce__(self) -> str:
        raise TypeError(
            "A key is not pickled: the bytes may be kept or sent anywhere. Set TINKER_API_KEY "
            "in the other process instead."
        )

    def __deepcopy__(self, memo: object) -> ApiKey:
        return self

    @property
    def digest(self) -> str:
        """Tells keys apart where the key itself must not be kept."""
        return hashlib.sha256(self.value.encode()).hexdigest()

    @property
    def is_jwt(self) -> bool:
        return self.value.startswith(JWT)

    @property
    def problem(self) -> str | None:
        """Why this cannot be a key; never with the key in it."""
        if not _sendable(self.value):
            return "has spaces, line breaks or other characters that no header may hold"
        if not self.value.startswith(("tml-", JWT)):
            return f"has {len(self.value)} characters and starts with neither"
        return None


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command that prints a credential. May hold secrets itself, so it does not print."""

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
    Which credential counts for a service. None means nobody, where none is needed.

    `key` is the one given, or the stored one where neither a key nor a command is given.
    """
    if key is not None and key.is_jwt and key.problem is None:
        return key
    if enforce_cmd and command is None:
        raise TinkerError(
            f"The organisation at {service} wants credentials from a command and takes no static "
            "key. Set TINKER_CREDENTIAL_CMD to a command that prints one."
        )
    if command is not None and (enforce_cmd or key is None or key.problem is not None):
        return Command(command)
    if key is not None:
        if (problem := key.problem) is not None:
            raise TinkerError(
                "The API key must start with 'tml-' (a key) or 'eyJ' (a JWT); the one given "
                f"{problem}. Check api_key=... and TINKER_API_KEY."
            )
        return key
    if needed:
        raise TinkerError(f"No API key for {service}. {HOW_TO_GIVE_A_KEY}")
    return None


class Credential(ABC):
    """Belongs to one event loop."""

    @abstractmethod
    async def token(self) -> str | None:
        """What is sent as `X-API-Key` now; None sends none."""

    async def renew(self, refused: str) -> bool:
        """After a 401: whether there is another token than the refused one now."""
        return False

    async def claims(self) -> dict[str, Any]:
        """What the token says about its owner. RuntimeError if it is a plain key."""
        from tinkex.client.auth.token_exchange import is_service_token, read_claims

        token = await self.token()
        # Only tokens of the service itself name the user in a way that means something here.
        if token is None or not is_service_token(token):
            raise RuntimeError(
                "Who is asking can only be read from a token, and this service takes the key "
                "itself. `tinkex auth whoami` asks the service about the key instead."
            )
        return read_claims(token)


class StaticCredential(Credential):
    """The same value every time, or nobody."""

    def __init__(self, key: ApiKey | None) -> None:
        self._key = key

    async def token(self) -> str | None:
        return None if self._key is None else self._key.value


class CommandCredential(Credential):
    """What the user's command prints, kept for a minute."""

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
    The credential that a command prints.

    Its last words on stderr are quoted when it fails; what it prints on stdout never is.
    """
    process = await asyncio.create_subprocess_shell(
        command.text,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # A group of its own, so that what the shell has started can be ended with it.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    except TimeoutError:
        await _end(process)
        raise TinkerError(
            f"The credential command printed nothing whole within {limit_s:g} s and was ended. "
            "It cannot ask questions: no terminal is attached. Check TINKER_CREDENTIAL_CMD, or "
            "give it longer with TINKEX_CREDENTIAL_CMD_S."
        ) from None
    value = out.decode("utf-8", "replace").strip()
    if process.returncode:
        raise TinkerError(
            f"The credential command ended with status {process.returncode}{_last_stderr_line(err, value)}"
            " Check TINKER_CREDENTIAL_CMD."
        )
    if not value:
        raise TinkerError(
            f"The credential command printed nothing on stdout{_last_stderr_line(err, value)} "
            "TINKER_CREDENTIAL_CMD must print the credential, and nothing else."
        )
    if not _sendable(value):
        raise TinkerError(
            f"The credential command printed {len(value.splitlines())} line(s) that no header may "
            "hold. TINKER_CREDENTIAL_CMD must print the credential, and nothing else."
        )
    return value


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    # Read to the end, which closes the pipes; unless something that left the group holds them.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await process.communicate()


def _last_stderr_line(stderr: bytes, secret: str) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return " and said nothing on stderr."
    line = lines[-1].strip()[:300]
    return f": {line.replace(secret, '***') if secret else line}"


def _sendable(value: str) -> bool:
    return value.isascii() and value.isprintable() and " " not in value and value != ""
