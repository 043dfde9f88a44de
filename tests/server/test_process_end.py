"""How a process ended: only an end by itself counts for the requests that it was running."""

import signal

import pytest

from tinkex.server.process_end import ProcessEnd


@pytest.mark.parametrize(
    ("status", "oom_kills", "by_itself", "text"),
    [
        (-signal.SIGSEGV, 0, True, "SIGSEGV"),
        (-signal.SIGABRT, 0, True, "SIGABRT"),
        (1, 0, True, "exit status 1"),
        (0, 0, True, "exit status 0"),
        (70, 0, True, "its device failed or ran out of memory; see its log"),
        (-signal.SIGKILL, 1, True, "SIGKILL: the system had no memory left"),
        (-signal.SIGKILL, 0, False, "SIGKILL: killed from outside"),
        (-signal.SIGTERM, 1, False, "SIGTERM"),
        (-signal.SIGHUP, 0, False, "SIGHUP"),
    ],
)
def test_a_process_that_was_killed_did_not_end_by_itself(
    status: int, oom_kills: int, by_itself: bool, text: str
) -> None:
    end = ProcessEnd(status, oom_kills)
    assert end.by_itself is by_itself
    assert str(end) == text
