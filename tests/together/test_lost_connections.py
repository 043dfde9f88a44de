"""Clients whose machine or network is gone: nobody says goodbye for them, and nothing of them stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lost_connections_program.py")
#: A network of one's own, without being root where the system allows that.
APART = ["unshare", "--user", "--map-root-user", "--net"]


def test_connections_of_clients_that_are_gone_without_a_word_are_noticed_and_freed(
    tmp_path: Path,
) -> None:
    try:
        subprocess.run([*APART, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system gives nobody a network of their own: {error}")
    done = subprocess.run(
        [*APART, sys.executable, PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Seven guests and the client that asked for a sample, each with a descriptor here.
    assert found["held"] == 8
    assert found["more_while_held"] == 7
    assert found["left"] == 0
    # Asked for were 3 s instead of a minute; the system counts in probes a second apart.
    assert 1 < found["gone_s"] < 6
    # The client's own connection was there before.
    assert found["more_after"] <= 0
    # Both streams' samples; what was asked for by `asample` goes on.
    assert found["given_up"] == 2
