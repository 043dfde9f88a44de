"""
From what went wrong to what the client sees: the one table.

* 400  sound, and refused: the detail says what is allowed
* 404  no such thing, or not this owner's
* 410  the session was finished; a result was kept long enough
* 413  too large
* 429  over a limit of the owner's own; to be sent again a little later
* 422  malformed: the detail lists each field with its path
* 500  a bug, with an id that is in the log
* 503  the disk or the database takes nothing now; to be sent again

Work that was accepted and then failed is not here: that arrives through its future.
"""

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from tinkex.server.scheduler.results import UnknownRequest
from tinkex.server.store import Damaged, RunTaken, StorageError
from tinkex.server.store.requests import ResultGone
from tinkex.wire.errors import FieldError, TooLarge, UserFailure, WireError
from tinkex.wire.redaction import scrubbed_value

# What was sent may be quoted in what is answered.
LONGEST_DETAIL = 4_000

log = logging.getLogger("tinkex.server.api")

# Somebody has to make room first.
TROUBLE_RETRY_S = 5


class Refusal(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(
        self, status: int, detail: Any, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail
        self.headers = headers


def missing(what: str, name: str, advice: str) -> Refusal:
    """Nothing has this name, or it is not for this owner: the same answer."""
    return Refusal(404, f"there is no {what} {name[:200]!r} on this server. {advice}")


def told(body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None) -> Response:
    """An answer quotes what was sent, and that may be a key in the wrong place."""
    return JSONResponse(scrubbed_value(body), status, headers)


def refused(_request: Request, error: Exception) -> Response:
    if not isinstance(error, Refusal):
        raise error
    return told({"detail": error.detail}, error.status, error.headers)


def malformed(_request: Request, error: Exception) -> Response:
    if not isinstance(error, WireError):
        raise error
    status = 413 if isinstance(error, TooLarge) else 422
    return told({"detail": error.detail()}, status)


def malformed_address(_request: Request, error: Exception) -> Response:
    """What FastAPI refuses of a query; without the value, and in the form of all the others."""
    if not isinstance(error, RequestValidationError):
        raise error
    found = [FieldError(tuple(item["loc"]), item["msg"], item["type"]) for item in error.errors()]
    detail = [{**one, "loc": one["loc"][1:]} for one in WireError(found).detail()]
    return told({"detail": detail}, 422)


def cannot(_request: Request, error: Exception) -> Response:
    # Steps and samples never get here: theirs become failed futures.
    return told({"detail": str(error)[:LONGEST_DETAIL]}, 400)


def unknown_request(_request: Request, error: Exception) -> Response:
    detail = (
        f"there is no request {str(error)[:200]!r} on this server. It may belong to another "
        "server, another data folder or another owner; submit the work again."
    )
    return told({"detail": detail}, 404)


def result_gone(_request: Request, error: Exception) -> Response:
    detail = (
        f"the result of request {str(error)[:200]!r} is not kept any more. Results are kept for a "
        "while after they were fetched; the work itself was done."
    )
    return told({"detail": detail}, 410)


def run_taken(request: Request, error: Exception) -> Response:
    """A 422 and no 409, which clients send again for minutes."""
    text = (
        f"model {str(error)[:200]!r} was already made, as something else. A repeat must say the "
        "same; use the next free number for another model or copy."
    )
    return malformed(request, WireError.at(("model_seq_id",), text, "model_seq_id_reused"))


def storage_trouble(_request: HTTPConnection, error: Exception) -> Response:
    """Official clients send a 503 again for five minutes; a disk is often cleared by then."""
    return told({"detail": str(error)}, 503, {"Retry-After": str(TROUBLE_RETRY_S)})


def damaged(request: Request, error: Exception) -> Response:
    """No 5xx: asking again does not bring it back."""
    number = secrets.token_hex(4)
    log.error("damage %s in %s %s: %s", number, request.method, request.url.path, error)
    detail = f"{error}. The server's log has this under the id {number}."
    return told({"detail": detail}, 404)


def by_status(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    if not isinstance(error, HTTPException):
        raise error
    detail: Any = error.detail
    if error.status_code == 404:
        detail = (
            f"this server has no {request.method} {request.url.path[:200]}. Routes are listed at "
            "/docs; clients expect them below /api/v1 of the base URL."
        )
    return told({"detail": detail}, error.status_code, error.headers)


def gone(_request: Request, _error: Exception) -> Response:
    """The client left in the middle of its request; nobody reads this."""
    return Response(status_code=400)


def bug(request: Request, error: Exception) -> Response:
    number = secrets.token_hex(4)
    log.error("bug %s in %s %s", number, request.method, request.url.path, exc_info=error)
    detail = f"the server failed unexpectedly; its log has the details under the id {number}."
    return told({"detail": detail}, 500)


HANDLERS: dict[Any, Any] = {
    Refusal: refused,
    WireError: malformed,
    RequestValidationError: malformed_address,
    UserFailure: cannot,
    UnknownRequest: unknown_request,
    ResultGone: result_gone,
    RunTaken: run_taken,
    StorageError: storage_trouble,
    Damaged: damaged,
    HTTPException: by_status,
    ClientDisconnect: gone,
    Exception: bug,
}
