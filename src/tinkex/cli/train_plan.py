"""What `tinkex train` is going to do, from its options and its data: decided before any step."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinkex import data
from tinkex.cli.errors import CommandFailed
from tinkex.cli.service_options import progress_bar
from tinkex.recipes import common, dpo, rl, sft

DEFAULT_EPOCHS = {"sft": 3.0, "dpo": 1.0}
DEFAULT_RL_STEPS = 30
#: Fewer rows are all trained on; more held-out rows than this would only take time.
MIN_ROWS_TO_HOLD_OUT, MAX_HELD_OUT = 5, 200
SHOWN_PROMPTS = 2
#: How often a run saves its state, and measures held-out data.
SAVES, EVALUATIONS = 10, 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    method: common.Method
    data: Path | None
    reward: Path | None
    model: str | None
    steps: int | None
    epochs: float | None
    batch_size: int
    rank: int | None
    learning_rate: float | None
    held_out: float
    train_on: Sequence[str]
    plain: bool
    beta: float
    loss: str
    group_size: int
    max_tokens: int
    save_every: int | None
    seed: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A reward file: its function, and the rows with prompts."""

    file: Path
    reward: rl.Reward
    rows: Sequence[Mapping[str, Any]]


Steps = Callable[[Any, Any, common.Resume | None, Callable[[], bool]], Iterator[common.Step]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: its settings, and the recipe with its data."""

    settings: common.Settings
    steps: Steps
    #: What people are told: the data, and where each number comes from.
    words: Sequence[str]
    #: Of the held-out data; asked before and after.
    prompts: Sequence[Any]
    plain: bool
    #: The metric that the curve shows.
    metric: str
    #: Settings and content of the files: a run goes on only with the same.
    fingerprint: Mapping[str, Any]


def read_rows(path: Path) -> list[data.Row]:
    try:
        return data.read(path)
    except data.DataError as error:
        raise as_failure(error) from error


def method_for(rows: Sequence[data.Row], given: str | None) -> common.Method:
    """The method for rows of this kind; another one that was given is refused."""
    found: common.Method = "dpo" if rows[0].kind == "preference" else "sft"
    if given and given != found:
        raise CommandFailed(
            f"rows of kind {rows[0].kind} are for --method {found}, not {given}.",
            hint="`tinkex train --help` shows what a line of DATA may be.",
        )
    return found


def as_failure(error: data.DataError) -> CommandFailed:
    """The first sentence is the error, the others are the hint."""
    return CommandFailed(f"{error}.", hint=None)


def make_plan(
    options: Options,
    model: str,
    rows: Sequence[data.Row] | None,
    scorer: Scorer | None,
    tokenizer: Any,
    context: int | None,
) -> Plan:
    """Decide everything that is not given, and prepare the data."""
    try:
        if scorer is not None:
            return _with_reward(options, model, scorer)
        assert rows is not None
        return _with_data(options, model, rows, tokenizer, context)
    except data.DataError as error:
        raise as_failure(error) from error


def _with_data(
    options: Options, model: str, rows: Sequence[data.Row], tokenizer: Any, context: int | None
) -> Plan:
    def rendered(row: data.Row) -> list[Any]:
        if options.method == "dpo":
            return [data.pair(tokenizer, row, plain=options.plain)]
        return list(data.examples(tokenizer, row, train_on=options.train_on, plain=options.plain))

    items = []
    with progress_bar("Preparing the data") as show:
        for number, row in enumerate(rows, start=1):
            items.append((row, rendered(row)))
            show(number, len(rows))
    # The reference of dpo is sampled with one token more.
    most = math.inf if context is None else context - (options.method == "dpo")
    fitting = [(row, found) for row, found in items if max(map(longest, found)) <= most]
    if not fitting:
        raise CommandFailed(
            f"every row is longer than the model's context of {context} tokens.",
            hint="Split them, or use a model with a longer context.",
        )
    fraction = options.held_out if len(fitting) >= MIN_ROWS_TO_HOLD_OUT else 0.0
    fraction = min(fraction, MAX_HELD_OUT / len(fitting))
    kept, held = data.split(fitting, fraction, seed=options.seed)
    trained = [item for _, found in kept for item in found]
    measured = [item for _, found in held for item in found]
    epochs = options.epochs or DEFAULT_EPOCHS[options.method]
    steps = options.steps or max(1, math.ceil(epochs * len(trained) / options.batch_size))
    shared = _shared(options, model, steps)
    settings: Any
    if options.method == "dpo":
        settings = dpo.Settings(**shared, batch_size=options.batch_size, beta=options.beta)
    else:
        settings = sft.Settings(**shared, batch_size=options.batch_size)
    recipe: Any = dpo.train if options.method == "dpo" else sft.train

    def run(
        service: Any, tokenizer: Any, resume: common.Resume | None, stop: Callable[[], bool]
    ) -> Iterator[common.Step]:
        found: Iterator[common.Step] = recipe(
            service, trained, settings, held_out=measured, resume=resume, stop=stop
        )
        return found

    kind = {"chat": "chats", "completion": "completions", "preference": "preferences"}
    form = "plain text" if options.plain else "chat template of the model"
    words = [
        (
            f"{options.method} on {options.data}: {len(kept)} {kind[rows[0].kind]} to train on, "
            f"{len(held)} held out; {form}"
        ),
    ]
    if left_out := len(items) - len(fitting):
        words.append(f"{left_out} of {len(items)} rows are left out: longer than {context} tokens")
    passes = steps * options.batch_size / len(trained)
    words.append(f"{steps} steps of {options.batch_size}, {passes:.3g} times through the data")
    words.append(_rates(options, model, settings))
    return Plan(
        settings=settings,
        steps=run,
        words=words,
        prompts=[prompt_of(row) for row, _ in (held or kept)[:SHOWN_PROMPTS]],
        plain=options.plain,
        metric="margin" if options.method == "dpo" else "loss",
        fingerprint=_fingerprint(options, settings),
    )


def _with_reward(options: Options, model: str, scorer: Scorer) -> Plan:
    shared = _shared(options, model, options.steps or DEFAULT_RL_STEPS)
    settings = rl.Settings(
        **shared,
        prompts_per_step=min(options.batch_size, len(scorer.rows)),
        group_size=options.group_size,
        max_tokens=options.max_tokens,
        loss=options.loss,
        substeps=2 if options.loss == "ppo" else 1,
        plain=options.plain,
    )

    def run(
        service: Any, tokenizer: Any, resume: common.Resume | None, stop: Callable[[], bool]
    ) -> Iterator[common.Step]:
        return rl.train(
            service, tokenizer, scorer.rows, scorer.reward, settings, resume=resume, stop=stop
        )

    words = [
        f"{options.loss} with the reward of {scorer.file}: {len(scorer.rows)} prompts",
        (
            f"{settings.steps} steps of {settings.prompts_per_step} prompts with "
            f"{settings.group_size} answers of up to {settings.max_tokens} tokens"
        ),
        _rates(options, model, settings),
    ]
    return Plan(
        settings=settings,
        steps=run,
        words=words,
        prompts=[row["prompt"] for row in scorer.rows[:SHOWN_PROMPTS]],
        plain=options.plain,
        metric="reward",
        fingerprint=_fingerprint(options, settings),
    )


def _shared(options: Options, model: str, steps: int) -> dict[str, Any]:
    by_size = common.defaults(model, options.method)
    return {
        "model": model,
        "steps": steps,
        "rank": options.rank or by_size.rank,
        "learning_rate": options.learning_rate or by_size.learning_rate,
        "seed": options.seed,
        "name": options.name,
        "save_every": options.save_every or max(1, steps // SAVES),
        "evaluate_every": max(1, steps // EVALUATIONS),
    }


def _rates(options: Options, model: str, settings: common.Settings) -> str:
    by_size = common.defaults(model, options.method)
    size = by_size.parameters
    known = "a model whose name has no size" if size is None else f"{_short(size)} parameters"
    given = [
        f"{word} {value:g}" + ("" if chosen else f" (default for {known})")
        for word, value, chosen in (
            ("LoRA rank", settings.rank, options.rank),
            ("learning rate", settings.learning_rate, options.learning_rate),
        )
    ]
    return ", ".join(given)


def _short(parameters: float) -> str:
    return f"{parameters / 1e9:g}B" if parameters >= 1e9 else f"{parameters / 1e6:g}M"


def _fingerprint(options: Options, settings: common.Settings) -> dict[str, Any]:
    files = {
        f"content of {file}": hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (options.data, options.reward)
        if file is not None
    }
    chosen = {
        "method": options.method,
        "held_out": options.held_out,
        "train_on": list(options.train_on),
        "plain": options.plain,
    }
    return {**asdict(settings), **chosen, **files}


def longest(item: data.Example | data.Pair) -> int:
    if isinstance(item, data.Pair):
        return max(len(item.chosen), len(item.rejected))
    return len(item)


def prompt_of(row: data.Row) -> Any:
    """What to ask a model about a row: the messages before the first answer."""
    if "prompt" in row.fields:
        return row.fields["prompt"]
    messages = row.fields.get("messages") or row.fields["chosen"]
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[0] if answers and answers[0] else 1]


# -- the reward file -------------------------------------------------------------------------------


def reward_of(file: Path, rows: Sequence[data.Row] | None) -> Scorer:
    """Load the file: `reward(row, answer)`, and `prompts()` if there is no data."""
    spec = importlib.util.spec_from_file_location("tinkex_reward", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise CommandFailed(f"{file} is not a Python file.", hint="Name a file FILE.py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(file, "cannot be loaded", error) from error
    reward = getattr(module, "reward", None)
    if not callable(reward):
        raise CommandFailed(
            f"{file} has no function reward.",
            hint="Write `def reward(row, answer): return 1.0 if ... else 0.0`.",
        )
    found: Any
    if rows is not None:
        for row in rows:
            if "prompt" not in row.fields:
                raise as_failure(row.error("prompt", "is missing, and --reward needs one"))
        found = [dict(row.fields) for row in rows]
    elif callable(prompts := getattr(module, "prompts", None)):
        try:
            found = list(prompts())
        except Exception as error:
            raise _failed(file, "prompts() failed", error) from error
    else:
        raise CommandFailed(
            f"{file} has no function prompts, and there is no DATA.",
            hint='Write `def prompts(): return [{"prompt": ...}, ...]`, or give a file of prompts.',
        )
    tasks = [{"prompt": each} if isinstance(each, str | list) else each for each in found]
    for number, task in enumerate(tasks):
        if not isinstance(task, Mapping) or not isinstance(task.get("prompt"), str | list):
            raise CommandFailed(
                f"{file}: prompts()[{number}] is {task!r}.",
                hint='Each is a text, or {"prompt": a text or messages, ...}.',
            )
    if not tasks:
        raise CommandFailed(f"{file}: there are no prompts.", hint="Return at least one.")

    def checked(row: Mapping[str, Any], answer: str) -> float:
        try:
            value = float(reward(row, answer))
        except Exception as error:
            raise _failed(file, f"reward() failed for {answer!r}", error) from error
        if not math.isfinite(value):
            raise CommandFailed(
                f"{file}: reward() returned {value} for {answer!r}.",
                hint="A reward is a finite number; more is better.",
            )
        return value

    return Scorer(file=file, reward=checked, rows=tasks)


def _failed(file: Path, what: str, error: Exception) -> CommandFailed:
    return CommandFailed(
        f"{file}: {what}: {type(error).__name__}: {error}",
        hint="--verbose shows where.",
        details="".join(traceback.format_exception(error)),
    )
