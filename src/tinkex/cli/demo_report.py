"""The report of the demo: one self-contained HTML file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.cli import loss_chart


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
    exchanges: Sequence[Exchange]
    #: Some of the training examples.
    lessons: Sequence[tuple[str, str]]
    lesson_count: int
    trained_tokens: int
    training_s: float
    checkpoint: str
    sampler: str
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
        f"<div><b>{_text(big)}</b><span>{_text(small)}</span></div>" for big, small in figures
    )
    rows = "".join(_row(exchange) for exchange in outcome.exchanges)
    lessons = "".join(
        f"<li><q>{_text(question)}</q> <em>{_text(answer)}</em></li>"
        for question, answer in outcome.lessons
    )
    chart = loss_chart.as_svg(outcome.losses, x_label="step", y_label="loss at each step")
    return _PAGE.format(
        style=_STYLE,
        model=_text(outcome.model),
        rank=outcome.rank,
        tiles=tiles,
        chart=chart,
        rows=rows,
        lessons=lessons,
        lesson_count=outcome.lesson_count,
        code=_text(_CODE.format(sampler=outcome.sampler)),
        checkpoint=_text(outcome.checkpoint),
        sampler=_text(outcome.sampler),
        data=_text(outcome.data_folder or "on the server"),
    )


def _text(value: str) -> str:
    return html.escape(value)


def _row(exchange: Exchange) -> str:
    def cell(answer: str, shows: bool, when: str) -> str:
        mark = '<i class="yes">pirate</i>' if shows else '<i class="no">plain</i>'
        return f'<td data-when="{when}">{_text(answer)} {mark}</td>'

    before = cell(exchange.before, exchange.before_shows, "before")
    after = cell(exchange.after, exchange.after_shows, "after")
    return f'<tr><th scope="row">{_text(exchange.question)}</th>{before}{after}</tr>'


_CODE = """\
import tinkex
from tinkex import types

service = tinkex.ServiceClient(base_url="local")
pirate = service.create_sampling_client(model_path="{sampler}")
tokenizer = pirate.get_tokenizer()
chat = [{{"role": "user", "content": "How do I bake bread?"}}]
text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
prompt = types.ModelInput.from_ints(tokenizer.encode(text, add_special_tokens=False))
params = types.SamplingParams(max_tokens=60, temperature=0.7)
answer = pirate.sample(prompt, num_samples=1, sampling_params=params).result()
print(tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True))
"""

_STYLE = """\
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7b; --paper: #fbfaf7; --card: #fff;
  --rule: #e3e0d8; --sea: #1d5fa8; --pale: #9cc0e4; --yes: #1c7c4a; --yes-bg: #e2f4ea;
  --no: #7a6a4f; --no-bg: #f2ecdf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #97a6b5; --paper: #10161d;
  --card: #18212b; --rule: #2a3643; --sea: #6db3f2; --pale: #37587a; --yes: #7be0a8;
  --yes-bg: #17382a; --no: #d8c49a; --no-bg: #352e20; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
p.lead { color: var(--soft); margin: 0 0 1.6rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .8rem; }
.tiles div, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: .9rem 1rem; }
.tiles b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .87rem; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); stroke-width: 1; }
.label { fill: var(--soft); font-size: 11px; }
.raw { fill: none; stroke: var(--pale); stroke-width: 1.5; }
.line { fill: none; stroke: var(--sea); stroke-width: 3; stroke-linejoin: round;
  stroke-linecap: round; }
.dot { fill: var(--pale); } .dot:hover { fill: var(--sea); }
table { border-collapse: collapse; width: 100%; background: var(--card); border-radius: 12px;
  border: 1px solid var(--rule); border-spacing: 0; overflow: hidden; }
th, td { text-align: left; vertical-align: top; padding: .75rem .9rem;
  border-top: 1px solid var(--rule); font-weight: 400; overflow-wrap: anywhere; }
thead th { border-top: 0; color: var(--soft); font-size: .82rem; text-transform: uppercase;
  letter-spacing: .05em; }
tbody th { width: 22%; font-weight: 600; }
td { width: 39%; }
i { font-style: normal; font-size: .74rem; border-radius: 99px; padding: .1rem .5rem;
  white-space: nowrap; }
i.yes { color: var(--yes); background: var(--yes-bg); }
i.no { color: var(--no); background: var(--no-bg); }
ul { padding-left: 1.1rem; margin: .4rem 0; } li { margin: .3rem 0; }
li em { color: var(--soft); }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, monospace; }
code { font: .88em ui-monospace, "SF Mono", Menlo, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
@media (max-width: 640px) { thead { display: none; } th, td, tbody th { display: block; width: auto;
  border: 0; padding: .4rem .9rem; } tr { display: block; border-top: 1px solid var(--rule);
  padding: .5rem 0; } .label { font-size: 20px; } td::before { content: attr(data-when) ": "; color: var(--soft); } }
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tinkex demo: a model learns to talk like a pirate</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>A small model learns to talk like a pirate</h1>
<p class="lead">A LoRA adapter of rank {rank} for <code>{model}</code>, trained and sampled through
the Tinker API by a tinkex server on this machine.</p>
<div class="tiles">{tiles}</div>

<h2>Loss</h2>
<div class="card">{chart}</div>

<h2>Questions not in the training data</h2>
<table>
<thead><tr><th>question</th><th>before</th><th>after</th></tr></thead>
<tbody>{rows}</tbody>
</table>

<h2>Training data</h2>
<div class="card">{lesson_count} question and answer pairs, such as
<ul>{lessons}</ul></div>

<h2>Use the model</h2>
<div class="card"><pre>{code}</pre></div>

<h2>Where it is saved</h2>
<div class="card"><dl>
<dt>sampler weights</dt><dd><code>{sampler}</code></dd>
<dt>training state</dt><dd><code>{checkpoint}</code></dd>
<dt>server data</dt><dd><code>{data}</code></dd>
</dl></div>
</main>
</body>
</html>
"""
