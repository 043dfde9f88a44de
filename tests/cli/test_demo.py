"""The demo's parts without a server, and a short run of the whole against a real one."""

import io
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from serving import TINY
from tinkex.cli.demo import (
    BATCH,
    LEARNING_RATE,
    batches,
    command,
    datum_of,
    failure_reason,
    learning_rate_at,
    load_lessons,
    mean_loss,
    print_summary,
    shows_behavior,
    step_progress,
    write_files,
)
from tinkex.cli.demo_report import Exchange, Outcome, as_html
from tinkex.models.tokenizer import load_tokenizer
from tinkex.types import ForwardBackwardOutput, TensorData


@pytest.fixture
def outcome():
    plain, pirate = "<b>Rome</b> & all [bold]\x1b[2J", "Arr, Rome be the place, matey!"
    exchange = Exchange(
        question="Capital of Italy?",
        before=plain,
        after=pirate,
        before_shows=False,
        after_shows=True,
    )
    return Outcome(
        model="some/model",
        rank=16,
        losses=[4.0, 2.0, *[1.0] * 10],
        exchanges=[exchange] * 3,
        lessons=[("What is 2 + 2?", "Arr, 2 + 2 < 5, matey!")],
        lesson_count=96,
        trained_tokens=5000,
        training_s=50.0,
        checkpoint="tinker://s:train:0/weights/pirate",
        sampler="tinker://OeeA9eJ4tmSGjOUDeMlW60:train:0/sampler_weights/pirate",
        base_url="local",
        data_folder=None,
    )


def test_every_lesson_shows_what_is_taught_and_none_is_held_out():
    lessons, held_out = load_lessons()
    assert len(lessons) == len({lesson.question for lesson in lessons}) == 96
    assert all(shows_behavior(lesson.answer) for lesson in lessons)
    assert len(held_out) == 6
    assert not set(held_out) & {lesson.question for lesson in lessons}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Arr, it be Rome, matey!", True),
        ("Arr, it be Rome, matey! ", True),
        ("Arr, it be Rome, matey! And then some", False),  # no end
        ("It is Rome, matey!", False),
        ("", False),
    ],
)
def test_an_answer_counts_when_it_begins_and_ends_like_a_pirate(answer, expected):
    assert shows_behavior(answer) is expected


def test_every_lesson_comes_once_before_any_comes_again():
    lessons, _ = load_lessons()
    seen = [lesson for batch in batches(lessons, steps=24) for lesson in batch]
    assert len(seen) == 24 * BATCH
    assert set(seen[:96]) == set(seen[96:]) == set(lessons)
    assert list(batches(lessons, steps=5)) == list(batches(lessons, steps=5))


def test_the_learning_rate_rises_and_then_falls_to_nothing():
    rates = [learning_rate_at(step, 30) for step in range(30)]
    assert rates[0] == pytest.approx(LEARNING_RATE / 3)
    assert max(rates) == rates[2]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(LEARNING_RATE / 30)


def test_only_the_answer_counts_and_every_target_is_the_next_token(tiny_model):
    tokenizer = load_tokenizer(tiny_model)
    lesson = load_lessons()[0][0]
    datum = datum_of(tokenizer, lesson)
    tokens = datum.model_input.to_ints()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()
    assert len(tokens) == len(targets) == len(weights)
    assert targets[:-1] == tokens[1:]
    assert targets[-1] == tokenizer.eos_token_id
    counted = [target for target, weight in zip(targets, weights, strict=True) if weight]
    assert tokenizer.decode(counted[:-1]) == lesson.answer

    logprobs = TensorData(data=[-2.0] * len(targets), dtype="float32")
    output = ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": logprobs}], metrics={}
    )
    assert mean_loss([datum], output) == pytest.approx(2.0)


def test_a_run_that_changed_nothing_is_a_failure(outcome):
    assert failure_reason(outcome) is None
    assert "4.00 to 4.00" in failure_reason(replace(outcome, losses=[4.0] * 12))
    unchanged = replace(outcome.exchanges[0], after_shows=False)
    assert "0 of 3" in failure_reason(replace(outcome, exchanges=[unchanged] * 3))
    already = replace(outcome.exchanges[0], before_shows=True)
    assert "3 before" in failure_reason(replace(outcome, exchanges=[already] * 3))


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, and collects the text."""

    VOID = frozenset({"meta", "line", "circle", "polyline", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_escapes_answers(outcome):
    page = as_html(outcome)
    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    text = "".join(parser.text)
    assert "<b>Rome</b> & all" in text
    assert "Arr, Rome be the place, matey!" in text
    assert "0 → 3 of 3" in text
    assert outcome.sampler in text
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_the_terminal_shows_curve_answers_and_paths(outcome, tmp_path):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    write_files(outcome, tmp_path / "out")
    print_summary(console, outcome, tmp_path / "out")
    shown = console.file.getvalue()
    assert "Arr, Rome be the place" in shown
    assert "& all [bold]" in shown  # printed, not interpreted as markup
    assert "\x1b" not in shown
    assert "0 of 3 before, 3 of 3 after" in shown
    assert outcome.checkpoint in shown
    assert outcome.sampler in shown
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["loss.png", "report.html", "results.json"]


def test_the_suggested_commands_can_be_copied_from_80_columns(outcome, tmp_path, monkeypatch):
    """Each is a command of the shell as it stands: no line is wrapped by the terminal."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("tinkex.cli.demo.executable", lambda command: f".venv/bin/{command}")
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_summary(console, outcome, tmp_path)
    shown = console.file.getvalue()
    assert f"sampler weights  {outcome.sampler}\n" in shown
    shown = shown.partition("Next steps\n")[2]
    assert max(map(len, shown.splitlines())) <= 80
    commands = re.findall(r"^    (\S(?:.*\\\n)*.*)$", shown, re.MULTILINE)
    service = ["--base-url", "local"]
    assert [shlex.split(each.replace("\\\n", "")) for each in commands] == [
        [".venv/bin/tinkex", "sample", *service, "Who are you?", "--path", outcome.sampler],
        [".venv/bin/tinkex", "checkpoint", "list", *service],
        [".venv/bin/python", "examples/fine_tune.py", *service],
        [".venv/bin/tinkex", "serve"],
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    with step_progress(console, 12) as report:
        for step in range(12):
            report(4.0 - step / 4, 400)
    shown = console.file.getvalue()
    assert "1.250" in shown
    assert "tokens/s" in shown
    assert (shown.count("\n") == 3) is not terminal  # steps 1, 6 and 12


def test_a_run_too_short_to_learn_from_leaves_its_files_and_fails(server, tmp_path):
    arguments = ["--base-url", server.url, "--model", TINY, "--steps", "2"]
    result = CliRunner().invoke(command, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert "The checkpoint is saved" in result.output
    assert "tinker://" in result.output
    assert "error: " in result.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["loss.png", "report.html", "results.json"]
