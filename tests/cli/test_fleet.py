"""What Ray prints while `tinkex fleet` runs; `tests/together/test_fleet.py` has a Ray cluster."""

import json
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from tinkex.cli.command_group import command
from tinkex.server.fleet import ray_cluster
from tinkex.server.fleet.plan import WorkerGroup

LOST = "(raylet) The node with node id: 62594 has been marked dead"


class PrintingFleet:
    """A fleet without workers that prints what Ray prints about a lost node."""

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        sys.stdout.write(LOST + "\n")

    def workers(self) -> dict[str, WorkerGroup | None]:
        sys.stdout.write(LOST + "\n")
        return {"tiny#0": None}

    def stop(self, names: list[str]) -> None:
        sys.stdout.write(LOST + "\n")

    def close(self) -> None:
        sys.stdout.write(LOST + "\n")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("status", {"workers": [{"name": "tiny#0", "state": "waiting"}]}),
        ("down", {"stopped": ["tiny#0"]}),
    ],
)
def test_what_ray_prints_is_not_in_the_output(
    monkeypatch: pytest.MonkeyPatch, what: str, expected: object
) -> None:
    monkeypatch.setattr(ray_cluster, "RayFleet", PrintingFleet)
    result = CliRunner().invoke(command, ["fleet", what, "-f", "json"])
    assert json.loads(result.stdout) == expected
    assert LOST in result.stderr
