"""`TINKER_LOG` (§2.5), each test in its own process."""

import os
import subprocess
import sys
import textwrap

import pytest


def stderr_of(program, **env):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=40,
        check=True,
    )
    return done.stderr


USE = """
import logging, sys
{before}
import tinkex
from tinkex.testing import FakeService
{after}
with FakeService().client(api_key="tml-secret-key") as service:
    service.get_server_capabilities()
logging.getLogger("tinkex.x").info("told")
"""


UNTOUCHED = "assert logging.getLogger().handlers == []; assert logging.getLogger().level == 30"


def test_debug_logs_requests_without_secrets_and_leaves_the_root_logger_alone():
    said = stderr_of(USE.format(before="", after=UNTOUCHED), TINKER_LOG="debug")
    assert "- DEBUG] POST /api/v1/client/config" in said
    assert "get_server_capabilities: 200" in said
    assert said.count("told") == 1
    assert "tml-secret" not in said


def test_info_logs_less_and_nothing_is_logged_by_default():
    said = stderr_of(USE.format(before="", after=""), TINKEX_LOG="info")
    assert "told" in said
    assert "DEBUG" not in said
    assert stderr_of(USE.format(before="", after=""), TINKER_LOG="verbose") == ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_that_configures_logging_gets_each_record_once_in_its_own_format(when):
    places = {"before": "", "after": ""}
    places[when] = "logging.basicConfig(format='MINE %(message)s')"
    said = stderr_of(USE.format(**places), TINKER_LOG="debug")
    assert said.count("told") == 1
    assert "MINE told" in said
    assert "- DEBUG]" not in said


def test_the_default_service_is_logged_once():
    """Without base_url, data meant for one's own server would go to the default service unnoticed."""
    program = """
    import os, tinkex
    for name in ("TINKER_BASE_URL", "TINKEX_BASE_URL"):
        os.environ.pop(name, None)
    {use}
    """
    default = 'for _ in range(2): tinkex.Settings.resolve(api_key="tml-x")'
    said = stderr_of(program.format(use=default), TINKER_LOG="info")
    assert said.count("requests go to tinker.thinkingmachines.dev") == 1
    assert "TINKER_BASE_URL" in said
    named = 'tinkex.Settings.resolve(api_key="tml-x", base_url="http://127.0.0.1:8000")'
    assert "requests go to" not in stderr_of(program.format(use=named), TINKER_LOG="info")
