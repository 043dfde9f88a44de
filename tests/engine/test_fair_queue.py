"""The fair queue: which owner's work comes next."""

from tinkex.engine.sampling.fair_queue import FairQueue


def test_the_owner_with_the_fewest_tokens_comes_next_and_ties_by_arrival() -> None:
    queue: FairQueue[int] = FairQueue()
    for number, owner in enumerate("bab"):
        queue.add(owner, number, active=set())
    assert list(queue.owners()) == ["b", "a"]
    queue.charge("b", 5)
    assert list(queue.owners()) == ["a", "b"]
    assert list(queue.work_of("b")) == [0, 2]
    assert list(queue) == [0, 2, 1]


def test_idle_time_earns_no_credit() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add("old", 0, active=set())
    queue.charge("old", 1000)
    queue.add("new", 1, active=set())
    assert queue.served == {"old": 1000, "new": 1000}
    queue.remove("old", 0)
    queue.charge("new", 50)
    queue.add("old", 2, active={"new"})
    assert queue.served == {"old": 1050, "new": 1050}


def test_requeued_work_comes_before_other_work_of_its_owner() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add("a", 1, active=set())
    queue.requeue("a", 0)
    queue.insert_after("a", 0, 5)
    assert list(queue.work_of("a")) == [0, 5, 1]
    queue.retain(lambda work: work != 5)
    queue.remove("a", 0)
    assert len(queue) == 1
    queue.retain(lambda work: False)
    assert not queue.owners()
    assert list(queue.work_of("a")) == []
