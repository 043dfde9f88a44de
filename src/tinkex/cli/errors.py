"""Errors of commands: one sentence and a hint instead of a traceback; --verbose shows the rest."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tinkex.client.errors import TinkerError

#: What to do in a shell, by class name (importing the classes would slow down --help), whatever the
#: message says to programs.
_SHELL_HINTS = {
    "NotFoundError": "`tinkex run list` and `tinkex checkpoint list` show yours.",
}
#: What to do in a shell, if the message itself does not say it.
_HINTS = {
    "AuthenticationError": "`tinkex auth login` stores a key; --api-key and TINKER_API_KEY set one.",
    "PermissionDeniedError": "`tinkex auth whoami` shows whose key it is.",
    "RateLimitError": "Try again later.",
    "InternalServerError": "The cause is on the server: see its log.",
    "APIConnectionError": "Check that the server runs, and --base-url or TINKER_BASE_URL.",
    "APIResponseValidationError": "Check --base-url or TINKER_BASE_URL.",
}
#: Arguments of Python that messages name, and what they are in a shell.
_OPTIONS = (
    ('base_url="local" (`--base-url local`)', "`--base-url local`"),
    ("base_url=..., --base-url", "--base-url"),
    ("base_url=...", "--base-url"),
    ("api_key=...", "--api-key"),
)
NO_MODELS = "the service offers no models. Start the server with one: `tinkex serve NAME`."
#: Modules of Python that Windows does not have. What a server runs needs them.
_UNIX_ONLY = {"fcntl", "resource"}
#: The end of a sentence that another one follows.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def first_sentence(text: str) -> tuple[str, str | None]:
    """What is wrong, and what to do about it: the first sentence and the others."""
    sentence, *more = _SENTENCE_END.split(text.strip(), maxsplit=1)
    return sentence, more[0] if more else None


class CommandFailed(click.ClickException):
    """
    A failure with its cause and, if possible, advice. `details` are shown with --verbose.

    Without a hint, what follows the first sentence of the message is the hint.
    """

    verbose = False

    def __init__(self, message: str, *, hint: str | None = None, details: str = "") -> None:
        if hint is None:
            message, hint = first_sentence(message)
        super().__init__(message)
        self.hint = hint
        self.details = details

    def show(self, file: object | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)
        if self.verbose and self.details:
            click.echo(self.details, err=True)


class UsageFailed(click.UsageError):
    """A command line that cannot be parsed, in the words of `CommandFailed`; exit status 2."""

    def show(self, file: object | None = None) -> None:
        words = self.format_message().strip()
        if words[1:2].islower():  # click begins sentences with a capital, our errors do not
            words = words[0].lower() + words[1:]
        click.echo(f"error: {words}", err=True)
        path = self.ctx.command_path if self.ctx else "tinkex"
        click.echo(f"hint: `{path} --help` shows how to use it.", err=True)


class ReaderGone(click.ClickException):
    """Nobody reads the output any more, as in `tinkex run list | head -1`: end without a word."""

    #: What shells report for a program that SIGPIPE ended.
    exit_code = 141

    def __init__(self) -> None:
        super().__init__("nobody reads the output")

    def show(self, file: object | None = None) -> None:
        # Python would report what is still buffered when it exits.
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(null, stream.fileno())


def as_command_failure(error: Exception) -> CommandFailed | None:
    """The failure to show for an expected error; None for an unexpected one, which is a bug."""
    from tinkex.client.errors import TinkerError

    if isinstance(error, TinkerError):
        return _service_failure(error)
    if isinstance(error, ValueError):
        return CommandFailed(str(error))
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return CommandFailed(f"{name}{error.strerror}.")
    return None


def _service_failure(error: TinkerError) -> CommandFailed:
    names = [kind.__name__ for kind in type(error).__mro__]
    said = error.summary
    for argument, option in _OPTIONS:
        said = said.replace(argument, option)
    sentence, hint = first_sentence(said)
    for name in names:
        hint = _SHELL_HINTS.get(name) or hint or _HINTS.get(name)
    return CommandFailed(sentence, hint=hint, details=error.details)


def missing_package(error: ModuleNotFoundError, what: str, extra: str) -> CommandFailed:
    """The failure for a package that is not installed, with how to install it."""
    if error.name in _UNIX_ONLY:
        return CommandFailed(
            f"{what} does not run on Windows.",
            hint="Run it in WSL 2 or on another machine, and use its address here: "
            "docs/guides/install.md.",
        )
    return CommandFailed(
        f"{what} needs {error.name}, which is not installed.",
        hint=f"pip install 'tinkex[{extra}]'",
    )
