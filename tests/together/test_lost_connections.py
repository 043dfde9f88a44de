"""The server closes connections of clients whose machine or network has vanished."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lost_connections_program.py")
#: A separate network namespace, without root if the system allows it.
NEW_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]


def test_connections_of_vanished_clients_are_closed(
    tmp_path: Path,
) -> None:
    try:
        subprocess.run([*NEW_NETWORK, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system does not allow network namespaces: {error}")
    done = subprocess.run(
        [*NEW_NETWORK, sys.executable, PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Seven connections and that of the client that submitted a sample.
    assert found["held"] == 8
    assert found["more_while_held"] == 7
    assert found["left"] == 0
    # The timeout is 3 s instead of a minute; keepalive probes are one second apart.
    assert 1 < found["closed_after_s"] < 6
    # The client's own connection existed before.
    assert found["more_after"] <= 0
    # The samples of both streams; the sample of `asample` continues.
    assert found["cancelled"] == 2
