"""The process of a worker, without Ray: started again, drained, bound to its actor."""

import os
import signal
import subprocess
import sys

import pytest

from processes import has_exited
from tinkex.server.fleet import worker_actor
from tinkex.server.fleet.plan import WorkerGroup
from tinkex.server.fleet.worker_actor import WorkerActor, worker_environment
from waiting import until

GROUP = WorkerGroup(model="tiny=/models/tiny", settings={"threads": 2, "deterministic": True})
#: Stands for `tinkex worker`, which needs a database; tests/together/test_fleet.py runs the real one.
PROGRAM = """
import signal, sys, time
print("loading", flush=True)
if sys.argv[1] == "bad":
    sys.exit("error: no such model")
if sys.argv[1] == "taken":
    print("another process has the name", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit("drained"))
print(f"tinkex worker {sys.argv[2]} ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _program(monkeypatch):
    def command(name, group):
        return [sys.executable, "-c", PROGRAM, group.model, name]

    monkeypatch.setattr(worker_actor, "worker_command", command)
    monkeypatch.setattr(worker_actor, "BACKOFF", worker_actor.Backoff.every(0.05))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


def test_a_killed_process_is_started_again_and_a_drained_one_is_not():
    actor = WorkerActor("tiny#0", GROUP)
    until(lambda: actor.report().state == "ready")
    first = actor.report().pid
    os.kill(first, signal.SIGKILL)
    until(lambda: actor.report().state == "ready" and actor.report().pid not in (first, None))
    assert actor.report().crashes == 1
    assert actor.drain()
    assert (actor.report().state, actor.report().pid, actor.report().crashes) == ("ended", None, 1)


def test_a_worker_that_cannot_start_says_why_and_can_be_drained():
    actor = WorkerActor("bad#0", WorkerGroup(model="bad"))
    until(lambda: actor.report().crashes >= 2)
    assert actor.report().state in ("starting", "failing")
    until(lambda: actor.report().log.endswith("error: no such model"))
    assert actor.drain()


def test_a_worker_whose_name_another_process_has_is_not_started_again():
    actor = WorkerActor("taken#0", WorkerGroup(model="taken"))
    until(lambda: actor.report().state == "replaced")
    assert (actor.report().pid, actor.report().crashes) == (None, 0)
    assert actor.report().log.endswith("another process has the name")
    assert actor.drain()
    assert actor.report().state == "replaced"


def test_a_worker_ends_with_its_actor():
    program = (
        "import time\n"
        "from tinkex.server.fleet import worker_actor\n"
        "from tinkex.server.fleet.plan import WorkerGroup\n"
        f"worker_actor.worker_command = lambda *_: {[sys.executable, '-c', PROGRAM, 'tiny', 'a#0']!r}\n"
        "actor = worker_actor.WorkerActor('a#0', WorkerGroup(model='tiny'))\n"
        "while actor.report().state != 'ready': time.sleep(0.01)\n"
        "print(actor.report().pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    actor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker = int(actor.stdout.readline())
    actor.kill()
    actor.wait()
    actor.stdout.close()
    assert has_exited(worker)


def test_a_node_without_tokens_runs_no_worker(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE")
    with pytest.raises(RuntimeError, match="without RAY_AUTH_MODE=token"):
        WorkerActor("tiny#0", GROUP)


def test_a_worker_gets_the_environment_of_its_node_without_the_token_of_ray():
    node = {"TINKEX_DB": "postgresql://db", "RAY_AUTH_TOKEN": "secret", "TINKEX_DATA": "/data"}
    env = worker_environment("Qwen/Qwen3-8B#0", GROUP, node)
    assert env == {
        "TINKEX_DB": "postgresql://db",
        "TINKEX_DATA": "/data/workers/Qwen-Qwen3-8B-0",
        "TINKEX_THREADS": "2",
        "TINKEX_DETERMINISTIC": "true",
    }
