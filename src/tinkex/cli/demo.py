"""`tinkex demo`: fine-tune the embedded model to talk like a pirate.

It trains with the public client only, so it is also an example; examples/fine_tune.py has the same
loop without the output.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from tinkex.cli import loss_chart
from tinkex.cli.demo_kill import KeepEngine, kill_engine, missing_steps
from tinkex.cli.demo_report import Exchange, Outcome, as_html
from tinkex.cli.demo_view import Progress, curve, is_live, one_line, showing
from tinkex.cli.download_progress import fetch_progress
from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, examples, show_json
from tinkex.client.local_server import LocalServer, LocalSettings, attach
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
#: How often the question is asked again, in parts of the run.
ASKED_AGAIN = 5
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
    progress: Progress,
    kill: Callable[[], int] | None,
) -> None:
    """The training loop. Asks a question every few steps, and calls `kill` once."""
    from tinkex import types

    steps = progress.steps
    ask_every = max(2, steps // ASKED_AGAIN)
    # Between two questions, so that later steps are running.
    kill_after = between if (between := ask_every * 3 // 2) < steps else 1
    data = {lesson: datum_of(tokenizer, lesson) for lesson in lessons}
    pending: list[tuple[list[Datum], Any]] = []
    for step, batch in enumerate(batches(lessons, steps)):
        data_now = [data[lesson] for lesson in batch]
        # Submit both requests, and the next steps, before waiting for a result: the server then
        # does not idle while results are in transit.
        forward_backward = training.forward_backward(data_now, "cross_entropy")
        rate = learning_rate_at(step, steps)
        stepped = training.optim_step(types.AdamParams(learning_rate=rate))
        pending.append((data_now, forward_backward))
        asks = (step + 1) % ask_every == 0 and step + 1 < steps
        while pending and (len(pending) > 2 or asks or step == steps - 1):
            done, future = pending.pop(0)
            tokens = sum(datum.model_input.length for datum in done)
            progress.on_step(mean_loss(done, future.result()), tokens)
            if len(progress.losses) == kill_after and kill is not None:
                try:
                    progress.on_kill(kill())
                except KeepEngine as reason:
                    progress.on_kept(str(reason))
        if asks:
            sampling = training.save_weights_and_get_sampling_client()
            progress.on_answer(step + 1, ask(sampling, tokenizer, [progress.question])[0])
    stepped.result()


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
    pirate, and asks again. Meanwhile it kills the engine of its server once, and the run goes on.
    Takes about two minutes on two cores; fails if nothing changes.
    """
    console = Console(highlight=False, emoji=False, stderr=as_json())
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
    with service_for(console, base_url, model) as (service, name, local):
        with timed(console, "The model is loaded", doing="Loading the model"):
            training = service.create_lora_training_client(
                base_model=name, rank=RANK, seed=0, user_metadata={"name": "pirate"}
            )
            tokenizer = training.get_tokenizer()
        with timed(console, "The untrained model answers", doing="Asking the untrained model"):
            before = ask(service.create_sampling_client(base_model=name), tokenizer, questions)

        page = training.get_console_url()
        try:
            with showing(console, steps, questions[0]) as progress:
                progress.on_answer(0, before[0])
                kill = None
                if local is not None and local.running is not None:
                    kill = partial(kill_engine, local.running, name)
                train(training, tokenizer, lessons, progress, kill)
        except KeyboardInterrupt:
            console.print(f"The steps that are done stay on the server: {page}", soft_wrap=True)
            raise
        training_s = progress.training_s
        steps_problem = report_kill(console, base_url, training.model_id, progress)

        with timed(console, "The checkpoint is saved", doing="Saving the checkpoint"):
            checkpoint = training.save_state("pirate").result().path
            sampler = training.save_weights_for_sampler("pirate").result().path
        with timed(console, "The trained model answers", doing="Asking the trained model"):
            after = ask(service.create_sampling_client(model_path=sampler), tokenizer, questions)
    here = LocalSettings.from_env()
    return Outcome(
        model=name,
        rank=RANK,
        losses=progress.losses,
        answers=[*progress.answers, (steps, after[0])],
        kill=progress.kill,
        steps_problem=steps_problem,
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
        trained_tokens=progress.tokens,
        training_s=training_s,
        checkpoint=checkpoint,
        sampler=sampler,
        console=page,
        server_stays_s=here.keep_s if local and local.adds_models else None,
        base_url=base_url,
        data_folder=str(here.data) if local else None,
    )


def report_kill(console: Console, base_url: str, run: str, progress: Progress) -> str | None:
    """Say how the run survived. If the server did not record each step once, how it differs."""
    import tinkex

    if (kill := progress.kill) is None:
        return None
    with tinkex.RestClient(base_url=base_url) as rest:
        points = rest.get_training_run_metrics(run, points=10_000).result().points
    recorded = [(point.step, point.steps) for point in points]
    if problem := missing_steps(recorded, progress.steps):
        return problem
    console.print(
        f"[green]✓[/] The engine was killed once, on purpose: process {kill.process}, after step "
        f"{kill.step}. The run went on {kill.pause_s:.1f} s later, and each of its "
        f"{progress.steps} steps was applied once.",
        soft_wrap=not console.is_terminal,
    )
    return None


@contextmanager
def service_for(
    console: Console, base_url: str, model: str
) -> Iterator[tuple[ServiceClient, str, LocalServer | None]]:
    """
    A connected client, the name of the model, and the server if `base_url` is `local`.

    For `local` the model is downloaded first.
    """
    import tinkex

    name, server = model, None
    if base_url == "local":
        with timed(console, "The model is available"), fetch_progress() as progress:
            name = resolve(model, progress=progress).name
        settings = replace(LocalSettings.from_env(), tells_waits=False)
        if model != DEFAULT_MODEL:
            settings = replace(settings, model=model)
        with timed(console, "The server is ready", doing="Starting the server"):
            server = attach(settings)
    # What a wait is for is shown here, if the server is the demo's own.
    client = tinkex.Settings.resolve(base_url=base_url, wait_notice_s=None if server is None else 0)
    try:
        with tinkex.ServiceClient(settings=client, display_name="tinkex demo") as service:
            if server is None:
                with timed(console, "The server is ready", doing="Connecting"):
                    service.get_server_capabilities()
            yield service, name, server
    finally:
        if server is not None:
            server.release()


@contextmanager
def timed(console: Console, done: str, *, doing: str | None = None) -> Iterator[None]:
    """Print a line with the elapsed time at the end; on a terminal show a spinner until then."""
    started = time.monotonic()
    with console.status(f"{doing} …") if doing else contextlib.nullcontext():
        yield
    console.print(f"[green]✓[/] {done} [dim]({time.monotonic() - started:.1f} s)[/]")


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
    if not is_live(console):  # which has shown it
        console.print(
            f"\n[bold]Loss[/] [dim]nats per answer token, over {len(outcome.losses)} steps[/]"
        )
        for line in curve(console, outcome.losses, len(outcome.losses)):
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
    if outcome.server_stays_s:
        stays = f"{outcome.server_stays_s / 60:g} minutes"
        console.print(f"\nThe server stays up for {stays}, and with it the run in its console:")
    else:
        console.print("\nThe run in the console of the server:")
    console.print(f"  {escape(outcome.console)}", soft_wrap=True)
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
    if outcome.steps_problem:
        return f"{outcome.steps_problem} Please report this."
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
