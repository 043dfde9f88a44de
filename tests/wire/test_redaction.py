"""Repeated tracebacks: logged in full once per interval, and as one line in between."""

import io
import logging
from collections.abc import Callable, Iterator

import pytest

from tinkex.wire import redaction
from tinkex.wire.redaction import RedactingFormatter


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logger = logging.getLogger("test-scrubbing")
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, written
    logger.removeHandler(handler)


def fail(number: int) -> None:
    raise ValueError(f"number {number}")


def failure(number: int) -> Exception:
    try:
        fail(number)
    except ValueError as error:
        return error
    raise AssertionError


def test_a_traceback_that_comes_again_is_one_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log

    for number in range(50):
        logger.error("bug %d", number, exc_info=failure(number))

    text = written.getvalue()
    assert text.count("Traceback") == 1
    assert [f"bug {n}\n" in text and f"ValueError: number {n}" in text for n in range(50)] == [
        True
    ] * 50
    assert len(text) < 50 * 100 + 1000


def test_another_failure_is_shown_in_full(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    try:
        fail(2)
    except ValueError as error:
        elsewhere = error

    logger.error("one", exc_info=failure(1))
    logger.error("two", exc_info=elsewhere)

    assert written.getvalue().count("Traceback") == 2


@pytest.mark.parametrize("explicit", [True, False], ids=["from", "while handling"])
def test_another_cause_of_the_same_failure_is_shown_in_full(
    log: tuple[logging.Logger, io.StringIO], explicit: bool
) -> None:
    logger, written = log

    def no_disk() -> None:
        raise OSError("disk")

    def no_memory() -> None:
        raise OSError("memory")

    def wrapped(cause: Callable[[], None]) -> Exception:
        try:
            try:
                cause()
            except OSError as error:
                if explicit:
                    raise RuntimeError("it cannot be") from error
                raise RuntimeError("it cannot be")  # noqa: B904 (the other way to be a cause)
        except RuntimeError as error:
            return error
        raise AssertionError

    for cause in (no_disk, no_memory, no_disk, no_memory):
        logger.error("failed", exc_info=wrapped(cause))

    text = written.getvalue()
    assert text.count("OSError: disk") == text.count("OSError: memory") == 1
    assert text.count("its traceback was logged") == 2


def test_a_traceback_is_logged_again_later_with_the_number_of_repeats(
    log: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, written = log
    for number in range(3):
        logger.error("bug", exc_info=failure(number))
    before = written.getvalue()

    monkeypatch.setattr(redaction, "REPEATED_S", 0.0)
    logger.error("bug", exc_info=failure(3))

    last = written.getvalue()[len(before) :]
    assert last.count("Traceback") == 1
    assert "(2 repeats of this traceback were not logged)" in last


def test_the_number_of_remembered_tracebacks_is_bounded() -> None:
    formatter = RedactingFormatter()
    for number in range(1000):
        kind = type(f"Error{number}", (Exception,), {})
        formatter.formatException((kind, kind(), None))

    assert len(formatter._logged) <= 200
