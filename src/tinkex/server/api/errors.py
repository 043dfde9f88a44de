"""
The HTTP response for each exception.

* 400  well-formed, but refused: the detail says what is allowed
* 404  not found, or not this owner's
* 410  the session is finished, or the result has expired
* 413  too large
* 422  malformed: the detail lists each field with its path
* 429  over a limit of the owner or the server; retry a little later
* 500  a bug, with an id that is also in the log
* 503  the disk or the database cannot store anything now, or no base model is served yet; retry

A request that fails after it was accepted is not in this table: its failure arrives through its
future.
"""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from tinkex.server.scheduler.result_waiters import UnknownRequest
from tinkex.server.store import Damaged, RunTaken, StorageError
from tinkex.server.store.requests import ResultGone
from tinkex.wire.errors import FieldError, TooLarge, UserFailure, WireError, path_of
from tinkex.wire.redaction import redact_value

log = logging.getLogger("tinkex.server.api")

# A detail may quote what was sent.
MAX_DETAIL_LENGTH = 4_000
#: Where the routes of OpenAI's API are: as OpenAI's clients expect them, and as Tinker has them.
OPENAI_PREFIXES = ("/v1/", "/oai/api/v1/")
# Their error type and code, by status.
_OPENAI_KINDS: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}
# A storage problem usually lasts for a while: somebody has to free disk space first.
STORAGE_RETRY_S = 5


class Refusal(Exception):
    """
    A request that is refused with an error status and a reason.

    `field` is the field of the request that caused it; only OpenAI's routes tell it.
    """

    def __init__(
        self,
        status: int,
        detail: Any,
        *,
        headers: Mapping[str, str] | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail
        self.headers = headers
        self.field = field


def not_found(what: str, name: str, advice: str) -> Refusal:
    """A 404; the same whether the name does not exist or belongs to another owner."""
    return Refusal(404, f"there is no {what} {name[:200]!r} on this server. {advice}")


def error_response(
    request: HTTPConnection,
    detail: Any,
    status: int,
    headers: Mapping[str, str] | None = None,
    *,
    field: str | None = None,
) -> Response:
    """An error response with secrets removed: it quotes the request, which may contain a key."""
    body: dict[str, Any] = {"detail": detail}
    if request.scope["path"].startswith(OPENAI_PREFIXES):
        # Clients of OpenAI expect a 400 for a malformed body.
        status = 400 if status == 422 else status
        body = openai_error(detail, status, field)
    return JSONResponse(redact_value(body), status, headers)


def openai_error(detail: Any, status: int, field: str | None = None) -> dict[str, Any]:
    """An error as clients of OpenAI's API read it."""
    if isinstance(detail, list):  # the fields of a malformed body
        field = field or path_of(tuple(detail[0]["loc"][1:])) or None
        detail = "; ".join(
            str(FieldError(tuple(one["loc"][1:]), one["msg"], one["type"])) for one in detail
        )
    kind, code = _OPENAI_KINDS.get(
        status, ("server_error" if status >= 500 else "invalid_request_error", None)
    )
    if status == 404 and field == "model":
        code = "model_not_found"
    return {"error": {"message": str(detail), "type": kind, "param": field, "code": code}}


def refused(request: HTTPConnection, error: Exception) -> Response:
    if not isinstance(error, Refusal):
        raise error
    return error_response(request, error.detail, error.status, error.headers, field=error.field)


def malformed(request: Request, error: Exception) -> Response:
    if not isinstance(error, WireError):
        raise error
    status = 413 if isinstance(error, TooLarge) else 422
    return error_response(request, error.detail(), status)


def malformed_query(request: Request, error: Exception) -> Response:
    """FastAPI's validation errors in our own format, without the offending value."""
    if not isinstance(error, RequestValidationError):
        raise error
    found = [FieldError(tuple(item["loc"]), item["msg"], item["type"]) for item in error.errors()]
    detail = [{**one, "loc": one["loc"][1:]} for one in WireError(found).detail()]
    return error_response(request, detail, 422)


def user_failure(request: Request, error: Exception) -> Response:
    # Not for steps and samples: those become failed futures.
    return error_response(request, str(error)[:MAX_DETAIL_LENGTH], 400)


def unknown_request(request: Request, error: Exception) -> Response:
    detail = (
        f"there is no request {str(error)[:200]!r} on this server. It may belong to another "
        "server, another data folder or another owner; submit the work again."
    )
    return error_response(request, detail, 404)


def result_gone(request: Request, error: Exception) -> Response:
    detail = (
        f"the result of request {str(error)[:200]!r} has expired. Results are kept for a limited "
        "time after they were fetched; the work itself was done."
    )
    return error_response(request, detail, 410)


def run_taken(request: Request, error: Exception) -> Response:
    """A 422, not a 409: clients retry a 409 for minutes."""
    text = (
        f"model {str(error)[:200]!r} already exists with different content. A repeated request "
        "must be identical; use the next free number for another model or copy."
    )
    return malformed(request, WireError.at(("model_seq_id",), text, "model_seq_id_reused"))


def storage_trouble(request: HTTPConnection, error: Exception) -> Response:
    """Official clients retry a 503 for five minutes; the disk often has space again by then."""
    return error_response(request, str(error), 503, {"Retry-After": str(STORAGE_RETRY_S)})


def damaged(request: Request, error: Exception) -> Response:
    """A 404, not a 5xx: a retry does not repair the file."""
    number = secrets.token_hex(4)
    log.error("damage %s in %s %s: %s", number, request.method, request.url.path, error)
    detail = f"{error}. The server's log has this under the id {number}."
    return error_response(request, detail, 404)


def router_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router refuses."""
    if not isinstance(error, HTTPException):
        raise error
    detail: Any = error.detail
    if error.status_code == 404:
        detail = (
            f"this server has no {request.method} {request.url.path[:200]}. Routes are listed at "
            "/docs; clients expect them below /api/v1 of the base URL."
        )
    return error_response(request, detail, error.status_code, error.headers)


def client_disconnected(_request: Request, _error: Exception) -> Response:
    """The client closed the connection during its request; this response is not sent."""
    return Response(status_code=400)


def bug(request: Request, error: Exception) -> Response:
    number = secrets.token_hex(4)
    log.error("bug %s in %s %s", number, request.method, request.url.path, exc_info=error)
    detail = f"the server failed unexpectedly; its log has the details under the id {number}."
    return error_response(request, detail, 500)


HANDLERS: dict[Any, Any] = {
    Refusal: refused,
    WireError: malformed,
    RequestValidationError: malformed_query,
    UserFailure: user_failure,
    UnknownRequest: unknown_request,
    ResultGone: result_gone,
    RunTaken: run_taken,
    StorageError: storage_trouble,
    Damaged: damaged,
    HTTPException: router_error,
    ClientDisconnect: client_disconnected,
    Exception: bug,
}
