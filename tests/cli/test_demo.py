"""The demo's parts without a server, and short runs of the whole against real ones."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from on_terminal import OnTerminal
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
    service_for,
    shows_behavior,
    write_files,
)
from tinkex.cli.demo_kill import KeepEngine, Kill, kill_engine, missing_steps
from tinkex.cli.demo_report import Exchange, Outcome, as_html
from tinkex.cli.demo_view import LiveProgress, Progress, showing
from tinkex.client.local_server import LocalSettings, attach
from tinkex.local import control, registry
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
        answers=[(0, plain), (6, pirate)],
        kill=Kill(process=4711, step=3, pause_s=9.5),
        steps_problem=None,
        exchanges=[exchange] * 3,
        lessons=[("What is 2 + 2?", "Arr, 2 + 2 < 5, matey!")],
        lesson_count=96,
        trained_tokens=5000,
        training_s=50.0,
        checkpoint="tinker://s:train:0/weights/pirate",
        sampler="tinker://OeeA9eJ4tmSGjOUDeMlW60:train:0/sampler_weights/pirate",
        console="http://127.0.0.1:4711/training_runs/OeeA9eJ4tmSGjOUDeMlW60:train:0",
        server_stays_s=300.0,
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
    assert "recorded 11 steps" in failure_reason(
        replace(outcome, steps_problem=missing_steps([(n, 1) for n in range(1, 12)], 12))
    )


@pytest.mark.parametrize(
    ("recorded", "whole"),
    [
        ([(1, 1), (2, 1), (3, 1)], True),
        ([(1, 1), (2, 1)], False),
        ([(1, 1), (2, 1), (3, 1), (4, 1)], False),  # one was applied twice
        ([(1, 1), (3, 2)], True),  # of a long run, one for several
        ([(1, 1), (3, 1)], False),
        ([], False),
    ],
)
def test_a_record_of_each_step_once_has_no_problem(recorded, whole):
    assert (missing_steps(recorded, 3) is None) is whole


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
    assert "(process 4711) with SIGKILL. The run went on 9.5 s later" in text
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page


def test_the_terminal_shows_curve_answers_and_paths(outcome, tmp_path):
    console = Console(file=io.StringIO(), width=100, highlight=False, emoji=False)
    write_files(outcome, tmp_path / "out")
    print_summary(console, outcome, tmp_path / "out")
    shown = console.file.getvalue()
    assert "Arr, Rome be the place" in shown
    assert "& all [bold]" in shown  # printed, not interpreted as markup
    assert "\x1b" not in shown
    assert "0 of 3 before, 3 of 3 after" in shown
    assert outcome.checkpoint in shown
    assert outcome.sampler in shown
    assert (
        f"server stays up for 5 minutes, and with it the run in its console:\n  {outcome.console}\n"
        in shown
    )
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["loss.png", "report.html", "results.json"]


def test_the_suggested_commands_can_be_copied_from_80_columns(outcome, tmp_path, monkeypatch):
    """Each is a command of the shell as it stands: no line is wrapped by the terminal."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("tinkex.cli.demo.executable", lambda command: f".venv/bin/{command}")
    console = Console(file=io.StringIO(), width=80, highlight=False, emoji=False)
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


def a_whole_run(progress: Progress) -> None:
    """What the loop tells the view."""
    progress.on_answer(0, "Rome.\x1b[2J [bold]")
    for step in range(1, 13):
        progress.on_step(4.0 - step / 4, 400)
        if step == 3:
            progress.on_kill(4711)
            progress.on_step(3.0, 400)  # was on its way
            assert progress.kill == Kill(process=4711, step=3, pause_s=0.0)
            progress._paused_s -= 20.0
        if step % 4 == 0:
            progress.on_answer(step, "Arr, Rome be the place " * 9)


def test_progress_in_a_pipe_is_lines():
    console = Console(file=io.StringIO(), width=60, highlight=False, emoji=False)
    with showing(console, 13, "Capital?") as progress:
        a_whole_run(progress)
    lines = console.file.getvalue().splitlines()
    kinds = "".join(line.split()[0][0] for line in lines)
    assert kinds == "CsACsCssC"  # Capital?, step 1, After step 3, …
    assert lines[0] == "  Capital?  Rome.[2J [bold]"
    assert lines[2] == "After step 3, the engine (process 4711) is killed with SIGKILL, on purpose"
    assert re.fullmatch(r"step  13 of 13  loss 1\.000  \d+ tokens/s", lines[-2])
    assert 20 < progress.kill.pause_s < 30


@pytest.mark.parametrize("height", [10, 24, 60])
def test_progress_on_a_terminal_is_one_view_that_fits(height):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=80, height=height, highlight=False
    )
    progress = LiveProgress(console, 13, "Capital?")
    a_whole_run(progress)
    with console.capture() as captured:
        console.print(progress)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert len(lines) < height
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "step  13 of 13  loss 1.000" in text
    assert "   step 8  Arr, Rome be the place" in text
    assert "Rome.[2J [bold]" in text
    assert "After step 3, the engine (process 4711) is killed with SIGKILL" in text
    assert "the run went on after 20." in text
    assert ("step 1 " in text) is (height > 10)  # the curve


def settings_of_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TINK")}


def test_a_run_too_short_to_learn_from_leaves_its_files_and_fails(server, tmp_path):
    arguments = ["--base-url", server.url, "--model", TINY, "--steps", "2"]
    before = settings_of_environment()
    result = CliRunner().invoke(command, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 1, result.output
    assert settings_of_environment() == before
    assert "killed" not in result.output, "only the engine of its own server is killed"
    assert "The checkpoint is saved" in result.output
    assert "tinker://" in result.output
    assert "error: " in result.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["loss.png", "report.html", "results.json"]


# -- the whole, with a server of its own ---------------------------------------------------------


@dataclass(frozen=True)
class Home:
    """Where a person runs the demo again and again, on a tiny model."""

    folder: Path
    data: Path
    model: str
    env: Mapping[str, str]

    @property
    def settings(self) -> LocalSettings:
        return LocalSettings.from_env(self.env)

    @property
    def arguments(self) -> list[str]:
        return ["demo", "--model", self.model, "--steps", "6"]

    def run(self, output: str) -> tuple[dict[str, Any], str]:
        """The results and the output of a run in a pipe."""
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.cli", *self.arguments, "--output", output],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        # A tiny model learns too little in six steps.
        assert done.returncode == 1, done.stdout + done.stderr
        assert done.stderr.startswith("error: The loss only went from"), done.stderr
        return json.loads((self.folder / output / "results.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def home(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Its local server stays between the runs."""
    folder = tmp_path_factory.mktemp("demo")
    env = {
        **os.environ,
        "TINKEX_LOCAL_DATA": str(folder / "data"),
        "TINKEX_LOCAL_ARGS": "--threads 1",
        "TINKEX_LOCAL_KEEP_S": "60",
    }
    yield Home(folder=folder, data=folder / "data", model=f"{TINY}={tiny_model}", env=env)
    if (server := registry.of_data(folder / "data")) is not None:
        control.stop(server, force=True)


@pytest.mark.timeout(180)
def test_a_run_whose_engine_is_killed_gives_the_results_of_one_that_is_left_alone(home: Home):
    killed, shown = home.run("killed")
    kill = killed["kill"]
    assert kill["step"] == 3
    assert kill["pause_s"] > 1
    assert f"After step 3, the engine (process {kill['process']}) is killed" in shown
    assert f"The run went on {kill['pause_s']:.1f} s later, and each of its 6 steps" in shown
    assert killed["steps_problem"] is None
    server = registry.of_data(home.data)
    assert server is not None
    assert f"{server.url}/training_runs/" in shown
    # A second program uses the server now, so nothing is killed.
    held = attach(home.settings)
    try:
        whole, shown = home.run("whole")
    finally:
        held.release()
    assert whole["kill"] is None
    assert f"kills no engine here: others use the server, too: process {os.getpid()} (" in shown
    assert [step for step, _ in whole["answers"]] == [0, 2, 4, 6]
    assert killed["losses"] == pytest.approx(whole["losses"], abs=1e-4)
    assert killed["answers"] == whole["answers"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment", ["Starting the server", "Loading the model", "killed with"])
def test_ctrl_c_ends_it_at_any_moment_without_a_trace(home: Home, moment: str):
    if moment == "Starting the server" and (server := registry.of_data(home.data)):
        control.stop(server, force=True)
    demo = OnTerminal(*home.arguments, cwd=home.folder, env=home.env)
    demo.read(lambda: moment in demo.seen)
    os.kill(demo.process.pid, signal.SIGINT)
    status, shown = demo.end()
    assert status == 130, shown
    assert shown.rstrip().endswith("Stopped.")
    assert "Traceback" not in shown
    assert demo.raw.rindex("\x1b[?25h") > demo.raw.rindex("\x1b[?25l"), "the cursor is back"
    if moment == "killed with":
        assert "The steps that are done stay on the server: http://127.0.0.1:" in shown


def test_a_model_of_ones_own_needs_no_variable(home: Home, monkeypatch: pytest.MonkeyPatch):
    for name in ("TINKEX_LOCAL_DATA", "TINKEX_LOCAL_ARGS"):
        monkeypatch.setenv(name, home.env[name])
    before = settings_of_environment()
    console = Console(file=io.StringIO())
    with service_for(console, "local", home.model) as (service, name, server):
        assert name == TINY
        served = [one.model_name for one in service.get_server_capabilities().supported_models]
        assert TINY in served
        assert server is not None
        assert server.adds_models
    assert settings_of_environment() == before


def test_only_the_engine_of_a_local_server_is_killed(home: Home):
    held = attach(home.settings)
    try:
        assert held.running is not None
        with pytest.raises(KeepEngine, match="was not started by a demo"):
            kill_engine(replace(held.running, how="serve"), TINY)
        with pytest.raises(KeepEngine, match="0 engine processes of another"):
            kill_engine(held.running, "another")
    finally:
        held.release()
