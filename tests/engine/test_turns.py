"""Whose work comes next."""

from tinkex.engine.sampling.fair_queue import Turns


def test_the_one_with_the_fewest_tokens_comes_next_and_equals_in_order_of_arrival() -> None:
    turns: Turns[int] = Turns()
    for number, owner in enumerate("bab"):
        turns.arrive(owner, number, active=set())
    assert list(turns.owners()) == ["b", "a"]
    turns.charge("b", 5)
    assert list(turns.owners()) == ["a", "b"]
    assert list(turns.of("b")) == [0, 2]
    assert list(turns) == [0, 2, 1]


def test_time_away_earns_nothing() -> None:
    turns: Turns[int] = Turns()
    turns.arrive("old", 0, active=set())
    turns.charge("old", 1000)
    turns.arrive("new", 1, active=set())
    assert turns.served == {"old": 1000, "new": 1000}
    turns.take("old", 0)
    turns.charge("new", 50)
    turns.arrive("old", 2, active={"new"})
    assert turns.served == {"old": 1050, "new": 1050}


def test_work_that_had_begun_comes_before_the_rest_of_its_owner() -> None:
    turns: Turns[int] = Turns()
    turns.arrive("a", 1, active=set())
    turns.put_back("a", 0)
    turns.put_behind("a", 0, 5)
    assert list(turns.of("a")) == [0, 5, 1]
    turns.keep(lambda work: work != 5)
    turns.take("a", 0)
    assert len(turns) == 1
    turns.keep(lambda work: False)
    assert not turns.owners()
    assert list(turns.of("a")) == []
