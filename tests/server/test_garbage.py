"""The web process does not walk through its open requests for each few hundred new objects."""

import subprocess
import sys

PROGRAM = """
import gc
from tinkex.server.garbage import collect_rarely

collect_rarely()
before = sum(round["collections"] for round in gc.get_stats())
open_requests = [{"request": [number]} for number in range(10_000)]
print(sum(round["collections"] for round in gc.get_stats()) - before, gc.get_freeze_count() > 0)
"""


def test_thousands_of_requests_in_flight_start_no_search_for_garbage():
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["0", "True"]
