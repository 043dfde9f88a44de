"""`tinkex train`: train an adapter on a file, or with a reward, by a recipe of `tinkex.recipes`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import tinkex
from tinkex.cli.errors import NO_MODELS, CommandFailed, missing_package
from tinkex.cli.output import examples
from tinkex.cli.service_options import service_arguments, service_options
from tinkex.cli.train_plan import Options, Plan, make_plan, method_for, read_rows, reward_of
from tinkex.cli.train_progress import announce, show_result, step_display, working
from tinkex.cli.train_state import FILE, TrainState, locked
from tinkex.recipes import evaluate

#: The exit status that shells expect after Ctrl-C.
INTERRUPTED = 130
SAMPLE_TOKENS = 60


@click.command(
    "train",
    epilog=examples(
        "tinkex train chats.jsonl",
        "tinkex train preferences.jsonl --method dpo --epochs 2",
        "tinkex train --reward arithmetic.py --steps 40",
        "tinkex train chats.jsonl --model Qwen/Qwen3-8B --learning-rate 1e-4",
        "tinkex train chats.jsonl        # after Ctrl-C or a crash: goes on",
    ),
)
@click.argument("data", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--method",
    type=click.Choice(["sft", "dpo"]),
    help="What to do with DATA.  [default: dpo for preferences, else sft]",
)
@click.option(
    "--reward",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.py",
    help="Reinforcement learning: a file with reward(row, answer) and, without DATA, prompts().",
)
@click.option("--model", metavar="NAME", help="Base model.  [default: the first one served]")
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the state of the run.  [default: DATA-METHOD, such as chats-sft]",
)
@click.option("--restart", is_flag=True, help="Begin anew, even if OUTPUT has an unfinished run.")
@click.option("--steps", type=click.IntRange(1), help="[default: by --epochs; 30 with --reward]")
@click.option("--epochs", type=click.FloatRange(0, min_open=True), help="[default: 3; dpo: 1]")
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Rows in a step."
)
@click.option("--rank", type=click.IntRange(1), help="LoRA rank.  [default: by the model's size]")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0, min_open=True),
    help="Of the warm phase.  [default: by the model's size and the method]",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of DATA that is only measured.",
)
@click.option(
    "--train-on",
    multiple=True,
    default=("assistant",),
    show_default=True,
    metavar="ROLE",
    help="Messages that are learned; can be repeated.",
)
@click.option(
    "--plain", is_flag=True, help="Use texts as they are, without the chat template of the model."
)
@click.option(
    "--beta",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="For dpo.",
)
@click.option(
    "--loss",
    type=click.Choice(["importance_sampling", "ppo"]),
    default="importance_sampling",
    show_default=True,
    help="With --reward. ppo takes two optimizer steps for each batch of answers.",
)
@click.option(
    "--group-size",
    type=click.IntRange(2),
    default=8,
    show_default=True,
    help="With --reward: answers to each prompt.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="With --reward: the longest answer.",
)
@click.option(
    "--save-every", type=click.IntRange(1), metavar="STEPS", help="[default: a tenth of the steps]"
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--name", help="Name of the run in lists.  [default: that of OUTPUT]")
@service_options
def command(
    data: Path | None,
    reward: Path | None,
    method: str | None,
    output: Path | None,
    restart: bool,
    **chosen: Any,
) -> None:
    """Train a LoRA adapter on DATA, a JSON Lines file, or with a reward of your own.

    A line of DATA is a chat {"messages": [...]}, a {"prompt": ..., "completion": ...}, or a
    preference {"prompt": ..., "chosen": ..., "rejected": ...}. A part is held out and measured.

    The run saves checkpoints. After Ctrl-C, a crash or a kill, the same command goes on from the
    last one. At the end it shows the curve, and an answer before and after.
    """
    if reward and method:
        raise click.UsageError("--reward is a method of its own: leave out --method.")
    if not (data or reward):
        raise click.UsageError("Give DATA, or --reward FILE.py.")
    rows = read_rows(data) if data else None
    scorer = reward_of(reward, rows) if reward else None
    done_by = "rl" if rows is None or scorer else method_for(rows, method)
    folder = output or Path(f"{(reward or data or Path()).stem}-{done_by}")
    options = Options(
        method=done_by,
        data=data,
        reward=reward,
        **{**chosen, "name": chosen["name"] or folder.name},
    )
    with locked(folder), tinkex.ServiceClient(**service_arguments()) as service:
        run(service, options, rows, scorer, folder, restart=restart)


def run(
    service: tinkex.ServiceClient,
    options: Options,
    rows: Any,
    scorer: Any,
    folder: Path,
    *,
    restart: bool,
) -> None:
    offered = service.get_server_capabilities().supported_models
    model = options.model or next((one.model_name for one in offered if one.model_name), None)
    if model is None:
        raise CommandFailed(NO_MODELS)
    context = next((one.max_context_length for one in offered if one.model_name == model), None)
    base = service.create_sampling_client(base_model=model)
    try:
        # Not that of transformers, whose import takes seconds.
        tokenizer = base._load_tokenizer(light=True)
    except ImportError as error:
        missing = ModuleNotFoundError(name=error.name or "tokenizers")
        raise missing_package(missing, "`tinkex train`", "tokenizer") from error
    plan = make_plan(options, model, rows, scorer, tokenizer, context)
    if restart:
        # Otherwise a run that is killed before its first checkpoint would be followed by the old one.
        (folder / FILE).unlink(missing_ok=True)
    state = TrainState.load(folder)
    if state is None:
        state = TrainState(folder=folder, settings=plan.fingerprint)
    else:
        state.check(plan.fingerprint)
    announce(plan, state)
    if not state.finished:
        if state.before is None:
            with working("Sampling answers before training"):
                state.before = sampled(base, tokenizer, plan)
        train(service, tokenizer, plan, state)
    if state.after is None:
        with working("Sampling answers after training"):
            trained = service.create_sampling_client(model_path=state.sampler)
            state.after = sampled(trained, tokenizer, plan)
        state.save()
    show_result(plan, state)


def train(service: Any, tokenizer: Any, plan: Plan, state: TrainState) -> None:
    """Run the recipe from where the state is, and keep the state on disk at each checkpoint."""
    with step_display(plan, state) as display, stopping(display.say) as stop:
        try:
            for step in plan.steps(service, tokenizer, state.resume, stop):
                state.add(step)
                if step.checkpoint is not None:
                    state.save()
                display.show(step)
        except tinkex.TinkerError:
            if state.step:
                click.echo(
                    f"The same command, without --restart, goes on after step {state.step}.",
                    err=True,
                )
            raise
    if not state.finished:
        click.echo(
            f"Stopped after step {state.step} of {plan.settings.steps}, and saved. "
            "The same command, without --restart, goes on from there.",
            err=True,
        )
        raise click.exceptions.Exit(INTERRUPTED)


def sampled(sampling: Any, tokenizer: Any, plan: Plan) -> list[str]:
    """The most likely answer to each of a few prompts."""
    found = evaluate.sample(
        sampling, tokenizer, plan.prompts, max_tokens=SAMPLE_TOKENS, plain=plan.plain
    )
    return [text if complete else f"{text} …" for ((text, complete),) in found]


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. The second time it interrupts the program at once."""
    pressed = 0

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt
        say("Stopping: steps that the server has already are finished and saved first.")
        say("Ctrl-C again stops at once.")

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed > 0
    finally:
        signal.signal(signal.SIGINT, before)
