"""Errors can be pickled, contain no secrets, and say what to do next."""

import pickle
import traceback

import pytest

import tinkex
from tinkex.client.errors import status_error
from tinkex.client.http.transport import Request, Response

REQUEST = Request(
    method="POST",
    url="http://h/api/v1/optim_step",
    headers={"X-API-Key": "tml-secret"},
    body=b"tml-secret",
)


def answered(status: int, content: bytes = b"", **headers: str) -> tinkex.APIStatusError:
    return status_error(
        Response(
            status_code=status, headers=headers, content=content, request=REQUEST.without_payload()
        ),
        about="step 3 of m",
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, tinkex.BadRequestError),
        (401, tinkex.AuthenticationError),
        (402, tinkex.BillingError),
        (403, tinkex.PermissionDeniedError),
        (404, tinkex.NotFoundError),
        (409, tinkex.ConflictError),
        (410, tinkex.APIStatusError),
        (422, tinkex.UnprocessableEntityError),
        (429, tinkex.RateLimitError),
        (500, tinkex.InternalServerError),
        (503, tinkex.InternalServerError),
        (418, tinkex.APIStatusError),
    ],
)
def test_each_status_has_its_class(status, kind):
    error = answered(status, b'{"detail": "because"}')
    assert type(error) is kind
    assert error.status_code == status
    assert error.body == {"detail": "because"}
    assert "because" in str(error)
    assert "step 3 of m" in str(error)
    assert "POST /api/v1/optim_step" in str(error)


@pytest.mark.parametrize(
    ("content", "summary"),
    [
        (b'{"detail": "ttl_seconds is 5; it must be above 60."}', None),
        (
            b'{"detail": [{"loc": ["body", "d", 3, "x"], "msg": "none"}, {"loc": ["t"], "msg": "is 5"}]}',
            "d[3].x: none; t: is 5",
        ),
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"a": 1}', '{"a": 1}'),
        (b"upstream\n  failed", "upstream failed"),
        (b"<!doctype html><html>", "The service answered 400 Bad Request"),
        (b"", "The service answered 400 Bad Request"),
    ],
)
def test_an_error_begins_with_the_reason_and_ends_with_the_request(content, summary):
    error = answered(400, content)
    summary = summary or "ttl_seconds is 5; it must be above 60."
    assert error.summary == summary
    assert str(error) == f"{summary}\n({error.details}. {error.hint})"
    assert error.details == "Error code: 400, step 3 of m: POST /api/v1/optim_step"
    assert error.hint == "Change the request; the same one will fail again."


def test_a_long_reason_is_shortened_and_the_body_has_all_of_it():
    error = answered(400, b'{"detail": "' + b"x" * 5000 + b'"}')
    assert len(error.summary) < 1100
    assert len(error.body["detail"]) == 5000


def test_message_is_that_of_the_official_client():
    assert answered(404, b'{"detail": "no"}').message == "Error code: 404 - {'detail': 'no'}"
    assert answered(404, b"gone").message == "gone"
    assert answered(404).message == "Error code: 404"
    assert answered(404, b'{"detail": "no"}').args == ("Error code: 404 - {'detail': 'no'}",)


def test_every_error_has_the_parts_that_a_command_line_prints():
    for error in ERRORS:
        assert error.summary
        assert "\n" not in error.summary
        assert error.summary in str(error)
        assert error.details in str(error)
        assert error.hint in str(error)


def test_a_response_that_is_not_json_is_kept_as_text():
    assert answered(502, b"<html>").body == "<html>"
    assert answered(502).body is None


def test_a_redirect_error_names_its_target():
    assert "'https://new'" in str(answered(301, location="https://new"))


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"location": "https://new/"}, "another address are not followed"),
        ({"location": "//new/"}, "another address are not followed"),
        ({"location": "/api/v1/other"}, "on the same server"),
        ({"location": REQUEST.url}, "on the same server"),
        ({}, "a redirect without a location"),
    ],
)
def test_why_a_redirect_was_not_followed(headers, said):
    text = str(answered(307, **headers))
    assert said in text
    assert ("set base_url to it" in text) is ("another address" in said)
    assert "None" not in text


ERRORS = [
    tinkex.TinkerError("plain"),
    tinkex.APIError("m", REQUEST.without_payload(), body={"a": 1}),
    tinkex.APIConnectionError(REQUEST.without_payload()),
    tinkex.APIConnectionError(REQUEST.without_payload(), "gone"),
    tinkex.APITimeoutError(REQUEST.without_payload()),
    tinkex.APIResponseValidationError(
        Response(status_code=200, request=REQUEST.without_payload()), {"a": 1}, "odd"
    ),
    answered(404, b"{}"),
    answered(503),
    tinkex.RequestFailedError("bad data", "r-9", tinkex.types.RequestErrorCategory.User),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_contains_the_key(error):
    assert b"tml-secret" not in pickle.dumps(error)


def test_a_request_does_not_print_its_payload():
    assert "tml-secret" not in repr(REQUEST)


def test_a_failed_request_names_its_id_and_category():
    error = tinkex.RequestFailedError("bad data", "r-9", tinkex.types.RequestErrorCategory.User)
    assert (error.request_id, error.category) == ("r-9", "user")
    assert "r-9" in str(error)
    assert "Change the request" in str(error)


def test_the_class_tree_is_that_of_the_official_client():
    assert issubclass(tinkex.APITimeoutError, tinkex.APIConnectionError)
    assert issubclass(tinkex.APIStatusError, tinkex.APIError)
    assert issubclass(tinkex.APIError, tinkex.TinkerError)
    assert issubclass(tinkex.RequestFailedError, tinkex.TinkerError)
    assert not issubclass(tinkex.RequestFailedError, tinkex.APIError)
    assert issubclass(tinkex.ExperimentalWarning, FutureWarning)


def test_a_traceback_names_an_error_as_programs_write_it():
    for kind in (tinkex.TinkerError, tinkex.NotFoundError, tinkex.RequestFailedError):
        assert traceback.format_exception_only(kind.__new__(kind))[0].startswith(
            f"tinkex.{kind.__name__}"
        )
