"""What a client says while it waits, and when it goes on. Real sockets; short thresholds."""

import contextlib
import logging
import math
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time

import aiohttp  # noqa: F401 (loaded with the first request, which would take longer than 0.2 s)
import pytest

import tinkex
from http_stub import Reply, reply_json, stub_server
from ports import free_port
from tinkex import types
from tinkex.client.observe import instrumentation
from tinkex.client.observe.waiting import HOW_TO_STOP, Cause, Limit, WaitLog
from tinkex.client.settings import Settings
from tinkex.testing import Answer, FakeService, Lost
from waiting import until

REFUSED = Cause("connection", "http://h", "connection refused", quiet_s=10.0)
FULL = Cause("status 503", "http://h", "The disk is full.")
GIVE_UP = Limit(300.0, "TINKEX_GIVE_UP_S")


def queued(subject: str, reason: str = "3 models are training, and 2 wait") -> Cause:
    return Cause(
        "queue paused", subject, reason, joint=" is paused:", does="Waiting", over="goes on"
    )


# -- decisions, with times of the test ---------------------------------------------------------------


def said(waits: WaitLog, now: float) -> list[str]:
    return waits.due(now)[0]


def test_one_line_when_the_time_has_come_and_one_when_it_goes_on():
    waits = WaitLog()
    assert waits.wait("a", REFUSED, GIVE_UP, since=0.0, notice_s=3.0) == 3.0
    assert waits.due(2.9) == ([], 3.0)
    assert said(waits, 3.0) == [
        "http://h: connection refused. Trying for 297 s more (TINKEX_GIVE_UP_S). " + HOW_TO_STOP
    ]
    assert waits.wait("a", REFUSED, GIVE_UP, since=0.0, notice_s=3.0) == math.inf
    assert waits.due(10.0) == ([], math.inf)
    assert waits.over("a", 12.0) == "http://h answers again after 12 s."
    assert waits.over("a", 13.0) is None


def test_a_short_wait_is_not_mentioned():
    waits = WaitLog()
    waits.wait("a", REFUSED, GIVE_UP, since=0.0, notice_s=3.0)
    assert waits.over("a", 2.0) is None
    assert waits.due(100.0) == ([], math.inf)


def test_a_request_that_gives_up_says_nothing_more_its_error_does():
    waits = WaitLog()
    waits.wait("a", REFUSED, GIVE_UP, since=0.0, notice_s=3.0)
    assert len(said(waits, 3.0)) == 1
    assert waits.leave("a")
    assert waits.over("a", 5.0) is None


def test_requests_that_wait_for_the_same_cause_share_their_lines():
    waits = WaitLog()
    for number in range(200):
        waits.wait(number, REFUSED, GIVE_UP, since=number / 1000, notice_s=3.0)
    assert len(said(waits, 3.0)) == 1
    waits.leave(7)
    lines = [waits.over(number, 9.0) for number in range(200)]
    assert [line for line in lines if line] == ["http://h answers again after 9 s."]


def test_the_others_do_not_wait_for_what_is_over_until_they_fail_again():
    waits = WaitLog()
    for name in ("a", "b"):
        waits.wait(name, REFUSED, GIVE_UP, since=0.0, notice_s=3.0)
    assert len(said(waits, 3.0)) == 1
    assert waits.over("a", 20.0)  # "b" sleeps until its next attempt
    assert waits.due(30.0) == ([], math.inf)
    waits.wait("b", REFUSED, GIVE_UP, since=0.0, notice_s=3.0)
    assert said(waits, 22.9) == []
    assert len(said(waits, 23.1)) == 1
    assert waits.over("b", 24.0) == "http://h answers again after 4 s."


def test_the_longest_limit_of_each_setting_is_named():
    waits = WaitLog()
    waits.wait("a", REFUSED, Limit(300.0, "TINKEX_GIVE_UP_S"), since=0.0, notice_s=3.0)
    waits.wait("b", REFUSED, Limit(301.0, "TINKEX_GIVE_UP_S"), since=1.0, notice_s=3.0)
    waits.wait("c", REFUSED, Limit(3600.0, "results: X"), since=1.0, notice_s=3.0)
    [line] = said(waits, 3.0)
    assert "Trying for 298 s more (TINKEX_GIVE_UP_S), or for 60 min more (results: X). " in line


def test_another_cause_of_the_same_wait_is_said_too_and_the_end_only_once():
    waits = WaitLog()
    waits.wait("a", REFUSED, GIVE_UP, since=0.0, notice_s=3.0)
    assert len(said(waits, 3.0)) == 1
    assert waits.wait("a", FULL, GIVE_UP, since=0.0, notice_s=3.0) == 3.0
    assert said(waits, 5.0) == [
        "http://h: The disk is full. Trying for 295 s more (TINKEX_GIVE_UP_S). " + HOW_TO_STOP
    ]
    assert waits.over("a", 9.0) == "http://h answers again after 9 s."


def test_the_same_reason_is_said_once_though_a_queue_and_a_request_wait_for_it():
    waits = WaitLog()
    waits.wait("a", FULL, GIVE_UP, since=0.0, notice_s=3.0)
    waits.wait("b", queued("Training of m", "The disk is full."), Limit(), since=0.0, notice_s=3.0)
    assert len(said(waits, 3.0)) == 1
    assert said(waits, 100.0) == []
    assert [waits.over(name, 9.0) for name in ("a", "b")].count(None) == 1


def test_a_queue_names_what_waits_and_under_load_it_is_quiet_for_a_minute():
    waits = WaitLog()
    for number in range(3):
        waits.wait(number, queued(f"Training of m{number}"), Limit(), since=0.0, notice_s=3.0)
    assert said(waits, 3.0) == [
        "Training of m0 (and 2 more) is paused: 3 models are training, and 2 wait. "
        "Waiting without a time limit. " + HOW_TO_STOP
    ]
    assert waits.over(1, 4.0) == "Training of m0 (and 2 more) goes on after 4 s."
    waits.wait(1, queued("Training of m1"), Limit(), since=5.0, notice_s=3.0)
    assert said(waits, 60.0) == []
    assert len(said(waits, 63.0)) == 1


def test_a_reason_is_one_line_and_not_too_long():
    waits = WaitLog()
    cause = Cause("status 500", "http://h", "first\nsecond " + "x" * 5000)
    waits.wait("a", cause, GIVE_UP, since=0.0, notice_s=3.0)
    [line] = said(waits, 3.0)
    assert "first second" in line
    assert "\n" not in line
    assert len(line) < 600


# -- with sockets ------------------------------------------------------------------------------------

WAITING = "tinkex.waiting"


def lines(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == WAITING]


def client(url: str, **settings: float) -> tinkex.ServiceClient:
    times = {"wait_notice_s": 0.2, "first_contact_s": 20.0, **settings}
    return tinkex.ServiceClient(settings=Settings.resolve(base_url=url, telemetry=False, **times))


def test_r1a_the_first_call_to_a_dead_server_says_so_once(caplog):
    url = f"http://127.0.0.1:{free_port()}"
    service = client(url, first_contact_s=1.2)
    asked = [service._get_server_capabilities() for _ in range(20)]
    for each in asked:
        with pytest.raises(tinkex.APIConnectionError) as caught:
            each.result(20)
    (line,) = lines(caplog)
    assert re.sub(r"\d s more", "1 s more", line) == (
        f"{url}: connection refused. Trying for 1 s more (TINKEX_FIRST_CONTACT_S). {HOW_TO_STOP}"
    )
    assert str(caught.value).startswith(f"{url}: connection refused; gave up after ")
    assert caplog.records[0].levelno == logging.WARNING


def test_r1a_a_server_that_accepts_and_is_silent_is_named_too(caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = client(url)
        asked = service._get_server_capabilities()
        until(lambda: lines(caplog))
        assert re.match(rf"{url}: no answer yet. Trying for [12]\d s more", lines(caplog)[0])
        asked.cancel()
        service.close("errored").result(5)


@contextlib.contextmanager
def flaky_server(fails):
    """A fake service over HTTP; `fails()` is the reply instead of its own, or None."""
    fake = FakeService()

    def answer(request):
        found = fails()
        return found or fake_reply(fake, request)

    with stub_server(answer) as stub:
        yield stub


def fake_reply(fake, request) -> Reply:
    # Only what the tests below need of the protocol.
    path = request.path.removeprefix("/api/v1/")
    bodies = {
        "client/config": {},
        "client/dynamic_config": {},
        "get_server_capabilities": {"supported_models": []},
    }
    return reply_json(bodies.get(path, {}))


@pytest.mark.parametrize(
    ("status", "detail", "expected"),
    [
        (503, "The disk is full (1 MiB left). New requests are refused.", "status"),
        (500, "it failed", "status"),
        (429, "too many requests", "busy"),
        (408, "too slow", "status"),
    ],
)
def test_r1c_a_service_that_refuses_for_now_is_quoted_and_the_end_is_told(
    caplog, status, detail, expected
):
    failing = threading.Event()
    with flaky_server(
        lambda: reply_json({"detail": detail}, status) if failing.is_set() else None
    ) as stub:
        service = client(stub.url, give_up_s=30.0)
        service.get_server_capabilities()
        failing.set()
        asked = [service._get_server_capabilities() for _ in range(10)]
        until(lambda: lines(caplog))
        time.sleep(0.3)
        failing.clear()
        for each in asked:
            each.result(30)
        service.close("success").result(5)
    first, last = lines(caplog)
    assert first.startswith(f"{stub.url}: {detail.rstrip('.')}. ")
    assert " s more (TINKEX_GIVE_UP_S). " in first
    assert first.endswith(HOW_TO_STOP)
    assert last.startswith(f"{stub.url} ")
    assert last.endswith(" s.")


def test_r1b_a_server_that_stops_while_results_are_polled_is_told_with_both_limits(caplog):
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:9", wait_notice_s=0.2, telemetry=False)
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("retrieve_future", *[Lost()] * 4)
        training.optim_step(types.AdamParams()).result(20)
    first, last = lines(caplog)
    assert "Trying for 60 min more (results: TINKEX_RECONNECT_S)" in first
    assert last.startswith("http://127.0.0.1:9 answers again after ")


def test_a_queue_is_told_and_its_end(caplog):
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:9", wait_notice_s=0.1, telemetry=False)
    body = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}
    paused = Answer(status=408, body={**body, "queue_state_reason": "two jobs ahead"})
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("retrieve_future", *[paused] * 4)
        training.optim_step(types.AdamParams()).result(20)
    subject = f"Training of {training.model_id}"
    first, last = lines(caplog)
    assert first == (
        f"{subject} is paused: two jobs ahead. Waiting without a time limit. {HOW_TO_STOP}"
    )
    assert last.startswith(f"{subject} goes on after ")


def test_a_sample_that_waits_names_the_limit_of_samples(caplog):
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:10", wait_notice_s=0.1, telemetry=False)
    body = {"type": "try_again", "request_id": "r", "queue_state": "paused_capacity"}
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        sampling = service.create_sampling_client(base_model="fake/model")
        fake.script("retrieve_future", *[Answer(status=408, body=body)] * 4)
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        sampling.sample(prompt, 1, params).result(20)
    assert "for 120 min more (RetryConfig.progress_timeout)" in lines(caplog)[0]


def test_two_hundred_requests_to_a_lost_server_give_two_lines(caplog):
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:13", wait_notice_s=0.2, telemetry=False)
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        service.get_server_capabilities()
        fake.script("get_server_capabilities", *[Lost()] * 100_000)
        asked = [service._get_server_capabilities() for _ in range(200)]
        until(lambda: lines(caplog))
        fake._scripts["get_server_capabilities"].clear()
        for each in asked:
            each.result(30)
    first, last = lines(caplog)
    assert re.match(
        r"http://127.0.0.1:13: connection reset. Trying for (300|2\d\d) s more \(TINKEX_", first
    )
    assert last.startswith("http://127.0.0.1:13 answers again after ")


def test_closing_a_session_of_a_dead_server_names_its_own_short_limit(caplog, monkeypatch):
    monkeypatch.setattr("tinkex.client.session.FINISH_RETRY_S", 0.6)
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:12", wait_notice_s=0.1, telemetry=False)
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    training = service.create_lora_training_client("fake/model")
    fake.script(f"sessions/{training.holder.session_id}/finish", *[Lost()] * 100)
    service.close("success").result(10)
    waited, failed = [record.getMessage() for record in caplog.records]
    assert re.match(r"http://127.0.0.1:12: connection reset. Trying for [01] s more. ", waited)
    assert failed.startswith("the server was not notified of the end of the session: http://127.")
    assert "\n" not in failed


def test_r1b_a_server_that_hangs_is_noticed_by_the_heartbeat(caplog, monkeypatch):
    monkeypatch.setattr("tinkex.client.session.HEARTBEAT_EVERY_S", 0.05)
    monkeypatch.setattr(instrumentation, "METRICS", instrumentation.Metrics())  # of this test only
    fake = FakeService()
    settings = Settings(base_url="http://127.0.0.1:11", wait_notice_s=0.1, telemetry=False)
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("session_heartbeat", *[Lost(slow=True)] * 8)
        until(lambda: len(fake._scripts["session_heartbeat"]) < 5)
        assert not lines(caplog)  # nothing waits
        fake.script("session_heartbeat", *[Lost(slow=True)] * 8)
        fake.script("retrieve_future", *[Answer(status=408, body={"type": "try_again"})] * 1000)
        step = training.optim_step(types.AdamParams())
        until(lambda: len(lines(caplog)) == 2)
        fake._scripts["retrieve_future"].clear()
        step.result(10)
    first, last = lines(caplog)
    assert first.startswith("http://127.0.0.1:11: no response in time. Trying for 60 min more")
    assert last.startswith("http://127.0.0.1:11 answers again after ")


@pytest.fixture
def errors_only():
    logger = logging.getLogger("tinkex")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)  # other loggers remember what they inherit until this call


@pytest.mark.parametrize("how", ["off", "level"])
def test_silent_where_a_program_asked_for_silence(request, caplog, monkeypatch, how):
    monkeypatch.setenv("TINKEX_WAIT_NOTICE_S", "off" if how == "off" else "0.1")
    if how == "level":
        request.getfixturevalue("errors_only")
    monkeypatch.setenv("TINKEX_FIRST_CONTACT_S", "0.6")
    service = tinkex.ServiceClient(base_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(tinkex.APIConnectionError):
        service.get_server_capabilities()
    assert lines(caplog) == []


@pytest.mark.parametrize("text", ["-1", "soon", "nan"])
def test_a_threshold_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("TINKEX_WAIT_NOTICE_S", text)
    with pytest.raises(tinkex.TinkerError, match="WAIT_NOTICE_S"):
        Settings.resolve(base_url="local")


PROGRAM = """
import sys, aiohttp, tinkex
{setup}
try:
    tinkex.ServiceClient(base_url="http://127.0.0.1:{port}").get_server_capabilities()
except tinkex.TinkerError:
    pass
"""


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", "{url}: connection refused. Trying for"),
        (
            "import logging; logging.basicConfig(format='%(levelname)s %(name)s %(message)s')",
            "WARNING tinkex.waiting {url}: connection refused. Trying for",
        ),
        ("import logging; logging.basicConfig(level='ERROR')", None),
        ("import logging; logging.getLogger().addHandler(logging.NullHandler())", None),
    ],
    ids=["plain", "format", "root level", "null handler"],
)
def test_what_a_program_shows_on_stderr(setup, expected):
    port = free_port()
    env = {"TINKEX_FIRST_CONTACT_S": "0.7", "TINKEX_WAIT_NOTICE_S": "0.2", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM.format(setup=setup, port=port))],
        env=env,
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    if expected is None:
        assert done.stderr == ""
    else:
        [line] = done.stderr.splitlines()
        assert line.startswith(expected.format(url=f"http://127.0.0.1:{port}"))
        assert line.endswith(HOW_TO_STOP)
