"""Evicted adapters are loaded again with the same state."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics.helpers import request, sample, weighted, work
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.adapter_store import AdapterStore
from tinkex.engine.adapters.adapters import TrainingAdapter, adapter_bytes
from tinkex.engine.adapters.checkpoints import WriteFailed
from tinkex.engine.adapters.memory_plan import Tier
from tinkex.engine.device import available_bytes
from tinkex.engine.engine import measured_needs
from tinkex.engine.model.targets import make_layout
from tinkex.engine.model_fit import smallest_total
from tinkex.engine.sampling import sampler
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig

LORA = LoraConfig(rank=4, seed=1)


@pytest.fixture(scope="module")
def one_adapter(engine: Engine) -> int:
    """Bytes of an adapter of LORA on the tiny model."""
    return adapter_bytes(make_layout(engine.model.targets, LORA.rank).size, torch.float32)


Make = Callable[..., Engine]


@pytest.fixture
def engine_with(tiny_folder: Path, tmp_path: Path) -> Make:
    def make(**settings: int | None) -> Engine:
        return Engine(
            EngineSettings(
                name="tiny",
                folder=tiny_folder,
                device="cpu",
                **{"kv_tokens": 512, **settings},  # type: ignore[arg-type]
                spill_folder=tmp_path / "spill",
            )
        )

    return make


def spilled(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "spill").glob("*"))


def losses(engine: Engine, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Trains the models in turn: with memory for two, each model is on disk when it is needed."""
    rng = np.random.default_rng(3)
    data = work([weighted(rng, 9), weighted(rng, 5)])
    curves: dict[str, list[float]] = {name: [] for name in names}
    for at in range(rounds):
        for name in names:
            passed = engine.run_pass(name, data, backward=True)
            curves[name].append(passed.metrics["loss:sum"])
        for name in reversed(names):
            if (at + len(name)) % 3:  # some models keep their gradient for the next round
                engine.optim_step(name, AdamParams(learning_rate=3e-3, weight_decay=0.1))
    return curves


def test_models_that_do_not_fit_memory_together_train_correctly(
    engine_with: Make, one_adapter: int, tmp_path: Path
) -> None:
    names = ["a", "bb", "ccc", "dd"]
    small, large = engine_with(adapter_bytes=2 * one_adapter + 10), engine_with()
    curves = []
    for engine in (large, small):
        for name in names:
            lora = LoraConfig(rank=4, seed=len(name), train_mlp=name != "bb")
            engine.create(name, lora, AdamOptimizerConfig())
        curves.append(losses(engine, names, rounds=4))
    assert curves[0] == curves[1]
    assert large._adapters.usage(Tier.DISK).count == 0
    use = {tier: small._adapters.usage(tier).count for tier in Tier}
    assert use == {Tier.DEVICE: 2, Tier.HOST: 0, Tier.DISK: 2}
    assert len(spilled(tmp_path)) == 2
    for name in names:
        small.drop(name)
    assert not spilled(tmp_path)


def test_the_most_recently_used_adapter_stays(engine_with: Make, one_adapter: int) -> None:
    engine = engine_with(adapter_bytes=2 * one_adapter)
    for name in ("a", "b"):
        engine.create(name, LORA, AdamOptimizerConfig())
    engine.optim_step("a", AdamParams())
    engine.create("c", LORA, AdamOptimizerConfig())
    tiers = {name: entry.tier for name, entry in engine._adapters._entries.items()}
    assert tiers == {"a": Tier.DEVICE, "b": Tier.DISK, "c": Tier.DEVICE}
    assert engine.has("b")  # an evicted model still exists


def test_a_pass_continues_after_its_adapter_was_evicted(
    engine_with: Make, one_adapter: int
) -> None:
    engine = engine_with(adapter_bytes=one_adapter)
    engine.create("a", LORA, AdamOptimizerConfig())
    rng = np.random.default_rng(0)
    running = engine.begin_pass("a", work([weighted(rng, 6), weighted(rng, 4)]), backward=True)
    engine.run_micro_batch([(running, 1)])
    engine.create("b", LORA, AdamOptimizerConfig())
    assert engine._adapters.usage(Tier.DISK).count == 1
    engine.run_micro_batch([(running, 1)])
    assert len(running.output().loss_fn_outputs) == 2
    assert engine.optim_step("b", AdamParams())["grad_norm:mean"] == 0
    assert engine.optim_step("a", AdamParams())["grad_norm:mean"] > 0


def test_a_micro_batch_keeps_its_adapters_together(engine_with: Make, one_adapter: int) -> None:
    engine = engine_with(adapter_bytes=one_adapter)  # a running micro-batch may exceed the budget
    rng = np.random.default_rng(0)
    passes = []
    for name in ("a", "b"):
        engine.create(name, LORA, AdamOptimizerConfig())
        passes.append(engine.begin_pass(name, work([weighted(rng, 6)]), backward=True))
    engine.run_micro_batch([(one, 1) for one in passes])
    for name in ("a", "b"):
        assert engine.optim_step(name, AdamParams())["grad_norm:mean"] > 0
    passes.clear()
    gc.collect()
    engine.create("c", LORA, AdamOptimizerConfig())
    assert engine._adapters.usage(Tier.DEVICE).count == 1


def test_sampler_adapters_count_and_are_evicted_first(
    engine_with: Make, one_adapter: int, tmp_path: Path
) -> None:
    engine = engine_with(
        adapter_bytes=one_adapter * 3 // 2
    )  # one training adapter and two sampler adapters
    engine.create("a", LORA, AdamOptimizerConfig())
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        engine.save("a", folder, optimizer=False)
    asked = request([1, 2, 3], max_tokens=4, seed=1, stop=[])
    first = [sample(engine, [asked], [folder])[0] for folder in folders]
    assert engine._sampler is not None
    assert [Path(key).name for key in engine._sampler._adapters] == ["two", "three"]
    assert engine._adapters.usage(Tier.DEVICE).count == 1
    assert [sample(engine, [asked], [folder])[0] for folder in folders] == first


def saved_adapters(engine: Engine, folder: Path, count: int) -> list[Path]:
    """Different adapters of LORA's size."""
    folders = [folder / str(seed) for seed in range(count)]
    for seed, one in enumerate(folders):
        engine.create("saved", LoraConfig(rank=4, seed=seed), AdamOptimizerConfig())
        data = work([weighted(np.random.default_rng(seed), 6)])
        engine.run_pass("saved", data, backward=True)
        engine.optim_step("saved", AdamParams(learning_rate=0.1))
        engine.save("saved", one, optimizer=False)
        engine.drop("saved")
    return folders


@pytest.mark.parametrize("limit", ["adapters", "everything"])
def test_samples_of_more_adapters_than_fit_wait_for_memory(
    engine_with: Make, one_adapter: int, tmp_path: Path, limit: str
) -> None:
    large = engine_with()
    folders = saved_adapters(large, tmp_path, 9)
    # One training adapter and two sampler adapters, which take a quarter each.
    room = one_adapter * 3 // 2
    settings = {"adapter_bytes": room}
    if limit == "everything":
        smallest = large.plan.base + large.plan.reserved + 600 * large.model.cache_bytes_per_token
        settings["memory_bytes"] = smallest + room + 16 * large.model.bytes_per_token
    small = engine_with(**settings)
    folders_of = [*folders, *reversed(folders), None, folders[0]]
    asked = [
        request([1, 2, seed % 5], max_tokens=12, seed=seed, stop=[])
        for seed in range(len(folders_of))
    ]
    expected = [
        sample(large, [one], [folder])[0] for one, folder in zip(asked, folders_of, strict=True)
    ]
    small.create("a", LORA, AdamOptimizerConfig())
    for ticket, (one, folder) in enumerate(zip(asked, folders_of, strict=True)):
        small.submit(ticket, one, adapter=folder)
    data = work([weighted(np.random.default_rng(0), 6)])
    outcomes = {}
    while small.sampling:
        outcomes |= {finished.ticket: finished.outcome for finished in small.advance()}
        assert small.stats().sampler_adapters_bytes <= room
        small.run_pass("a", data, backward=True)  # training continues meanwhile
    for ticket, answer in enumerate(expected):
        found = outcomes[ticket]
        assert not isinstance(found, Exception), found
        assert found.sequences[0].tokens == answer.sequences[0].tokens
    assert small.optim_step("a", AdamParams())["grad_norm:mean"] > 0


def finished_tickets(engine: Engine) -> list[int]:
    """Tickets of all samples, in the order in which they finished."""
    order: list[int] = []
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception), finished.outcome
            order.append(finished.ticket)
    return order


ALICE, CAROL, BOB, DAVE, BASE, SHORT = range(1, 7)


def test_a_request_waiting_for_adapter_memory_blocks_only_others_that_need_memory(
    engine_with: Make, one_adapter: int, tmp_path: Path
) -> None:
    folders = saved_adapters(engine_with(), tmp_path, 4)
    engine = engine_with(adapter_bytes=one_adapter // 2)  # two of samplers
    long = request([1, 2, 3], max_tokens=100, seed=1, stop=[])
    short = request([1, 2, 3], max_tokens=2, seed=1, stop=[])
    engine.submit(ALICE, long, adapter=folders[0], owner="alice")
    engine.submit(CAROL, long, adapter=folders[1], owner="carol")
    while engine.stats().sequences_running < 2:
        engine.advance()
    engine.submit(BOB, short, adapter=folders[2], owner="bob")
    engine.advance()
    # Bob has been served more tokens than Dave, so Dave comes first, but Bob's adapter is loading.
    engine._sampler.scheduler._waiting.charge("bob", 50)  # type: ignore[union-attr]
    engine.submit(DAVE, short, adapter=folders[3], owner="dave")
    engine.submit(BASE, short, adapter=None, owner="erin")
    engine.submit(SHORT, short, adapter=folders[0], owner="alice")
    order = finished_tickets(engine)
    assert set(order[:2]) == {BASE, SHORT}
    assert order[2] in {ALICE, CAROL}  # its adapter becomes idle and is evicted
    assert order.index(BOB) < order.index(DAVE)


def test_a_stream_of_samples_does_not_block_another_adapter(
    engine_with: Make, one_adapter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MAX_ROOM_WAIT_S", 0.0)
    folders = saved_adapters(engine_with(), tmp_path, 2)
    engine = engine_with(adapter_bytes=one_adapter // 4)  # one of a sampler
    asked = request([1, 2, 3], max_tokens=12, seed=1, stop=[])
    tickets = iter(range(2, 100))
    engine.submit(next(tickets), asked, adapter=folders[0], owner="alice")
    while not engine.stats().sequences_running:
        engine.advance()
    engine.submit(1, asked, adapter=folders[1], owner="bob")
    answered: set[int] = set()
    while 1 not in answered:
        # Another sample of Alice starts before the previous one ends.
        engine.submit(next(tickets), asked, adapter=folders[0], owner="alice")
        answered |= {finished.ticket for finished in engine.advance()}
    finished_tickets(engine)


def test_a_usual_adapter_fits_into_the_memory_that_is_said_to_be_enough(
    engine_with: Make, tmp_path: Path
) -> None:
    """By the shares of the plan alone, the part for adapters would be half as large as one."""
    probe = engine_with()
    needs = measured_needs(probe.model)
    both = needs.training_adapter + needs.sampler_adapter
    enough = smallest_total(needs, probe.settings, adapters=both)
    engine = engine_with(memory_bytes=enough + 10_000, kv_tokens=None)
    assert both <= engine.plan.adapters < 1.1 * both
    engine.create("a", LoraConfig(rank=32, seed=1), AdamOptimizerConfig())
    engine.save("a", tmp_path / "saved", optimizer=False)
    asked = request([1, 2, 3], max_tokens=4, seed=1, stop=[])
    assert sample(engine, [asked], [tmp_path / "saved"])[0].sequences[0].tokens
    assert engine._adapters.usage(Tier.DEVICE).count == 1  # both at once
    less = engine_with(memory_bytes=enough - 500_000, kv_tokens=None)
    with pytest.raises(UserFailure, match=r"adapter of rank 32 needs .*; the server has .* for"):
        less.create("a", LoraConfig(rank=32, seed=1), AdamOptimizerConfig())


def test_an_adapter_that_can_never_fit_is_refused_with_the_sizes(
    engine_with: Make, one_adapter: int
) -> None:
    engine = engine_with(adapter_bytes=one_adapter)
    with pytest.raises(
        UserFailure,
        match=r"adapter of rank 8 needs \d+\.\d kB; the server has \d+\.\d kB for adapters "
        r"\(.* in total: base model .*smaller rank",
    ):
        engine.create("a", LoraConfig(rank=8), AdamOptimizerConfig())
    assert not engine.has("a")


def test_a_pass_that_does_not_fit_evicts_idle_adapters_first(
    engine_with: Make, one_adapter: int
) -> None:
    # With this limit, idle adapters must be evicted for a long sequence.
    probe = engine_with()
    base, per_token = probe.plan.base, probe.model.bytes_per_token
    length = 3 * one_adapter // per_token
    limit = base + 2 * one_adapter + length * per_token
    engine = engine_with(memory_bytes=limit, adapter_bytes=3 * one_adapter, max_batch_tokens=64)
    for name in ("a", "b", "c"):
        engine.create(name, LORA, AdamOptimizerConfig())
    data = work([weighted(np.random.default_rng(0), length)])
    engine.run_pass("a", data, backward=True)
    assert engine._adapters.usage(Tier.DISK).count == 1
    too_long = work([weighted(np.random.default_rng(0), length + 2 * one_adapter // per_token)])
    with pytest.raises(UserFailure, match=r"a sequence of \d+ tokens needs about .* are free"):
        engine.run_pass("a", too_long, backward=True)
    assert engine.run_pass("b", data, backward=True).metrics["loss:sum"]


def test_an_adapter_stays_in_memory_if_the_disk_is_full(
    engine_with: Make, one_adapter: int, tmp_path: Path
) -> None:
    engine = engine_with(adapter_bytes=one_adapter, disk_reserve_bytes=2**60)
    engine.create("a", LORA, AdamOptimizerConfig())
    with pytest.raises(WriteFailed, match=r"model a cannot leave the memory .* No space left"):
        engine.create("b", LORA, AdamOptimizerConfig())
    assert not spilled(tmp_path)
    data = work([weighted(np.random.default_rng(0), 6)])
    engine.run_pass("a", data, backward=True)
    assert engine.optim_step("a", AdamParams())["grad_norm:mean"] > 0


def test_an_engine_empties_the_spill_folder_at_start(engine_with: Make, tmp_path: Path) -> None:
    (tmp_path / "spill" / "7").mkdir(parents=True)
    engine_with()
    assert not spilled(tmp_path)


def test_a_temporary_spill_folder_is_deleted_with_the_engine(
    tiny_folder: Path, one_adapter: int
) -> None:
    settings = EngineSettings(
        name="t", folder=tiny_folder, device="cpu", kv_tokens=64, adapter_bytes=one_adapter
    )
    engine = Engine(settings)
    for name in ("a", "b"):
        engine.create(name, LORA, AdamOptimizerConfig())
    folder = engine._adapters._spill_folder()
    assert len(list(folder.iterdir())) == 1
    del engine
    gc.collect()
    assert not folder.exists()


@pytest.fixture
def host_store(engine: Engine, one_adapter: int) -> Iterator[AdapterStore]:
    """A store with a host tier, as on a GPU; device and host each have memory for one."""

    class Middle(AdapterStore):
        def available(self) -> int:
            return available_bytes(torch.device("cpu"))

    plan = engine.plan.__class__(**{**vars(engine.plan), "adapters": one_adapter})
    shelf = Middle(
        plan=plan,
        device=torch.device("meta"),
        base_model="tiny",
        folder=None,
        host_bytes=one_adapter,
        limit_bytes=None,
        clock=iter(range(1, 99)).__next__,
    )
    yield shelf
    for name in list(shelf._entries):
        del shelf[name]


def test_a_gpu_s_adapters_go_to_the_host_first_and_then_to_disk(
    host_store: AdapterStore, engine: Engine, one_adapter: int
) -> None:
    host_store._device = torch.device(
        "cuda", 0
    )  # enables the host tier; the adapters themselves are on the CPU
    moved: list[tuple[str, str]] = []

    class Watched(TrainingAdapter):
        def move(self, device: torch.device) -> None:
            moved.append((str(self.lora.seed), device.type))

        def allocate(self, device: torch.device) -> None:
            moved.append((str(self.lora.seed), f"from disk to {device.type}"))
            super().allocate(torch.device("cpu"))

    for seed in (1, 2, 3):
        lora = LoraConfig(rank=4, seed=seed)
        adapter = Watched(
            lora=lora,
            targets=engine.model.targets,
            seed=seed,
            model_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        host_store.add(str(seed), one_adapter, "an adapter", lambda adapter=adapter: adapter)
    tiers = {name: entry.tier for name, entry in host_store._entries.items()}
    assert tiers == {"1": Tier.DISK, "2": Tier.HOST, "3": Tier.DEVICE}
    assert moved == [("1", "cpu"), ("2", "cpu")]
    assert host_store["2"].master.any()  # its host memory is then free for adapter 3
    assert host_store["1"].master.any()
    tiers = {name: entry.tier for name, entry in host_store._entries.items()}
    assert tiers == {"1": Tier.DEVICE, "2": Tier.HOST, "3": Tier.DISK}
    assert moved[2:] == [("3", "cpu"), ("2", "cuda"), ("2", "cpu"), ("1", "from disk to cuda")]


def test_an_adapter_evicted_or_dropped_after_a_pass_frees_its_memory(
    engine_with: Make, one_adapter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(adapter_bytes=one_adapter)
    data = work([weighted(np.random.default_rng(0), 6)])

    def vectors(model_id: str) -> list[weakref.ref[torch.Tensor]]:
        adapter = engine._adapters[model_id]
        return [weakref.ref(adapter.master), weakref.ref(adapter.grad)]

    def are_free(held: list[weakref.ref[torch.Tensor]]) -> bool:
        gc.collect()
        return all(one() is None for one in held)

    engine.create("spilled", LORA, AdamOptimizerConfig())
    engine.run_pass("spilled", data, backward=True)
    held = vectors("spilled")
    engine.create("dropped", LORA, AdamOptimizerConfig())  # there is memory for one
    assert are_free(held)

    engine.run_pass("dropped", data, backward=True)
    held = vectors("dropped")
    engine.drop("dropped")
    assert are_free(held)

    engine.create("failing", LORA, AdamOptimizerConfig())
    with monkeypatch.context() as patched:
        patched.setattr(engine.model._decoder.norm, "forward", fail_in_the_model)
        with pytest.raises(RuntimeError, match="in the model"):
            engine.run_pass("failing", data, backward=True)
    held = vectors("failing")
    engine.drop("failing")
    assert are_free(held)


def fail_in_the_model(*_: object) -> None:
    raise RuntimeError("in the model")
