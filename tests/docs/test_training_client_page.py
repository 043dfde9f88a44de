"""M7: the page on the training client matches the code."""

import inspect
import re
from pathlib import Path

import pytest

import tinkex
from tinkex.client.errors import status_error
from tinkex.client.http.retry import RetryPolicy, is_retryable
from tinkex.client.http.transport import Request, Response

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "training-client.md").read_text()


def test_m7_the_page_has_all_sections():
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert headings == [
        "Order",
        "Numbers",
        "Retries",
        "Timeouts",
        "Cancellation",
        "Forks and pickles",
    ]


def test_m7_the_figures_are_those_of_the_code():
    settings, policy = tinkex.Settings(), RetryPolicy()
    assert f"`TINKEX_FIRST_CONTACT_S` ({settings.first_contact_s:g} s)" in PAGE
    assert f"`TINKEX_GIVE_UP_S` ({settings.give_up_s:g} s)" in PAGE
    assert settings.reconnect_s == 3600
    assert "`TINKEX_RECONNECT_S` (one hour)" in PAGE
    delays = f"after {policy.first_delay_s:g} s, doubling to {policy.max_delay_s:g} s"
    assert delays in PAGE
    assert policy.jitter == 0.25
    assert "less up to a quarter at random" in PAGE


@pytest.mark.parametrize("status", range(400, 600))
def test_m7_the_listed_statuses_are_those_that_are_retried(status):
    line = next(line for line in PAGE.splitlines() if line.startswith("| connection lost"))
    listed = {int(number) for number in re.findall(r"\b\d{3}\b", line)}
    request = Request(method="POST", url="http://h/api/v1/optim_step")
    error = status_error(Response(status_code=status, request=request))
    assert is_retryable(error) == (status in listed or (status >= 500 and "5xx" in line))


def test_m7_retries_are_limited_by_time_and_not_by_count():
    """The official client's limit of ten attempts would end a wait that has time left."""
    names = {each.name for each in inspect.signature(RetryPolicy).parameters.values()}
    assert names == {"first_delay_s", "max_delay_s", "jitter", "give_up_s"}
    assert "by time, not by count" in PAGE
