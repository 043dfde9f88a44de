"""Which workers a fleet starts, replaces and ends, and what is wrong with a fleet file."""

import pytest

from tinkex.server.fleet.plan import FleetError, WorkerGroup, changes, read_fleet_file


def group(model="tiny", **options):
    return WorkerGroup(model=model, **options)


def test_new_workers_get_the_lowest_free_numbers():
    wanted = group(replicas=4)
    found = changes([wanted], {"tiny#1": wanted, "tiny#4": wanted})
    assert (found.stop, list(found.start), found.replace) == ([], ["tiny#0", "tiny#2"], {})


def test_the_highest_numbers_leave_first():
    running = {f"tiny#{number}": group() for number in (2, 10, 1)}
    found = changes([group(replicas=1)], running)
    assert (found.stop, found.start) == (["tiny#2", "tiny#10"], {})


def test_workers_of_a_model_that_is_not_in_the_file_leave():
    found = changes([group("b")], {"a#0": group("a"), "b#0": group("b")})
    assert (found.stop, found.start) == (["a#0"], {})


def test_a_worker_with_other_options_is_replaced_and_one_that_does_not_answer_is_kept():
    wanted = group(replicas=3, settings={"threads": 2})
    running = {
        "tiny#0": group(replicas=1, settings={"threads": 2}),
        "tiny#1": group(settings={"threads": 1}),
        "tiny#2": None,
    }
    found = changes([wanted], running)
    assert (found.stop, found.start, list(found.replace)) == ([], {}, ["tiny#1"])


def test_applying_changes_leaves_nothing_to_change():
    wanted = [group("a", replicas=3), group("b/c", replicas=0), group("d=/models/d")]
    running = {"a#1": wanted[0], "b/c#0": wanted[1], "e#0": group("e")}
    found = changes(wanted, running)
    after = {name: had for name, had in running.items() if name not in found.stop} | found.start
    assert sorted(after) == ["a#0", "a#1", "a#2", "d#0"]
    again = changes(wanted, after)
    assert (again.stop, again.start, again.replace) == ([], {}, {})


def test_a_file_is_read(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[[workers]]\nmodel = "Qwen/Qwen3-8B"\nreplicas = 4\n'
        '[[workers]]\nmodel = "tiny=/models/tiny"\ngpus = 0\nsettings = { threads = 2 }\n'
    )
    large, tiny = read_fleet_file(file)
    assert (large.name, large.replicas, large.needs) == ("Qwen/Qwen3-8B", 4, "1 GPU, 1 CPU")
    assert (tiny.name, tiny.needs, tiny.settings) == ("tiny", "1 CPU", {"threads": 2})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers = 3", "only tables \\[\\[workers\\]\\] are allowed"),
        ('db = "x"\n[[workers]]\nmodel = "a"', "has db where only tables"),
        ("[[workers]", "is not TOML"),
        (
            '[[workers]]\nmodel = "a"\ngpus = 2',
            "gpus = 2 is not allowed: .* less than or equal to 1",
        ),
        ('[[workers]]\nmodle = "a"', "model = .* is not allowed: Field required"),
        (
            '[[workers]]\nmodel = "a"\nsettings = { db = "x" }',
            "settings of a: db is not allowed: it may have a password, which would pass through Ray",
        ),
        ('[[workers]]\nmodel = "a"\nsettings = { storage = "x" }', "storage is not allowed"),
        ('[[workers]]\nmodel = "a"\nsettings = { data = "x" }', "data is not allowed: each worker"),
        (
            '[[workers]]\nmodel = "a"\nsettings = { port = 1 }',
            "port is not allowed: only web processes use it",
        ),
        ('[[workers]]\nmodel = "a"\nsettings = { thread = 1 }', "thread is not a setting"),
        ('[[workers]]\nmodel = "a"\nsettings = { threads = "2" }', "'2' is not an integer"),
        ('[[workers]]\nmodel = "a"\nsettings = { memory_gb = -1 }', "memory_gb -1.0 is negative"),
        ('[[workers]]\nmodel = "a"\n[[workers]]\nmodel = "a=/b"', "several tables for a"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, said):
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(FleetError, match=said) as raised:
        read_fleet_file(file)
    assert raised.value.hint


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FleetError, match=r"none\.toml cannot be read: No such file"):
        read_fleet_file(tmp_path / "none.toml")
