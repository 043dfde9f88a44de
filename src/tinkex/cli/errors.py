"""Errors of commands: a message and a hint instead of a traceback."""

from __future__ import annotations

import click

#: Headlines by class name: importing the classes would slow down `--help`.
_HEADLINES = {
    "NotFoundError": "not found",
    "AuthenticationError": "the service does not accept this key",
    "BillingError": "the account is out of funds",
    "PermissionDeniedError": "this key does not have permission",
    "BadRequestError": "the service refused the request",
    "UnprocessableEntityError": "the service could not read the request",
    "ConflictError": "conflict with the current state",
    "RateLimitError": "the service is busy",
    "InternalServerError": "the service failed",
    "APITimeoutError": "the service did not answer in time",
    "APIConnectionError": "the service cannot be reached",
    "APIResponseValidationError": "the response is not valid for a Tinker service",
    "RequestFailedError": "the request failed",
}


class CommandFailed(click.ClickException):
    """A failure with its cause and, if possible, advice."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: object | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


def as_command_failure(error: Exception) -> CommandFailed | None:
    """The failure to show for an expected error; None for an unexpected one, which is a bug."""
    from tinkex.client.errors import TinkerError

    if isinstance(error, TinkerError):
        names = [kind.__name__ for kind in type(error).__mro__]
        headline = next((_HEADLINES[name] for name in names if name in _HEADLINES), None)
        return CommandFailed(f"{headline}. {error}" if headline else str(error))
    if isinstance(error, ValueError):
        return CommandFailed(str(error))
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return CommandFailed(f"{name}{error.strerror}.")
    return None


def missing_package(error: ModuleNotFoundError, what: str, extra: str) -> CommandFailed:
    """The failure for a package that is not installed, with how to install it."""
    return CommandFailed(
        f"{what} needs {error.name}, which is not installed.",
        hint=f"pip install 'tinkex[{extra}]'",
    )
