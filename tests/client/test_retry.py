"""Which errors are retried, and when: tables of decisions."""

import asyncio
import itertools
import pickle
import random
from datetime import UTC, datetime

import pytest

from tinkex import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    RequestFailedError,
    RetryConfig,
    types,
)
from tinkex.client.errors import status_error
from tinkex.client.http.retry import (
    NotYet,
    RetryPolicy,
    exponential_delay_s,
    is_retryable,
    is_user_error,
    retry_after_s,
    retrying,
    retrying_in_thread,
)
from tinkex.client.http.transport import Request, Response

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
REQUEST = Request(method="POST", url="http://h/api/v1/x")


def answered(status: int, **headers: str) -> APIStatusError:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status_error(Response(status_code=status, headers=named, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (APIConnectionError(REQUEST), True),
        (APITimeoutError(REQUEST), True),
        (answered(408), True),
        (answered(409), True),
        (answered(429), True),
        (answered(500), True),
        (answered(503), True),
        (answered(400), False),
        (answered(401), False),
        (answered(404), False),
        (answered(410), False),
        (answered(422), False),
        (answered(503, x_should_retry="false"), False),  # the server decides
        (answered(400, x_should_retry="true"), True),
        (answered(400, x_should_retry="perhaps"), False),
        (ValueError("no"), False),
    ],
)
def test_connection_errors_timeouts_408_409_429_and_5xx_are_retried(error, expected):
    assert is_retryable(error) is expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),  # the finer one wins
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Thu, 01 Jan 2026 12:00:07 GMT"}, 7.0),
        ({"retry-after": "Thu, 01 Jan 2026 11:59:00 GMT"}, None),  # in the past
        ({"retry-after": "Thu, 01 Jan 2026 12:00:07 -0000"}, 7.0),  # UTC of unknown origin
        ({"retry-after": "Thu, 01 Jan 2026 13:00:07 +0100"}, 7.0),
        ({"retry-after": "3600"}, 3600.0),  # long values too
        ({"retry-after": "Thu, 01 Jan 2099 12:00:00 GMT"}, 86400.0),  # a wrong clock
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1" + 400 * "0"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_its_three_forms(headers, expected):
    assert retry_after_s(headers, now=NOW) == expected


@pytest.mark.parametrize(
    ("attempt", "low", "high"),
    [
        (1, 0.375, 0.5),  # the first delay, shortened by a quarter at most
        (2, 0.75, 1.0),  # doubled
        (7, 7.5, 10.0),  # 0.5 * 2**6 = 32, cut to the maximum
        (5000, 7.5, 10.0),  # no overflow
    ],
)
def test_delays_double_up_to_the_longest(attempt, low, high):
    for seed in range(20):
        delay = RetryPolicy().delay_s(
            attempt, answered(503), elapsed_s=0, now=NOW, rng=random.Random(seed)
        )
        assert low <= delay <= high


def test_h3_delays_have_jitter_so_that_clients_do_not_retry_together():
    def delay(seed):
        return RetryPolicy().delay_s(
            5, answered(503), elapsed_s=0, now=NOW, rng=random.Random(seed)
        )

    assert len({delay(seed) for seed in range(20)}) == 20
    assert delay(1) == delay(1)


def test_retry_after_wins_over_the_clients_delay():
    error = answered(503, retry_after="3")
    assert RetryPolicy().delay_s(9, error, elapsed_s=0, now=NOW, rng=random.Random(0)) == 3.0


@pytest.mark.parametrize(
    ("elapsed_s", "expected"),
    [
        (0, 3.0),
        (8, 2.0),
        (10, None),
        (11, None),
    ],  # 10 s in total: the last attempt is at the deadline
)
def test_no_attempt_starts_after_the_deadline(elapsed_s, expected):
    policy = RetryPolicy(give_up_s=10)
    error = answered(503, retry_after="3")
    assert policy.delay_s(1, error, elapsed_s=elapsed_s, now=NOW, rng=random.Random(0)) == expected


@pytest.mark.parametrize(
    ("asked", "elapsed_s", "expected"),
    [("120", 0, 120.0), ("120", 250, 50.0), ("3600", 0, 300.0), ("3600", 300, None)],
)
def test_h3_a_long_retry_after_is_limited_to_the_time_that_is_left(asked, elapsed_s, expected):
    error, rng = answered(503, retry_after=asked), random.Random(0)
    assert RetryPolicy().delay_s(1, error, elapsed_s=elapsed_s, now=NOW, rng=rng) == expected


def test_errors_that_are_not_retryable_are_given_up_at_once():
    rng = random.Random(0)
    assert RetryPolicy().delay_s(1, answered(422), elapsed_s=0, now=NOW, rng=rng) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered(400), True),
        (answered(404), True),
        (answered(408), False),
        (answered(409), False),
        (answered(410), False),
        (answered(429), False),
        (answered(500), False),
        (APIConnectionError(REQUEST), False),
        (RequestFailedError("no", "r", types.RequestErrorCategory.User), True),
        (RequestFailedError("no", "r", types.RequestErrorCategory.Server), False),
        (ValueError("no"), False),
    ],
)
def test_e1_user_errors_are_4xx_that_a_retry_would_not_fix(error, expected):
    assert is_user_error(error) is expected


def linked(*errors, by="__cause__"):
    """The first error; each is caused by the next."""
    for error, next_one in itertools.pairwise(errors):
        setattr(error, by, next_one)
    return errors[0]


@pytest.mark.parametrize("by", ["__cause__", "__context__"])
def test_e1_an_error_is_a_user_error_if_its_cause_is(by):
    assert is_user_error(linked(ValueError(), KeyError(), answered(404), by=by))
    assert not is_user_error(linked(ValueError(), KeyError(), answered(503), by=by))
    # The nearest verdict decides: there was no response, whatever happened before.
    assert not is_user_error(linked(APIConnectionError(REQUEST), answered(404), by=by))
    server = RequestFailedError("no", "r", types.RequestErrorCategory.Server)
    assert not is_user_error(linked(ValueError(), server, answered(400), by=by))


def test_e1_errors_that_cause_each_other_are_checked_once():
    first, second = ValueError(), KeyError()
    first.__cause__, second.__context__ = second, first
    assert not is_user_error(first)
    second.__cause__ = answered(422)
    assert is_user_error(first)


def test_retry_config_is_hashable_survives_pickling_and_refuses_nonsense():
    config = RetryConfig(max_connections=7, progress_timeout=1.5)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(RetryConfig(max_connections=7, progress_timeout=1.5))
    with pytest.raises(ValueError, match="max_connections is 0"):
        RetryConfig(max_connections=0)
    for wrong in (-1, 0, float("nan")):
        with pytest.raises(ValueError, match=f"progress_timeout is {wrong}"):
            RetryConfig(progress_timeout=wrong)
    for name in ("retry_delay_base", "retry_delay_max", "jitter_factor"):
        with pytest.raises(ValueError, match=f"{name} is -1"):
            RetryConfig(**{name: -1})
    assert RetryConfig(progress_timeout=float("inf"), retry_delay_base=0)
    for attempt in range(1, 60):
        assert 0 <= config.delay_s(attempt, rng=random.Random(attempt)) <= 10


def test_delays_double_up_to_the_maximum_and_jitter_shortens_them():
    assert [exponential_delay_s(n, first_s=1.0, max_s=5.0) for n in (1, 2, 3, 4, 5000)] == [
        1,
        2,
        4,
        5,
        5,
    ]
    delays = [exponential_delay_s(2, first_s=1.0, max_s=5.0, jitter=0.25) for _ in range(100)]
    assert 1.5 <= min(delays) < max(delays) <= 2.0


@pytest.mark.parametrize("in_thread", [False, True])
def test_an_attempt_is_repeated_until_it_succeeds_or_its_error_has_no_delay(in_thread):
    outcomes = [NotYet(0.0), KeyError("again"), "done", ValueError("no")]

    def attempt():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def attempt_async():
        return attempt()

    def delay_after(error):
        return 0.0 if isinstance(error, KeyError) else None

    def run():
        if in_thread:
            return retrying_in_thread(attempt, delay_after)
        return asyncio.run(retrying(attempt_async, delay_after))

    assert run() == "done"
    with pytest.raises(ValueError, match="no"):
        run()
