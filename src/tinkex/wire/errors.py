"""
Errors of messages.

* WireError (ValueError)     the body does not match its type: HTTP 422 with each bad field's path
  * TooLarge                 the body is too large, packed or unpacked: HTTP 413
* UserFailure (Exception)    the message is valid but the request cannot be carried out: a failed
                             future of category `user`

The server maps these to HTTP responses, the client to its own exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum, auto
from typing import Any, Final, NamedTuple

__all__ = [
    "FieldError",
    "RequestErrorCategory",
    "TooLarge",
    "UserFailure",
    "WireError",
]


#: A 422 lists at most this many errors, each shortened to this many characters.
MAX_ERRORS_SENT: Final = 20
MAX_ERROR_CHARS: Final = 1_000


class RequestErrorCategory(StrEnum):
    """Who caused a failure. Lower case on the wire; parsed case-insensitively."""

    Unknown = auto()
    Server = auto()
    User = auto()

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        # A newer server may send a new category: that must not hide its error message.
        word = value.lower() if isinstance(value, str) else ""
        return next((member for member in cls if member.value == word), cls.Unknown)

    @classmethod
    def parse(cls, word: object) -> RequestErrorCategory:
        """The category named `word`, or `Unknown`."""
        return cls(word if isinstance(word, str) else "")


class FieldError(NamedTuple):
    """One invalid field of a message."""

    #: Path of the field: names and list positions, outermost first.
    loc: tuple[str | int, ...]
    #: What was found and what is allowed.
    msg: str
    #: Machine-readable error type, such as `missing`.
    type: str = "value_error"

    def __str__(self) -> str:
        return f"{path_of(self.loc)}: {self.msg}" if self.loc else self.msg


class WireError(ValueError):
    """A body that does not match its type. `errors` lists every invalid field."""

    errors: list[FieldError]

    def __init__(self, errors: str | FieldError | Iterable[FieldError]) -> None:
        if isinstance(errors, str):
            errors = FieldError((), errors)
        self.errors = [errors] if isinstance(errors, FieldError) else list(errors)
        super().__init__("; ".join(map(str, self.errors)))

    @classmethod
    def at(cls, loc: tuple[str | int, ...], msg: str, type: str = "value_error") -> WireError:
        """An error at one path."""
        return cls(FieldError(loc, msg, type))

    def under(self, *outer: str | int) -> WireError:
        """The same errors with `outer` prepended to their paths."""
        return type(self)([error._replace(loc=(*outer, *error.loc)) for error in self.errors])

    def detail(self) -> list[dict[str, Any]]:
        """The body of a 422 is `{"detail": error.detail()}`. Long texts are shortened."""
        return [
            {"loc": ["body", *map(_short, error.loc)], "msg": _short(error.msg), "type": error.type}
            for error in self.errors[:MAX_ERRORS_SENT]
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class TooLarge(WireError):
    """A body over a size limit; decompression stops at the limit."""


class UserFailure(Exception):
    """
    A request that cannot be carried out: becomes a failed future of category `user`.

    The message says what was requested, what is supported and what to do.
    """

    #: Valid fields of the request (`model_id`, `seq_id`, ...) if it was being decoded: the server
    #: uses them to record the failure as the result of that step.
    request: Mapping[str, Any]

    def __init__(self, message: str, *, request: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.request = dict(request or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _user_failure, (str(self), dict(self.request))


def _user_failure(message: str, request: Mapping[str, Any]) -> UserFailure:
    return UserFailure(message, request=request)


def _short(part: str | int) -> str | int:
    if isinstance(part, int) or len(part) <= MAX_ERROR_CHARS:
        return part
    return f"{part[:MAX_ERROR_CHARS]}... ({len(part)} characters)"


def path_of(loc: tuple[str | int, ...]) -> str:
    """`("data", 3, "loss_fn_inputs")` as `data[3].loss_fn_inputs`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
