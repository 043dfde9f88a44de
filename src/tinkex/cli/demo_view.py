"""What the demo shows while it trains: a live view on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tinkex.cli import loss_chart
from tinkex.cli.demo_kill import Kill

#: Lines of the live view beside the curve and the answers.
OTHER_LINES = 7
MIN_CURVE_LINES, MAX_CURVE_LINES = 3, 9


#: A result that arrives sooner after a kill was computed before it: an engine starts more slowly.
ON_ITS_WAY_S = 1.0


def one_line(answer: str) -> str:
    """One printable line: the output of a model may contain control characters."""
    return "".join(char for char in " ".join(answer.split()) if char.isprintable())


def is_live(console: Console) -> bool:
    """Whether the console can draw a view again."""
    return console.is_terminal and not console.is_dumb_terminal


def curve(
    console: Console, losses: Sequence[float], steps: int, height: int = MAX_CURVE_LINES
) -> list[str]:
    """The losses so far as lines of text, over an axis that is complete after `steps`."""
    braille = (console.encoding or "").lower().startswith("utf")
    width = max(30, min(72, console.width - 10))
    so_far = max(20, width * len(losses) // steps)
    return loss_chart.as_text(losses, width=so_far, height=height, braille=braille)


def killed(kill: Kill) -> str:
    return f"After step {kill.step}, the engine (process {kill.process}) is killed with SIGKILL"


@dataclass
class Progress:
    """A run of the demo so far. Each call adds what has happened; here, it prints a line."""

    console: Console
    steps: int
    question: str
    losses: list[float] = field(default_factory=list)
    tokens: int = 0
    #: The answers to the question, and after how many steps each was given.
    answers: list[tuple[int, str]] = field(default_factory=list)
    kill: Kill | None = None
    _started_s: float = field(default_factory=time.monotonic)
    #: When the engine was killed, until the run goes on.
    _paused_s: float | None = None

    def on_step(self, loss: float, tokens: int) -> None:
        self.losses.append(loss)
        self.tokens += tokens
        self._end_pause()
        done = len(self.losses)
        if done % 6 == 0 or done in (1, self.steps):
            self._say(f"step {done:>3} of {self.steps}  {self._figures()}")

    def on_answer(self, step: int, answer: str) -> None:
        self.answers.append((step, answer))
        self._say(f"  [dim]{escape(self.question)}[/]  {escape(one_line(answer))}")

    def on_kill(self, process: int) -> None:
        self._paused_s = time.monotonic()
        self.kill = Kill(process=process, step=len(self.losses), pause_s=0.0)
        self._say(f"{killed(self.kill)}, on purpose")

    def on_kept(self, reason: str) -> None:
        """The engine was not killed."""
        line = f"[dim]The demo kills no engine here: {escape(reason)}.[/]"
        self.console.print(line, soft_wrap=True)

    def _end_pause(self) -> None:
        if self._paused_s is None or self.kill is None:
            return
        pause_s = time.monotonic() - self._paused_s
        if pause_s > ON_ITS_WAY_S:
            self._paused_s = None
            self.kill = replace(self.kill, pause_s=pause_s)

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def _figures(self) -> str:
        return f"loss {self.losses[-1]:.3f}  {self.tokens / self.training_s:.0f} tokens/s"

    @property
    def training_s(self) -> float:
        """Since the start, without the pause."""
        pause_s = self.kill.pause_s if self.kill else 0.0
        return max(time.monotonic() - self._started_s - pause_s, 1e-9)


class LiveProgress(Progress):
    """The curve, the answers and the kill in one view that is drawn again all the time."""

    def _say(self, line: str) -> None:
        """The view has it."""

    def __rich__(self) -> RenderableType:
        room = self.console.height - OTHER_LINES - len(self.answers)
        lines: list[Text] = []

        def add(text: str, style: str = "") -> None:
            lines.append(Text(text, style=style, no_wrap=True, overflow="ellipsis"))

        done = len(self.losses)
        if done and room >= MIN_CURVE_LINES:
            height = min(MAX_CURVE_LINES, room)
            for line in curve(self.console, self.losses, self.steps, height):
                add(line, "cyan")
        seconds = f"{time.monotonic() - self._started_s:.0f} s"
        figures = self._figures() if done else "loss -"
        add(f"step {done:>3} of {self.steps}  {figures}  {seconds}", "bold")
        if self.answers:
            add(f"{self.question} Asked again while it learns:", "dim")
        for step, answer in self.answers:
            add(f"  {f'step {step}':>7}  {one_line(answer)}")
        if self.kill is not None:
            add(killed(self.kill), "yellow")
            if self._paused_s is None:
                add(f"  the run went on after {self.kill.pause_s:.1f} s", "yellow")
            else:
                waits_s = time.monotonic() - self._paused_s
                add(f"  a new one starts and repeats the steps: {waits_s:.0f} s so far", "yellow")
        return Group(*lines)


@contextmanager
def showing(console: Console, steps: int, question: str) -> Iterator[Progress]:
    """The progress of a run, shown as this console can."""
    if not is_live(console):
        yield Progress(console, steps, question)
        return
    progress = LiveProgress(console, steps, question)
    with Live(progress, console=console, refresh_per_second=4):
        yield progress
