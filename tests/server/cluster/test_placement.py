"""Where work goes, decided from the rows of workers alone."""

from collections import Counter, defaultdict
from typing import Any

from tinkex.server.cluster.known_workers import Extra, choose_home, plan_homes
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.store.workers import Stranded, WorkerRow

BASE = "test/base"


def row(name: str, **stats: Any) -> WorkerRow:
    return WorkerRow(
        name=name, base_model=BASE, term=1, state="up", silent_s=0.0, model={}, stats=stats
    )


def a_sample(prompt: bytes) -> QueuedRequest:
    return QueuedRequest(
        owner="o", kind=Kind.SAMPLE, base_model=BASE, sequences=1, prompt_start=prompt
    )


def stranded(number: int, **fields: Any) -> Stranded:
    known = {"kind": "sample", "model_id": None, "version_id": None, "sequences": 1}
    homes = {"model_home": None, "model_term": None}
    return Stranded(request_id=f"r{number}", owner="o", **{**known, **homes, **fields})


def test_a_worker_is_dead_or_alive_by_its_state_and_its_heartbeat() -> None:
    up = row("a")
    assert up.is_live(15.0)
    assert up.takes_work(15.0)
    silent = WorkerRow(**{**{f: getattr(up, f) for f in up.__slots__}, "silent_s": 15.0})
    assert not silent.is_live(15.0)
    draining = WorkerRow(**{**{f: getattr(up, f) for f in up.__slots__}, "state": "draining"})
    assert draining.is_live(15.0)
    assert not draining.takes_work(15.0)


def test_samples_of_one_prompt_meet_on_one_worker_until_it_is_too_busy() -> None:
    rows = [row(name) for name in "abcd"]
    extra: defaultdict[str, Extra] = defaultdict(Extra)
    homes = [choose_home(a_sample(b"same"), rows, extra) for _ in range(8)]
    assert len(set(homes)) == 1
    more = Counter(choose_home(a_sample(b"same"), rows, extra) for _ in range(400))
    assert set(more) == set("abcd")
    assert max(more.values()) <= 1.3 * 408 / 4


def test_new_models_go_to_the_worker_with_the_fewest() -> None:
    rows = [row("a", models=3), row("b", models=1), row("c", models=1, waiting_for="it restarts")]
    extra: defaultdict[str, Extra] = defaultdict(Extra)
    model = QueuedRequest(owner="o", kind=Kind.CREATE_MODEL, base_model=BASE, model_id="m")
    assert [choose_home(model, rows, extra) for _ in range(4)] == ["b", "b", "a", "b"]


def test_what_was_given_lately_counts_for_two_looks() -> None:
    extra = Extra()
    extra.models = 2
    extra.age()
    extra.models += 1
    assert extra.models == 3
    extra.age()
    assert extra.models == 1
    extra.age()
    assert extra.models == 0


def test_work_of_a_dead_worker_gets_a_home() -> None:
    rows = [row("a", models=0), row("b", models=1)]
    steps = [
        stranded(0, kind="optim_step", model_id="m1", model_home="dead", model_term=4),
        stranded(1, kind="optim_step", model_id="m1", model_home="dead", model_term=4),
        # It came to the wrong worker: its model is well.
        stranded(2, kind="optim_step", model_id="m2", model_home="b", model_term=9),
        stranded(3, kind="optim_step", model_id="m3", model_home=None, model_term=0),
    ]
    homes = plan_homes(steps, rows, frozenset("ab"), BASE)
    assert homes.models == {"m1": (4, "a"), "m3": (0, "a")}
    assert homes.requests == {"r2": "b"}
    samples = plan_homes([stranded(n) for n in range(40)], rows, frozenset("ab"), BASE)
    assert set(samples.requests.values()) == {"a", "b"}
    loss = [stranded(0, kind="create_custom_loss")]
    running = frozenset({"b", "a", "Another base model"})
    assert plan_homes(loss, rows, frozenset("ab"), BASE, running=running).requests == {
        "r0": "Another base model"
    }


def test_without_a_worker_work_stays() -> None:
    homes = plan_homes([stranded(0)], [], frozenset(), BASE)
    assert (homes.models, homes.requests) == ({}, {})
