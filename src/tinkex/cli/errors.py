"""What a command says when the service, the network or the user's input is at fault."""

from __future__ import annotations

import click

#: Headlines by the name of the error's class: the classes themselves load slowly for `--help`.
_HEADLINES = {
    "NotFoundError": "not found",
    "AuthenticationError": "the service does not accept this key",
    "BillingError": "the account is out of funds",
    "PermissionDeniedError": "this key may not do that",
    "BadRequestError": "the service refused the request",
    "UnprocessableEntityError": "the service could not read the request",
    "ConflictError": "in conflict with what is there",
    "RateLimitError": "the service is busy",
    "InternalServerError": "the service failed",
    "APITimeoutError": "the service did not answer in time",
    "APIConnectionError": "the service cannot be reached",
    "APIResponseValidationError": "the answer is not one of a Tinker service",
    "RequestFailedError": "the request failed",
}


class CommandFailed(click.ClickException):
    """What went wrong, and what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: object | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


def as_command_failure(error: Exception) -> CommandFailed | None:
    """The words for an error that has some; None for a bug of ours."""
    from tinkex.client.errors import TinkerError

    if isinstance(error, TinkerError):
        headline = next(
            (
                _HEADLINES[kind.__name__]
                for kind in type(error).__mro__
                if kind.__name__ in _HEADLINES
            ),
            None,
        )
        text = f"{headline}. {error}" if headline else str(error)
        return CommandFailed(text)
    if isinstance(error, ValueError):
        return CommandFailed(str(error))
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return CommandFailed(f"{name}{error.strerror}.")
    return None


def missing_package(error: ModuleNotFoundError, what: str, extra: str) -> CommandFailed:
    """A part that is not installed, and how to get it."""
    return CommandFailed(
        f"{what} needs {error.name}, which is not installed.",
        hint=f"pip install 'tinkex[{extra}]'",
    )
