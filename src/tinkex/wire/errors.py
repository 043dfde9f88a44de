"""
What can go wrong with a message, told apart by who has to act.

* WireError (ValueError)     the bytes do not fit the type: a 422 with the path of each bad field
  * TooLarge                 the body is, or unpacks to, more than is allowed: a 413
* UserFailure (Exception)    the message is sound, what it asks for cannot be done: a failed future
                             of category `user`

HTTP is not known here; the server maps these to answers, the client to its own exceptions.
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


#: Of an answer: so many errors, and so many characters of each.
MAX_ERRORS_SENT: Final = 20
MAX_ERROR_CHARS: Final = 1_000


class RequestErrorCategory(StrEnum):
    """Who is to blame for a failed request. Lower case on the wire, read without regard to case."""

    Unknown = auto()
    Server = auto()
    User = auto()

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        # A newer server may use a word this client does not know: that must not hide its error.
        word = value.lower() if isinstance(value, str) else ""
        return next((member for member in cls if member.value == word), cls.Unknown)

    @classmethod
    def parse(cls, word: object) -> RequestErrorCategory:
        """The category called `word`; one that is not recognised is `Unknown`."""
        return cls(word if isinstance(word, str) else "")


class FieldError(NamedTuple):
    """One thing that is wrong with a message."""

    #: Where: field names and list positions from the outside in.
    loc: tuple[str | int, ...]
    #: What was found, and what is allowed.
    msg: str
    #: A fixed word for programs, such as `missing`.
    type: str = "value_error"

    def __str__(self) -> str:
        return f"{path_of(self.loc)}: {self.msg}" if self.loc else self.msg


class WireError(ValueError):
    """A body that does not fit its type. `errors` names every bad field."""

    errors: list[FieldError]

    def __init__(self, errors: str | FieldError | Iterable[FieldError]) -> None:
        if isinstance(errors, str):
            errors = FieldError((), errors)
        self.errors = [errors] if isinstance(errors, FieldError) else list(errors)
        super().__init__("; ".join(map(str, self.errors)))

    @classmethod
    def at(cls, loc: tuple[str | int, ...], msg: str, type: str = "value_error") -> WireError:
        """One error at one place."""
        return cls(FieldError(loc, msg, type))

    def under(self, *outer: str | int) -> WireError:
        """The same errors, seen from a message that holds this one at `outer`."""
        return type(self)([error._replace(loc=(*outer, *error.loc)) for error in self.errors])

    def detail(self) -> list[dict[str, Any]]:
        """The body of a 422: `{"detail": error.detail()}`. What the sender sent is cut short."""
        return [
            {"loc": ["body", *map(_short, error.loc)], "msg": _short(error.msg), "type": error.type}
            for error in self.errors[:MAX_ERRORS_SENT]
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


class TooLarge(WireError):
    """A body over the limit; nothing beyond the limit was unpacked."""


class UserFailure(Exception):
    """
    Work that cannot be done as asked: becomes a failed future of category `user`.

    The text says what was asked for, what is supported and what to do next.
    """

    #: The sound fields of the request (`model_id`, `seq_id`, ...), when it was read off the wire:
    #: the server needs them to file the failure under the step that it belongs to.
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
