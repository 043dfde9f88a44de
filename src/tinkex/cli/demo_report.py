"""The report of the demo: one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template

from tinkex.cli import loss_chart
from tinkex.cli.demo_kill import Kill


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A held-out question with the answers before and after training."""

    question: str
    before: str
    after: str
    #: Whether the answer shows the behavior that was taught.
    before_shows: bool
    after_shows: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of the demo."""

    model: str
    rank: int
    #: Mean loss per answer token, for each step.
    losses: Sequence[float]
    #: Answers to the first question, and after how many steps each was given.
    answers: Sequence[tuple[int, str]]
    exchanges: Sequence[Exchange]
    #: The engine that was killed during the run.
    kill: Kill | None
    #: How the server's record of the run differs from each step once.
    steps_problem: str | None
    #: Some of the training examples.
    lessons: Sequence[tuple[str, str]]
    lesson_count: int
    trained_tokens: int
    #: Without the pause of a kill.
    training_s: float
    checkpoint: str
    sampler: str
    #: The page of the run in the console of its server.
    console: str
    #: How long the server stays after its last program; None if that is unknown.
    server_stays_s: float | None
    #: The service that has them; `local` is the one of this user on this machine.
    base_url: str
    data_folder: str | None

    @property
    def before(self) -> int:
        return sum(exchange.before_shows for exchange in self.exchanges)

    @property
    def after(self) -> int:
        return sum(exchange.after_shows for exchange in self.exchanges)

    @property
    def tokens_per_s(self) -> float:
        return self.trained_tokens / self.training_s

    @property
    def last_loss(self) -> float:
        return loss_chart.smoothed(self.losses)[-1]


def as_html(outcome: Outcome) -> str:
    asked = len(outcome.exchanges)
    figures = [
        (f"{outcome.before} → {outcome.after} of {asked}", "held-out answers in pirate style"),
        (f"{outcome.losses[0]:.2f} → {outcome.last_loss:.2f}", "loss, nats per answer token"),
        (f"{outcome.training_s:.0f} s", f"for {len(outcome.losses)} steps"),
        (f"{outcome.tokens_per_s:.0f}", "tokens per second on this machine"),
    ]
    tiles = "".join(
        f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in figures
    )
    rows = "".join(_row(exchange) for exchange in outcome.exchanges)
    answers = "".join(
        f"<dt>step {step}</dt><dd>{escape(answer)}</dd>" for step, answer in outcome.answers
    )
    kill = ""
    if (killed := outcome.kill) is not None:
        kill = (
            f"<p>After step {killed.step}, the program killed the engine of the server (process "
            f"{killed.process}) with SIGKILL. The run went on {killed.pause_s:.1f} s later.</p>"
        )
    lessons = "".join(
        f"<li><q>{escape(question)}</q> <em>{escape(answer)}</em></li>"
        for question, answer in outcome.lessons
    )
    chart = loss_chart.as_svg(outcome.losses, x_label="step", y_label="loss at each step")
    template = resources.files("tinkex.cli").joinpath("demo_data/report.html").read_text("utf-8")
    return Template(template).substitute(
        model=escape(outcome.model),
        rank=outcome.rank,
        tiles=tiles,
        chart=chart,
        kill=kill,
        question=escape(outcome.exchanges[0].question),
        answers=answers,
        rows=rows,
        lessons=lessons,
        lesson_count=outcome.lesson_count,
        checkpoint=escape(outcome.checkpoint),
        sampler=escape(outcome.sampler),
        data=escape(outcome.data_folder or "on the server"),
    )


def _row(exchange: Exchange) -> str:
    def cell(answer: str, shows: bool, when: str) -> str:
        mark = '<i class="yes">pirate</i>' if shows else '<i class="no">plain</i>'
        return f'<td data-when="{when}">{escape(answer)} {mark}</td>'

    before = cell(exchange.before, exchange.before_shows, "before")
    after = cell(exchange.after, exchange.after_shows, "after")
    return f'<tr><th scope="row">{escape(exchange.question)}</th>{before}{after}</tr>'
