"""
How workers are replaced, without Ray: what a fleet does with the reports of its workers.

tests/together/test_fleet.py does the same with actors.
"""

import pytest

from tinkex.server.fleet import ray_cluster
from tinkex.server.fleet.plan import FleetError, WorkerGroup
from tinkex.server.fleet.ray_cluster import RayFleet
from tinkex.server.fleet.worker_actor import WorkerReport

OLD = WorkerGroup(model="tiny", replicas=3, settings={"threads": 1})
NEW = OLD.model_copy(update={"settings": {"threads": 2}})


def report(name, group, state="ready"):
    return WorkerReport(
        name=name, state=state, node="node", pid=1, crashes=0, log="no memory", group=group
    )


class Fleet(RayFleet):
    """Workers that exist as reports. A new one gets `new_state`."""

    def __init__(self, *reports, new_state="ready"):
        self.reports = {one.name: one for one in reports}
        self.new_state = new_state
        self.log = []
        self._say = self.log.append
        self._created = {}

    def workers(self):
        return dict(self.reports)

    def start(self, name, group):
        self.log.append(f"start {name}")
        self.reports[name] = report(name, group, self.new_state)

    def stop(self, names):
        for name in names:
            self.log.append(f"stop {name}")
            del self.reports[name]

    def actions(self):
        return [one for one in self.log if one.startswith(("start ", "stop "))]


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(ray_cluster, "READY_S", -1.0)


def test_workers_are_replaced_one_after_the_other():
    fleet = Fleet(*(report(f"tiny#{number}", OLD) for number in range(2)))
    fleet.apply([NEW])
    assert fleet.actions() == [
        "start tiny#2",
        *("stop tiny#0", "start tiny#0"),
        *("stop tiny#1", "start tiny#1"),
    ]


def test_options_that_a_worker_cannot_run_with_do_not_reach_the_others():
    fleet = Fleet(*(report(f"tiny#{number}", OLD) for number in range(3)), new_state="failing")
    with pytest.raises(
        FleetError, match=r"tiny#0 is not ready; .* were left as they are"
    ) as raised:
        fleet.apply([NEW])
    assert "tinkex fleet status" in raised.value.hint
    assert fleet.actions() == ["stop tiny#0", "start tiny#0"]
    # Nor if the command is repeated, as `--watch` under systemd is.
    with pytest.raises(FleetError, match="tiny#0 is not ready"):
        fleet.apply([NEW])
    assert fleet.actions() == ["stop tiny#0", "start tiny#0"]
    # Nor if it ended because another process has its name.
    fleet.reports["tiny#0"] = report("tiny#0", NEW, "replaced")
    with pytest.raises(FleetError, match="tiny#0 ended: another process"):
        fleet.apply([NEW])
    # The old options replace it.
    fleet.new_state = "ready"
    assert list(fleet.apply([OLD]).replace) == ["tiny#0"]


def test_workers_that_an_interrupted_command_has_drained_do_not_count():
    def fleet():
        states = ("ended", "ready", "draining")
        return Fleet(*(report(f"tiny#{number}", OLD, one) for number, one in enumerate(states)))

    again = fleet()
    again.apply([OLD])
    assert again.actions() == ["stop tiny#0", "stop tiny#2", "start tiny#0", "start tiny#2"]
    # One that runs does not leave for one that has ended.
    fewer = fleet()
    fewer.scale("tiny", 1)
    assert fewer.actions() == ["stop tiny#0", "stop tiny#2"]
    more = fleet()
    more.scale("tiny", 2)
    assert more.actions() == ["stop tiny#0", "stop tiny#2", "start tiny#0"]
