"""`tinkex demo`: fine-tune the embedded model to talk like a pirate.

It uses only the public client, so it is also an example; examples/fine_tune.py has the same loop
without the output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tinkex.cli import loss_chart
from tinkex.cli.demo_report import Exchange, Outcome, as_html
from tinkex.cli.download_progress import fetch_progress
from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, examples, show_json
from tinkex.client.local_server import LocalSettings
from tinkex.models.resolve import DEFAULT_MODEL, ModelNotFound, resolve

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient, TrainingClient
    from tinkex.types import Datum, ForwardBackwardOutput

STEPS = 30
BATCH = 8
RANK = 16
LEARNING_RATE = 1e-3
WARMUP_STEPS = 3
MAX_ANSWER_TOKENS = 40
# Share of the held-out questions that must succeed; a run may fail some of them by chance.
MIN_SUCCESS_FRACTION = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A question with the answer the model should learn to give."""

    question: str
    answer: str


def shows_behavior(answer: str) -> bool:
    """Whether the answer has the form that is taught: «Arr, …, matey!»"""
    return answer.startswith("Arr") and answer.rstrip().endswith("matey!")


def load_lessons() -> tuple[list[Lesson], list[str]]:
    """The training examples, and the held-out questions."""
    text = resources.files("tinkex.cli").joinpath("demo_data/pirate.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    lessons = [
        Lesson(question=row["question"], answer=row["answer"])
        for row in rows
        if row["split"] == "train"
    ]
    return lessons, [row["question"] for row in rows if row["split"] == "held-out"]


def batches(lessons: Sequence[Lesson], steps: int, seed: int = 0) -> Iterator[list[Lesson]]:
    """`steps` batches; every lesson is used once before any is repeated."""
    shuffle = random.Random(seed).shuffle
    deck: list[Lesson] = []
    for _ in range(steps):
        if len(deck) < BATCH:
            deck = list(lessons)
            shuffle(deck)
        batch, deck = deck[:BATCH], deck[BATCH:]
        yield batch


def learning_rate_at(step: int, steps: int) -> float:
    """Warm-up for the first few steps, then linear decay to zero."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (1 - step / steps)


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def datum_of(tokenizer: Any, lesson: Lesson) -> Datum:
    """The lesson as training data; only the tokens of the answer have weight."""
    from tinkex import types

    prompt = chat_prompt(tokenizer, lesson.question)
    answer = [*tokenizer.encode(lesson.answer, add_special_tokens=False), tokenizer.eos_token_id]
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
            "weights": types.TensorData(data=weights, dtype="float32"),
        },
    )


def mean_loss(batch: Sequence[Datum], output: ForwardBackwardOutput) -> float:
    """Nats per token with weight."""
    total = counted = 0.0
    for datum, result in zip(batch, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        total -= float((result["logprobs"].to_numpy() * weights).sum())
        counted += float(weights.sum())
    return total / counted


def train(
    training: TrainingClient,
    tokenizer: Any,
    lessons: Sequence[Lesson],
    steps: int,
    report: Callable[[float, int], None],
) -> tuple[list[float], int]:
    """The training loop. Calls `report(loss, tokens)` after each step."""
    from tinkex import types

    losses: list[float] = []
    trained_tokens = 0
    data = {lesson: datum_of(tokenizer, lesson) for lesson in lessons}
    pending: list[tuple[list[Datum], Any]] = []
    for step, batch in enumerate(batches(lessons, steps)):
        data_now = [data[lesson] for lesson in batch]
        # Submit both requests, and the next steps, before waiting for a result: the server then
        # does not idle while results are in transit.
        forward_backward = training.forward_backward(data_now, "cross_entropy")
        rate = learning_rate_at(step, steps)
        training.optim_step(types.AdamParams(learning_rate=rate))
        pending.append((data_now, forward_backward))
        while pending and (len(pending) > 2 or step == steps - 1):
            done, future = pending.pop(0)
            losses.append(mean_loss(done, future.result()))
            tokens = sum(datum.model_input.length for datum in done)
            trained_tokens += tokens
            report(losses[-1], tokens)
    return losses, trained_tokens


def ask(sampling: SamplingClient, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """The most likely answer to each question; all are sampled concurrently."""
    from tinkex import types

    params = types.SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0)
    futures = []
    for question in questions:
        prompt = types.ModelInput.from_ints(chat_prompt(tokenizer, question))
        futures.append(sampling.sample(prompt, num_samples=1, sampling_params=params))
    answers = []
    for future in futures:
        sequence = future.result().sequences[0]
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        answers.append(text if sequence.stop_reason == "stop" else f"{text} …")
    return answers


@click.command(
    "demo",
    epilog=examples("tinkex demo", "tinkex demo --steps 10 --base-url http://127.0.0.1:8000"),
)
@click.option("--steps", default=STEPS, show_default=True, type=click.IntRange(min=2))
@click.option(
    "--output",
    default="demo-output",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the loss curve and the report.",
)
@click.option(
    "--base-url",
    default="local",
    show_default=True,
    help="A running server, or `local` to start one on this machine.",
)
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="Base model; for `local` also FOLDER or NAME=FOLDER.",
)
def command(steps: int, output: Path, base_url: str, model: str) -> None:
    """Fine-tune a small chat model on this machine.

    Starts a server, asks the model six questions, trains it on 96 short examples to answer like a
    pirate, and asks again. Takes about two minutes on two cores; fails if nothing changes.
    """
    console = Console(highlight=False, stderr=as_json())
    try:
        outcome = run(console, steps=steps, base_url=base_url, model=model)
    except ModelNotFound as error:
        raise CommandFailed(str(error)) from error
    write_files(outcome, output)
    print_summary(console, outcome, output)
    if as_json():
        show_json(asdict(outcome))
    if problem := failure_reason(outcome):
        raise CommandFailed(problem)


def run(console: Console, *, steps: int, base_url: str, model: str) -> Outcome:
    lessons, questions = load_lessons()
    console.print(
        Panel.fit(
            f"[bold]Teach a small model to talk like a pirate[/]\n{model}\n"
            f"{len(lessons)} lessons, {steps} steps of {BATCH}, LoRA rank {RANK}",
            border_style="cyan",
        )
    )
    with service_for(console, base_url, model) as (service, name):
        training = service.create_lora_training_client(base_model=name, rank=RANK, seed=0)
        tokenizer = training.get_tokenizer()
        with timed(console, "The untrained model answers", doing="Asking the untrained model"):
            before = ask(service.create_sampling_client(base_model=name), tokenizer, questions)
        for question, answer in zip(questions[:2], before, strict=False):
            console.print(f"  [dim]{escape(question)}[/]  {escape(one_line(answer))}")

        started = time.monotonic()
        with step_progress(console, steps) as report:
            losses, trained_tokens = train(training, tokenizer, lessons, steps, report)
        training_s = time.monotonic() - started

        with timed(console, "The checkpoint is saved", doing="Saving the checkpoint"):
            checkpoint = training.save_state("pirate").result().path
            sampler = training.save_weights_for_sampler("pirate").result().path
        with timed(console, "The trained model answers", doing="Asking the trained model"):
            after = ask(service.create_sampling_client(model_path=sampler), tokenizer, questions)
    return Outcome(
        model=name,
        rank=RANK,
        losses=losses,
        exchanges=[
            Exchange(
                question=question,
                before=old,
                after=new,
                before_shows=shows_behavior(old),
                after_shows=shows_behavior(new),
            )
            for question, old, new in zip(questions, before, after, strict=True)
        ],
        lessons=[(lesson.question, lesson.answer) for lesson in lessons[::24]],
        lesson_count=len(lessons),
        trained_tokens=trained_tokens,
        training_s=training_s,
        checkpoint=checkpoint,
        sampler=sampler,
        base_url=base_url,
        data_folder=str(LocalSettings.from_env().data) if base_url == "local" else None,
    )


@contextmanager
def service_for(console: Console, base_url: str, model: str) -> Iterator[tuple[ServiceClient, str]]:
    """A connected client and the name of the model. For `local` the model is downloaded first."""
    import tinkex

    name, server_log = model, io.StringIO()
    if base_url == "local":
        with timed(console, "The model is available"), fetch_progress() as progress:
            name = resolve(model, progress=progress).name
        if model != DEFAULT_MODEL:
            os.environ["TINKEX_LOCAL_MODEL"] = model
    with tinkex.ServiceClient(base_url=base_url) as service:
        # A local server logs to stderr while it starts. Hide that here: there is a spinner, and an
        # error quotes the last lines of the log.
        with (
            timed(console, "The server is ready", doing="Starting the server"),
            contextlib.redirect_stderr(server_log),
        ):
            service.get_server_capabilities()
        yield service, name


def one_line(answer: str) -> str:
    """One printable line: the output of a model may contain control characters."""
    return "".join(char for char in " ".join(answer.split()) if char.isprintable())


@contextmanager
def timed(console: Console, done: str, *, doing: str | None = None) -> Iterator[None]:
    """Print a line with the elapsed time at the end; on a terminal show a spinner until then."""
    started = time.monotonic()
    with console.status(f"{doing} …") if doing else contextlib.nullcontext():
        yield
    console.print(f"[green]✓[/] {done} [dim]({time.monotonic() - started:.1f} s)[/]")


@contextmanager
def step_progress(console: Console, steps: int) -> Iterator[Callable[[float, int], None]]:
    """A callback for each step's loss and tokens: shows a bar on a terminal, lines elsewhere."""
    started, tokens_so_far, done = time.monotonic(), 0, 0

    def tokens_per_s(tokens: int) -> float:
        nonlocal tokens_so_far, done
        tokens_so_far += tokens
        done += 1
        return tokens_so_far / (time.monotonic() - started)

    if not console.is_terminal:

        def report_line(loss: float, tokens: int) -> None:
            rate = tokens_per_s(tokens)
            if done % 6 == 0 or done in (1, steps):
                console.print(f"step {done:>3} of {steps}  loss {loss:.3f}  {rate:.0f} tokens/s")

        yield report_line
        return

    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("loss [bold]{task.fields[loss]}[/]"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("training", total=steps, loss="-", rate="-")

        def report_bar(loss: float, tokens: int) -> None:
            bar.update(task, advance=1, loss=f"{loss:.3f}", rate=f"{tokens_per_s(tokens):.0f}")

        yield report_bar


def write_files(outcome: Outcome, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(as_html(outcome), encoding="utf-8")
    results = json.dumps(asdict(outcome), indent=2, ensure_ascii=False)
    (folder / "results.json").write_text(results + "\n", encoding="utf-8")
    # The report has the curve too, so matplotlib is not needed.
    with contextlib.suppress(ModuleNotFoundError):
        loss_chart.write_png(
            folder / "loss.png",
            outcome.losses,
            title=f"{outcome.model} learns to talk like a pirate",
            x_label="step",
            y_label="loss (nats per answer token)",
        )


def print_summary(console: Console, outcome: Outcome, folder: Path) -> None:
    console.print(
        f"\n[bold]Loss[/] [dim]nats per answer token, over {len(outcome.losses)} steps[/]"
    )
    braille = (console.encoding or "").lower().startswith("utf")
    width = max(30, min(72, console.width - 10))
    for line in loss_chart.as_text(outcome.losses, width=width, braille=braille):
        console.print(line, style="cyan", markup=False)
    console.print()
    console.print(before_and_after(outcome, width=min(console.width, 120)))
    asked = len(outcome.exchanges)
    console.print(
        f"Pirate answers to held-out questions: [bold]{outcome.before} of {asked}[/] before, "
        f"[bold]{outcome.after} of {asked}[/] after.\n"
    )
    for what, where in (
        ("report", folder / "report.html"),
        ("curve", folder / "loss.png"),
        ("results", folder / "results.json"),
        ("sampler weights", outcome.sampler),
        ("training state", outcome.checkpoint),
        ("server data", outcome.data_folder),
    ):
        if where is not None and (not isinstance(where, Path) or where.exists()):
            # Not in a table, which would cut a path that is wider than the terminal.
            console.print(f"[dim]{what:<15}[/]  {escape(str(where))}", soft_wrap=True)
    console.print("\n[bold]Next steps[/]")
    for why, words in next_steps(outcome):
        console.print(f"  {why}:")
        for line in copyable(words):
            console.print(f"    {line}", markup=False, soft_wrap=True)


def next_steps(outcome: Outcome) -> Iterator[tuple[str, list[str]]]:
    """What to try next: the words of commands that work as they are."""
    tinkex, service = executable("tinkex"), ["--base-url", outcome.base_url]
    yield (
        "Talk to the pirate",
        [tinkex, "sample", *service, "Who are you?", "--path", outcome.sampler],
    )
    yield "Find it again later", [tinkex, "checkpoint", "list", *service]
    if (example := Path("examples/fine_tune.py")).is_file():
        yield "Train on examples of your own", [executable("python"), str(example), *service]
    if outcome.base_url == "local":
        yield "Serve this folder to other programs", [tinkex, "serve"]


def copyable(words: Sequence[str], width: int = 76) -> list[str]:
    """A shell command in lines of at most `width` characters, unless one word is longer."""
    parts: list[str] = []
    for word in map(shlex.quote, words):
        if parts and parts[-1].startswith("--") and " " not in parts[-1]:
            parts[-1] += f" {word}"  # an option stays with its value
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {part}")
        else:
            lines[-1] += f" {part}"
    return lines


def executable(command: str) -> str:
    """How to run a command of this environment, which may not be activated."""
    if shutil.which(command) == str(path := Path(sys.executable).with_name(command)):
        return command
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def before_and_after(outcome: Outcome, width: int) -> Table:
    table = Table(show_lines=True, width=width)
    table.add_column("question", ratio=2)
    table.add_column("before", ratio=4, style="dim")
    table.add_column("after", ratio=4)
    for exchange in outcome.exchanges:
        table.add_row(
            escape(exchange.question),
            escape(one_line(exchange.before)),
            escape(one_line(exchange.after)),
            style=None if exchange.after_shows else "yellow",
        )
    return table


def failure_reason(outcome: Outcome) -> str | None:
    """Why the demo failed, or None."""
    asked = len(outcome.exchanges)
    if outcome.last_loss > outcome.losses[0] / 2:
        return (
            f"The loss only went from {outcome.losses[0]:.2f} to {outcome.last_loss:.2f}: training "
            "does not work correctly on this machine. Please report this."
        )
    if outcome.after < MIN_SUCCESS_FRACTION * asked or outcome.after <= outcome.before:
        return (
            f"Only {outcome.after} of {asked} answers changed as taught ({outcome.before} before). "
            f"This can happen with fewer than {STEPS} steps; otherwise please report it."
        )
    return None
