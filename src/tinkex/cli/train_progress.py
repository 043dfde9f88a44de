"""What `tinkex train` shows: the plan, a bar with live metrics, and at the end the curve."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

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
def working(words: str) -> Iterator[None]:
    """Say on a terminal what takes so long while a block runs."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True, highlight=False).status(f"{words} …"):
        yield


class Display(Protocol):
    """What a run shows while it trains, always on stderr."""

    def show(self, step: Step) -> None: ...

    def say(self, text: str) -> None: ...


class _Speed:
    """Tokens per second since the start; nothing before the first ones."""

    def __init__(self) -> None:
        self._started, self._tokens = time.monotonic(), 0

    def after(self, step: Step) -> str:
        self._tokens += step.tokens
        per_s = self._tokens / max(time.monotonic() - self._started, 1e-9)
        return f"{per_s:.0f} tokens/s" if self._tokens else ""


class _Lines:
    """Some lines, for a pipe."""

    def __init__(self, total: int) -> None:
        self._total, self._speed = total, _Speed()

    def show(self, step: Step) -> None:
        speed = self._speed.after(step)
        every = max(1, self._total // LINES)
        if step.number % every == 0 or step.number in (0, 1, self._total) or step.sampler:
            line = f"step {step.number:>4} of {self._total}  {words_of(step.metrics)}  {speed}"
            click.echo(line.rstrip(), err=True)

    def say(self, text: str) -> None:
        click.echo(text, err=True)


class _Bar:
    """A bar with the newest metrics, for a terminal."""

    def __init__(self, bar: Progress, plan: Plan, state: TrainState) -> None:
        self._bar, self._metric, self._speed = bar, plan.metric, _Speed()
        self._latest: dict[str, float] = {}  # held-out metrics are measured now and then
        self._task = bar.add_task(
            "", total=plan.settings.steps, completed=state.step, words="", speed=""
        )

    def show(self, step: Step) -> None:
        self._latest.update(step.metrics)
        words, speed = short(self._latest, self._metric), self._speed.after(step)
        self._bar.update(
            self._task, completed=step.number, words=words, speed=f"{speed}, " if speed else ""
        )

    def say(self, text: str) -> None:
        """Above the bar."""
        self._bar.console.print(text, markup=False)


@contextmanager
def step_display(plan: Plan, state: TrainState) -> Iterator[Display]:
    """A bar on a terminal, some lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(plan.settings.steps)
        return
    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[words]}"),
        TextColumn("[dim]{task.fields[speed]}left[/]"),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
        expand=True,
    )
    with bar:
        yield _Bar(bar, plan, state)


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
            click.echo(f"{click.style(word.ljust(6), fg='cyan')}  {beside(text)}")
    click.echo()
    click.echo(f"sampler weights  {state.sampler}")
    click.echo(f"training state   {state.checkpoint}")
    said = 'sample "..." --plain --path' if plan.plain else "chat"
    click.echo(f"Try it:  tinkex {said} {state.sampler}", err=True)


def beside(text: str) -> str:
    """A text for the right column: in one line or, on a terminal, in lines of whole words."""
    # What a model says must not control a terminal.
    line = printable(" ".join(text.split()))
    if not sys.stdout.isatty():
        return line
    width = max(20, shutil.get_terminal_size().columns - 8)
    return f"\n{'':8}".join(textwrap.wrap(line, width) or [""])


def _text(prompt: Any) -> str:
    """The last message of a conversation, or the text."""
    if isinstance(prompt, str):
        return prompt
    content = prompt[-1].get("content")
    return content if isinstance(content, str) else str(content)
