"""What `tinkex train` shows: the plan, a bar with live metrics, and at the end the curve."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tinkex.cli import loss_chart
from tinkex.cli.output import as_json, printable, show_json
from tinkex.cli.run_plot import draw
from tinkex.cli.train_plan import Plan
from tinkex.cli.train_state import TrainState
from tinkex.recipes.common import Step

#: What is shown of a step, in this order: names of metrics, and what people call them.
SHOWN = {
    "reward": "reward",
    "kl": "KL",
    "loss": "loss",
    "margin": "margin",
    "held_out_loss": "held-out loss",
    "held_out_margin": "held-out margin",
    "held_out_accuracy": "held-out accuracy",
}
#: Lines in a pipe.
LINES = 10


def announce(plan: Plan, state: TrainState) -> None:
    """Say what is going to happen, on stderr."""
    click.echo(f"{plan.settings.name}: {plan.settings.model}", err=True)
    for line in plan.words:
        click.echo(f"  {line}", err=True)
    if state.finished:
        click.echo(f"{state.folder} is finished; --restart trains again.", err=True)
    elif state.step:
        click.echo(
            f"Going on after step {state.step} of {plan.settings.steps}, from {state.checkpoint}",
            err=True,
        )


def words_of(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{SHOWN[name]} {metrics[name]:.3f}" for name in SHOWN if name in metrics)


def short(metrics: Mapping[str, float], metric: str) -> str:
    """For a bar on 80 columns: the metric of the curve, held out too, or the KL."""
    names = {metric: metric, f"held_out_{metric}": "held out", "kl": "KL"}
    return "  ".join(
        f"{word} {metrics[name]:.3f}" for name, word in names.items() if name in metrics
    )


@contextmanager
def step_display(plan: Plan, state: TrainState) -> Iterator[Callable[[Step], None]]:
    """A callback for each step: a bar on a terminal, some lines elsewhere; always on stderr."""
    started, tokens, total = time.monotonic(), 0, plan.settings.steps
    latest: dict[str, float] = {}  # held-out metrics are measured now and then

    def rate(step: Step) -> str:
        nonlocal tokens
        latest.update(step.metrics)
        tokens += step.tokens
        return f"{tokens / max(time.monotonic() - started, 1e-9):.0f} tokens/s"

    if not sys.stderr.isatty():

        def show_line(step: Step) -> None:
            speed = rate(step)
            every = max(1, total // LINES)
            if step.number % every == 0 or step.number in (0, 1, total) or step.sampler:
                words = words_of(step.metrics)
                click.echo(f"step {step.number:>4} of {total}  {words}  {speed}", err=True)

        yield show_line
        return

    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[words]}"),
        TextColumn("[dim]{task.fields[speed]}, left[/]"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        expand=True,
    )
    with bar:
        task = bar.add_task("", total=total, completed=state.step, words="", speed="")

        def show_bar(step: Step) -> None:
            speed = rate(step)
            bar.update(task, completed=step.number, words=short(latest, plan.metric), speed=speed)

        yield show_bar


def show_result(plan: Plan, state: TrainState) -> None:
    """The curve, answers before and after, and where the weights are."""
    prompts = [_text(prompt) for prompt in plan.prompts]
    answers = zip(prompts, state.before or [], state.after or [], strict=True)
    if as_json():
        show_json(
            {
                "settings": plan.fingerprint,
                "steps": state.step,
                "history": state.history,
                "checkpoint": state.checkpoint,
                "sampler": state.sampler,
                "samples": [{"prompt": p, "before": b, "after": a} for p, b, a in answers],
                "output": str(state.folder),
            }
        )
        return
    metric = plan.metric
    curves = []
    for name in (metric, f"held_out_{metric}"):
        steps, values = state.curve(name)
        if steps and (name == metric or len(steps) > 1):
            curves.append(loss_chart.Curve(label=SHOWN[name], steps=steps, values=values))
    color = sys.stdout.isatty()
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    draw(curves, metric, width=shutil.get_terminal_size().columns, color=color, unicode=unicode)
    click.echo()
    for name, words in SHOWN.items():
        _, values = state.curve(name)
        if len(values) > 1:
            click.echo(f"{words}: {values[0]:.3f} → {values[-1]:.3f}")
    for prompt, before, after in answers:
        click.echo()
        for word, text in (("prompt", prompt), ("before", before), ("after", after)):
            click.echo(f"{click.style(word.ljust(6), fg='cyan')}  {one_line(text)}")
    click.echo()
    click.echo(f"sampler weights  {state.sampler}")
    click.echo(f"training state   {state.checkpoint}")
    plain = " --plain" if plan.plain else ""
    click.echo(f'Try it:  tinkex sample "..."{plain} --path {state.sampler}', err=True)


def one_line(text: str) -> str:
    """What a model says must not control a terminal."""
    return printable(" ".join(text.split()))


def _text(prompt: Any) -> str:
    """The last message of a conversation, or the text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content")
    return content if isinstance(content, str) else str(content)
