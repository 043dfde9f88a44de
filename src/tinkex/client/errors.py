"""
The exceptions that a caller may have to handle:

* TinkerError                     base of all errors about the service
  * APIError                      an exchange with the service failed
    * APIConnectionError          no response: unreachable, or the connection broke
      * APITimeoutError           no response in time
    * APIResponseValidationError  a response that violates the protocol
    * APIStatusError              an error response
      * BadRequestError 400, AuthenticationError 401, BillingError 402, PermissionDeniedError 403,
        NotFoundError 404, ConflictError 409, UnprocessableEntityError 422, RateLimitError 429,
        InternalServerError 500 and above
  * RequestFailedError            the request was accepted, and could not be completed

The names are those of the official client. `http/retry.py` decides which of them are retried. All of them can be pickled.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tinkex.wire.errors import path_of

if TYPE_CHECKING:
    from tinkex.client.http.transport import Request, Response
    from tinkex.wire.errors import RequestErrorCategory


class ExperimentalWarning(FutureWarning):
    """The call works, but may change or be removed without notice."""


class TinkerError(Exception):
    """
    Base of every error about the service.

    Its text is `summary`, then `details` and `hint` in parentheses. Programs that show errors to
    people can print the parts on their own.
    """

    #: What was sent where, with the id to look for in logs; empty if there is no more to say.
    details: str = ""
    #: What to do next; empty if the summary says it.
    hint: str = ""
    _summary: str | None = None

    @property
    def summary(self) -> str:
        """What went wrong, as one line."""
        return self._summary or str(self).partition("\n")[0]

    def explain(self, summary: str, *, details: str = "", hint: str = "") -> Self:
        """Set the parts of the text."""
        self._summary, self.details, self.hint = summary, details, hint
        return self

    def __str__(self) -> str:
        if self._summary is None:
            return super().__str__()
        more = f"{self.details}. {self.hint}" if self.details and self.hint else self.details
        more = (more or self.hint).strip()
        return f"{self._summary}\n({more})" if more else self._summary

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from its state, not through __init__: subclasses have different signatures.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class APIError(TinkerError):
    """An exchange with the service failed."""

    #: A short text as in the official client, such as `Error code: 404 - {...}`. For people, print
    #: the error itself.
    message: str
    #: What was sent: method, URL and id, without headers and body.
    request: Request
    #: The decoded JSON of the response, else its text, else None.
    body: object | None

    def __init__(self, message: str, request: Request, *, body: object | None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """The response violates the protocol."""

    response: Response
    status_code: int
    #: Whether the bytes cannot be decoded at all: then the response was damaged in transit.
    garbled: bool = False

    def __init__(self, response: Response, body: object | None, message: str | None = None) -> None:
        super().__init__(
            message or "The response of the service does not have the expected shape.",
            response.request,
            body=body,
        )
        self.response = response
        self.status_code = response.status_code


class APIStatusError(APIError):
    """The service responded with a status of 400 or above (or an unexpected redirect)."""

    response: Response
    status_code: int

    def __init__(self, message: str, response: Response, body: object | None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code


class APIConnectionError(APIError):
    """No response: the service cannot be reached, or the connection broke."""

    def __init__(self, request: Request, message: str = "Connection error.") -> None:
        super().__init__(message, request, body=None)


class APITimeoutError(APIConnectionError):
    """No response in time."""

    def __init__(self, request: Request) -> None:
        super().__init__(request, "Request timed out.")


class BadRequestError(APIStatusError):
    """400."""

    status_code = 400


class AuthenticationError(APIStatusError):
    """401: the key is missing, wrong or revoked."""

    status_code = 401


class BillingError(APIStatusError):
    """402: the account is out of funds."""

    status_code = 402


class PermissionDeniedError(APIStatusError):
    """403."""

    status_code = 403


class NotFoundError(APIStatusError):
    """404: no such object, or not yours."""

    status_code = 404


class ConflictError(APIStatusError):
    """409."""

    status_code = 409


class UnprocessableEntityError(APIStatusError):
    """422: a field is missing or malformed; the response names it."""

    status_code = 422


class RateLimitError(APIStatusError):
    """429, after all retries."""

    status_code = 429


class InternalServerError(APIStatusError):
    """500 and above, after all retries."""


class RequestFailedError(TinkerError):
    """The service accepted the request and could not complete it."""

    message: str
    request_id: str
    #: Where the cause is: `user`, `server` or `unknown`.
    category: RequestErrorCategory

    _NEXT: ClassVar = {
        "user": "Change the request; the same one will fail again.",
        "server": "The cause is on the server: look for this id in its log.",
        "unknown": "Look for this id in the server's log.",
    }

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category
        word = str(getattr(category, "value", category))
        self.explain(
            message,
            details=f"request {request_id}, category {word}",
            hint=self._NEXT.get(word, self._NEXT["unknown"]),
        )


_BY_STATUS: dict[int, type[APIStatusError]] = {
    kind.status_code: kind
    for kind in (
        BadRequestError,
        AuthenticationError,
        BillingError,
        PermissionDeniedError,
        NotFoundError,
        ConflictError,
        UnprocessableEntityError,
        RateLimitError,
    )
}

_HINTS = {
    400: "Change the request; the same one will fail again.",
    401: "Check api_key=... or TINKER_API_KEY, and that base_url is the service it belongs to.",
    402: "Check the billing state of the account, then run the program again.",
    403: "The key is valid but may not do this.",
    404: "Check the id or path, that it belongs to this key, and that base_url is right.",
    408: "The service did not respond in time. Try again later.",
    409: "It conflicts with another request or object. Check the current state, then decide.",
    410: "The server no longer keeps it. Start again from the last saved checkpoint.",
    413: "Send less in one request.",
    422: "The request is malformed; the response names the field.",
    429: "The service is still rate-limited. Try again later, or send fewer requests at a time.",
}


def status_error(response: Response, *, about: str = "") -> APIStatusError:
    """The error for a response of status 300 or above, with a hint what to do next."""
    status = response.status_code
    body = _body(response)
    if 300 <= status < 400:
        hint = _redirect_hint(response)
    elif status >= 500:
        hint = "The cause is on the server: see its log."
    else:
        hint = _HINTS.get(status, _HINTS[400])
    message = f"Error code: {status}"
    if isinstance(body, str) and body:
        message = body
    elif body not in (None, ""):
        message += f" - {body}"
    about = f"{about}: " if about else ""
    where = f"{response.request.method} {response.request.path}"
    fallback = InternalServerError if status >= 500 else APIStatusError
    return _BY_STATUS.get(status, fallback)(message, response, body).explain(
        _stated_reason(body) or f"The service answered {status} {response.reason_phrase}".rstrip(),
        details=f"Error code: {status}, {about}{where}{identified(response.request, response)}",
        hint=hint,
    )


#: Keys under which services put the reason of an error, the most telling first.
_REASON_KEYS = ("detail", "message", "error", "reason")
#: A longer reason is shortened; `body` has all of it.
MAX_REASON_CHARS = 1000


def _stated_reason(body: object) -> str:
    """The reason that the service gives, on one line; empty if it gives none."""
    text = ""
    if isinstance(body, dict):
        found = next((body[key] for key in _REASON_KEYS if body.get(key)), None)
        if isinstance(found, list):  # the fields of a 422
            text = "; ".join(filter(None, map(_field_reason, found[:5])))
        elif found is not None:
            return _stated_reason(found)
        text = text or json.dumps(body, ensure_ascii=False, default=str)
    elif isinstance(body, str) and "<html" not in body[:200].lower():
        text = body
    elif isinstance(body, list | int | float):
        text = json.dumps(body, default=str)
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."


def _field_reason(error: object) -> str:
    """`ttl_seconds: must be above zero`, from one entry of a 422."""
    if not isinstance(error, dict) or not isinstance(error.get("msg"), str):
        return error if isinstance(error, str) else ""
    loc = error.get("loc")
    parts = [part for part in loc if isinstance(part, str | int)] if isinstance(loc, list) else []
    path = path_of(tuple(parts[1:] if parts[:1] == ["body"] else parts))
    return f"{path}: {error['msg']}" if path else str(error["msg"])


def _redirect_hint(response: Response) -> str:
    # Imported here, because the transport imports this module.
    from tinkex.client.http.transport import origin, redirect_url

    location, requested = response.headers.get("location"), response.request.url
    if not location:
        return "It is a redirect without a location. The cause is on the server: see its log."
    url = redirect_url(requested, location)
    if url is not None and origin(url) == origin(requested):
        return (
            f"It redirects to {location!r}, on the same server, too many times. "
            "Check that base_url is the address of a Tinker service, and the routes of the server."
        )
    return (
        f"It redirects to {location!r}. Redirects to another address are not followed, because the "
        "key would be sent there. If it is the right address, set base_url to it."
    )


def identified(request: Request, response: Response | None = None) -> str:
    """The id to look for in logs, in parentheses; the service's own id if it sent one."""
    given = None if response is None else response.headers.get("x-request-id")
    request_id = given or request.request_id
    return f" (request {request_id})" if request_id else ""


def _body(response: Response) -> object | None:
    text = response.text
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text[:2000]


def own_copy(error: BaseException) -> BaseException:
    """A copy for each waiter: one exception raised in several places mixes up its tracebacks."""
    try:
        duplicate = copy.copy(error)
    except Exception:  # noqa: BLE001 (an exception of a kind that cannot be copied)
        return error
    duplicate.__cause__ = error.__cause__
    return duplicate


# So that tracebacks show `tinkex.NotFoundError`, the name that programs use.
for _kind in [each for each in globals().values() if isinstance(each, type)]:
    if issubclass(_kind, TinkerError | ExperimentalWarning):
        _kind.__module__ = "tinkex"
