"""The recipes train on a real server, with this client and with the official SDK."""

import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from serving import TINY, Server
from tinkex import data
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.recipes import common, distill, dpo, evaluate, rl, sft
from together.official_sdk import run_program

PROGRAM = Path(__file__).with_name("recipes_program.py")
RECIPES = Path(common.__file__).parent
pytestmark = pytest.mark.timeout(120)  # with the start of the server

CHATS = [
    {"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}, captain."} for n in range(12)
]


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(base_url=server.url) as service:
        yield service


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[data.Example]:
    return [example for row in CHATS for example in data.examples(tokenizer, row)]


@pytest.mark.parametrize("name", ["sft", "dpo", "rl", "distill", "evaluate"])
def test_a_recipe_is_one_file_short_enough_to_copy(name: str) -> None:
    assert len((RECIPES / f"{name}.py").read_text().splitlines()) < 150


def test_supervised_training_lowers_the_held_out_loss_and_goes_on_where_it_stopped(
    service: Any, examples: list[data.Example]
) -> None:
    settings = sft.Settings(model=TINY, steps=12, rank=8, learning_rate=1e-2, save_every=4)
    steps = list(sft.train(service, examples[:10], settings, held_out=examples[10:]))
    assert [step.number for step in steps] == list(range(13))
    assert steps[-1].metrics["held_out_loss"] < steps[0].metrics["held_out_loss"] - 0.5
    assert steps[-1].metrics["loss"] < steps[1].metrics["loss"] - 0.5
    assert [step.number for step in steps if step.checkpoint] == [4, 8, 12]
    assert steps[-1].sampler

    saved = common.Resume(checkpoint=steps[4].checkpoint, step=4)
    again = list(sft.train(service, examples[:10], settings, resume=saved))
    assert [step.number for step in again] == list(range(5, 13))
    for first, second in zip(steps[5:], again, strict=True):
        assert second.metrics["loss"] == pytest.approx(first.metrics["loss"], abs=1e-4)


def test_a_run_that_is_stopped_saves_its_last_step(
    service: Any, examples: list[data.Example]
) -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    settings = sft.Settings(model=TINY, steps=50, rank=2)
    steps = list(sft.train(service, examples, settings, stop=stop))
    assert [step.number for step in steps] == [1, 2, 3]
    assert steps[-1].checkpoint
    assert steps[-1].checkpoint.endswith("step-00003")


def test_preferences_raise_the_margin_with_the_gradient_of_the_dpo_loss(
    service: Any, tokenizer: Tokenizer
) -> None:
    pairs = [
        data.pair(tokenizer, {**row, "chosen": row["completion"], "rejected": "No idea."})
        for row in CHATS
    ]
    settings = dpo.Settings(model=TINY, steps=8, rank=8, learning_rate=3e-3, batch_size=4)
    steps = list(dpo.train(service, pairs[:10], settings, held_out=pairs[10:]))
    assert steps[0].metrics["held_out_margin"] == pytest.approx(0, abs=1e-4)
    assert steps[0].metrics["held_out_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert steps[-1].metrics["held_out_margin"] > 0.3
    assert steps[-1].metrics["held_out_accuracy"] == 1.0
    assert steps[-1].metrics["loss"] < math.log(2)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_a_reward_goes_up(service: Any, tokenizer: Tokenizer, loss: str) -> None:
    """Answers with fewer different tokens: easy to learn for a random model."""

    def reward(row: Any, answer: str) -> float:
        return answer.count("e") / 4

    settings = rl.Settings(
        model=TINY,
        steps=6,
        rank=8,
        learning_rate=2e-2,
        group_size=12,
        max_tokens=6,
        loss=loss,
        substeps=2 if loss == "ppo" else 1,
    )
    rows = [{"prompt": "the sea"}, {"prompt": "the ship"}]
    steps = list(rl.train(service, tokenizer, rows, reward, settings))
    assert steps[-1].metrics["reward"] > steps[0].metrics["reward"] + 0.2
    assert steps[0].metrics["kl"] == pytest.approx(0, abs=1e-3)
    assert steps[-1].metrics["kl"] > 0.01


def test_equal_rewards_teach_nothing(service: Any, tokenizer: Tokenizer) -> None:
    settings = rl.Settings(model=TINY, steps=1, rank=2, group_size=2, max_tokens=2)
    [step] = rl.train(service, tokenizer, [{"prompt": "a"}], lambda row, answer: 0.1, settings)
    assert step.metrics["informative"] == 0
    assert step.tokens == 0
    assert step.checkpoint


def test_a_student_comes_near_to_its_teacher(
    service: Any, tokenizer: Tokenizer, examples: list[data.Example]
) -> None:
    taught = sft.Settings(model=TINY, steps=10, rank=8, learning_rate=1e-2)
    *_, last = sft.train(service, examples, taught)
    teacher = service.create_sampling_client(model_path=last.sampler)
    settings = distill.Settings(
        model=TINY, steps=10, rank=8, learning_rate=1e-2, max_tokens=6, prompts_per_step=4
    )
    rows = [{"prompt": row["prompt"]} for row in CHATS]
    steps = list(distill.train(service, teacher, tokenizer, rows, settings))
    distances = [step.metrics["kl"] for step in steps]
    assert sum(distances[-4:]) < 0.9 * sum(distances[:4])


def test_many_answers_are_scored_at_once(service: Any, tokenizer: Tokenizer) -> None:
    sampling = service.create_sampling_client(base_model=TINY)
    rows = [{"prompt": str(n), "n": n} for n in range(40)]
    seen: list[tuple[int, int]] = []
    found = evaluate.evaluate(
        sampling,
        tokenizer,
        rows,
        lambda row, answer: row["n"] % 2,
        samples=2,
        temperature=1.0,
        max_tokens=3,
        report=lambda done, total: seen.append((done, total)),
    )
    assert len(found.answers) == 80
    assert found.mean == 0.5
    assert found.standard_error == pytest.approx(0.5 / math.sqrt(79))
    assert seen[-1] == (40, 40)
    with pytest.raises(ValueError, match="no rows"):
        evaluate.evaluate(sampling, tokenizer, [], lambda row, answer: 0)


@pytest.mark.parametrize(
    "recipe", [sft.train, dpo.train, rl.train, distill.train, evaluate.evaluate]
)
def test_the_example_in_its_docstring_runs(
    recipe: Any, service: Any, tokenizer: Tokenizer, examples: list[data.Example]
) -> None:
    code = textwrap.dedent(str(recipe.__doc__).partition("Example:\n")[2])
    seen: list[object] = []
    given = {
        "service": service,
        "tokenizer": tokenizer,
        "sampling": service.create_sampling_client(base_model=TINY),
        "MODEL": TINY,
        "examples": examples,
        "pairs": [data.Pair(examples[0], examples[1])],
        "print": lambda *values: seen.append(values),
    }
    modules = {"sft": sft, "dpo": dpo, "rl": rl, "distill": distill, "evaluate": evaluate}
    exec(code, {**given, **modules})  # noqa: S102
    assert seen


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "sft", (16, 1e-3, 135e6)),
        ("Qwen/Qwen3-0.6B", "sft", (32, 5e-4, 0.6e9)),
        ("Qwen/Qwen3-8B", "dpo", (32, 3e-5, 8e9)),
        ("meta-llama/Llama-3.1-70B-Instruct", "rl", (32, 1e-4, 70e9)),
        ("test/tiny", "sft", (32, 5e-4, None)),
    ],
)
def test_defaults_follow_the_size_in_the_name(model: str, method: Any, expected: Any) -> None:
    found = common.defaults(model, method)
    assert (found.rank, found.learning_rate, found.parameters) == expected


@pytest.mark.sdk
@pytest.mark.timeout(100)
def test_the_recipes_run_with_the_official_sdk(server: Server, tiny_model: Path) -> None:
    source = Path(common.__file__).parents[2]
    found = run_program("0.36.0", PROGRAM, TINY, tiny_model, source, server=server, timeout_s=90)
    assert found["sdk"] == "tinker.types"
    assert found["sft"][-1] < found["sft"][0]
    assert found["dpo"][-1] > found["dpo"][0]
    assert found["resumed"] == [3]
    assert len(found["rl"]) == len(found["distill"]) == 2
    assert found["evaluated"] == 4
