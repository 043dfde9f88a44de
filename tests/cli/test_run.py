"""`tinkex run list`, `info` and `plot`: runs as people see them, on the fake and on a real server."""

import csv
import json
import os
import pty
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tinkex
from serving import TINY, Server
from tinkex import types
from tinkex.cli import loss_chart
from tinkex.cli.command_group import command
from tinkex.cli.run import age
from tinkex.testing import Answer, FakeService, Loopback

DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)


def tinkex_command(url: str, *args: str) -> Result:
    return CliRunner().invoke(
        command, args, env={"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x"}
    )


def in_terminal(url: str, *args: str, columns: int = 80) -> str:
    """What a terminal of this width shows, without colors."""
    controller, terminal = pty.openpty()
    env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-x", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-m", "tinkex.cli", *args],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env={**env, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
    ) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait(30) == 0, shown
    os.close(controller)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


class Runs:
    """Two runs on the fake: `first` with four steps, `second` with two."""

    def __init__(self, fake: FakeService, url: str) -> None:
        self.fake, self.url = fake, url
        with fake.client() as service:
            self.first, self.second = (
                self._trained(service, name, steps) for name, steps in (("one", 4), ("two", 2))
            )

    def _trained(self, service: tinkex.ServiceClient, name: str, steps: int) -> str:
        training = service.create_lora_training_client(
            "fake/model", rank=8, user_metadata={"name": name}
        )
        for _ in range(steps):
            training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.125)).result(5)
        return training.model_id

    def __call__(self, *args: str) -> Result:
        return tinkex_command(self.url, *args)


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    fake = FakeService()
    with Loopback(fake) as running:
        yield Runs(fake, running.url)


def test_the_list_shows_name_model_steps_loss_age_and_status(runs: Runs) -> None:
    done = runs("run", "list")
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["Run", "Name", "Model", "Steps", "Loss", "Age", "Status"]
    line = next(line for line in lines if line.startswith(runs.first))
    # The loss of the fourth step of the toy model.
    assert line.split()[:5] == [runs.first, "one", "fake/model", "4", "0.1733"]
    assert line.split()[-1] == "idle"


def test_every_line_fits_a_terminal_of_80_columns(runs: Runs) -> None:
    for args in (("list",), ("plot", runs.first, runs.second)):
        shown = in_terminal(runs.url, "run", *args)
        assert max(map(len, shown.splitlines())) <= 80, shown
        assert runs.first in shown


def test_a_long_id_and_a_long_model_fit_too(runs: Runs) -> None:
    run_id = "yXhpm1LIclnC1xDwycrUS5:train:0"
    run = {
        "training_run_id": run_id,
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "model_owner": "local",
        "is_lora": True,
        "last_request_time": "2026-01-01T00:00:00Z",
        "user_metadata": {"name": "pirate with a long name"},
        "steps": 12_345,
        "last_loss": 1.6304,
        "status": "running",
    }
    page = {"training_runs": [run], "cursor": {"offset": 0, "limit": 1, "total_count": 1}}
    runs.fake.script("training_runs", Answer(body=page))
    shown = in_terminal(runs.url, "run", "list")
    lines = [line.rpartition("\r")[2] for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80, shown
    assert any(run_id in line for line in lines), shown
    for word in ("SmolLM2-135M-Instruct", "12345", "1.63", "running"):
        assert word in shown


def test_a_run_is_shown_with_its_name_steps_and_loss(runs: Runs) -> None:
    shown = " ".join(runs("run", "info", runs.first).stdout.split())
    for words in ("Name one", "Status idle", "Steps 4", "Last loss 0.1733"):
        assert words in shown


def test_a_service_without_a_status_is_not_said_to_have_one(runs: Runs) -> None:
    """The hosted service says only whether a run is lost."""
    run = {
        "training_run_id": "a:train:0",
        "base_model": "m",
        "model_owner": "me",
        "is_lora": True,
        "last_request_time": "2026-01-01T00:00:00Z",
    }
    page = {"training_runs": [run, {**run, "corrupted": True}], "cursor": None}
    page["cursor"] = {"offset": 0, "limit": 2, "total_count": 2}
    runs.fake.script("training_runs", Answer(body=page))
    done = runs("run", "list", "--columns", "id,status")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["Status", "N/A", "failed"]


@pytest.mark.parametrize(
    ("ago", "word"),
    [(-5, "0s"), (0, "0s"), (59, "59s"), (60, "1m"), (3599, "59m"), (7200, "2h"), (86_400, "1d")],
)
def test_an_age_is_one_short_word(ago: float, word: str) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert age(now - timedelta(seconds=ago), now=now) == word


# -- plot ------------------------------------------------------------------------------------------


def test_a_pipe_gets_a_plain_chart(runs: Runs) -> None:
    one = runs("run", "plot", runs.first)
    assert one.exit_code == 0, one.stderr
    lines = one.stdout.splitlines()
    assert lines[0] == "loss"
    assert lines[-1].endswith(f"one ({runs.first}): 0.1733 at step 4")
    assert "\x1b" not in one.stdout
    assert lines[-2].split() == ["step", "1", "step", "4"]


def test_several_runs_share_one_chart(runs: Runs) -> None:
    plain = runs("run", "plot", runs.first, runs.second, runs.first).stdout
    # Without colors each run has its own character.
    assert "*" in plain
    assert "+" in plain
    assert plain.count(runs.first) == plain.count(runs.second) == 1
    shown = in_terminal(runs.url, "run", "plot", runs.first, runs.second)
    assert any(0x2800 < ord(char) < 0x2900 for char in shown)
    assert "━━ one" in shown
    assert "━━ two" in shown


def test_the_points_are_json_for_programs(runs: Runs) -> None:
    found = json.loads(runs("run", "plot", runs.first, "-f", "json").stdout)["runs"]
    assert [run["training_run_id"] for run in found] == [runs.first]
    assert [point["step"] for point in found[0]["points"]] == [1, 2, 3, 4]
    assert found[0]["points"][0]["metrics"]["learning_rate"] == 0.125


def test_files_are_written_as_svg_png_and_csv(runs: Runs, tmp_path: Path) -> None:
    both = (runs.first, runs.second)
    for ending in ("svg", "png", "csv"):
        done = runs("run", "plot", *both, "--out", str(tmp_path / f"chart.{ending}"))
        assert done.exit_code == 0, done.stderr
        assert done.stderr == f"Wrote {tmp_path / f'chart.{ending}'}\n"
    svg = ET.parse(tmp_path / "chart.svg").getroot()
    name = "{http://www.w3.org/2000/svg}polyline"
    assert [len((line.get("points") or "").split()) for line in svg.iter(name)] == [4, 2]
    # Names that differ are enough: ids are long.
    titles = [title.text for title in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["one", "two"]
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "chart.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"]) for row in rows] == [
        *((runs.first, str(step)) for step in range(1, 5)),
        *((runs.second, str(step)) for step in range(1, 3)),
    ]
    assert float(rows[3]["loss"]) == pytest.approx(0.17329, abs=1e-4)


def test_what_cannot_be_drawn_is_said_in_one_sentence(runs: Runs, tmp_path: Path) -> None:
    unknown = runs("run", "plot", runs.first, "--metric", "reward")
    assert unknown.exit_code == 1
    assert f"{runs.first} has no metric 'reward'." in unknown.stderr
    assert "learning_rate, loss, loss_sum" in unknown.stderr
    with runs.fake.client() as service:
        empty = service.create_lora_training_client("fake/model").model_id
    assert "no finished optimizer step yet" in runs("run", "plot", empty).stderr
    wrong = runs("run", "plot", runs.first, "--out", str(tmp_path / "a.jpg"))
    assert wrong.exit_code == 2
    assert ".png, .svg, .csv" in wrong.stderr
    assert runs("run", "plot").exit_code == 2
    assert runs("run", "plot", "nobody:train:0").exit_code == 1


def test_a_service_without_metrics_is_named(runs: Runs) -> None:
    runs.fake.script(
        f"training_runs/{runs.first}/metrics", Answer(status=404, body={"detail": "Not Found"})
    )
    done = runs("run", "plot", runs.first)
    assert done.exit_code == 1
    assert f"error: {runs.url} does not store the metrics of steps." in done.stderr
    assert "hint: Servers of tinkex do" in done.stderr


def test_a_run_on_a_real_server(server: Server) -> None:
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4, user_metadata={"name": "real"})
        losses = []
        for _ in range(3):
            passed = training.forward_backward([DATUM, DATUM], "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(passed.result().metrics["loss:sum"] / 6)
            norm = (stepped.result().metrics or {})["grad_norm:mean"]
        run: Any = json.loads(
            tinkex_command(server.url, "run", "info", training.model_id, "-f", "json").stdout
        )
        assert (run["steps"], run["status"]) == (3, "running")
        assert run["last_loss"] == pytest.approx(losses[-1])
        rest = tinkex.RestClient(service.holder)
        points = rest.get_training_run_metrics(training.model_id).result().points
    assert [point.metrics["loss"] for point in points] == pytest.approx(losses)
    assert points[-1].metrics["grad_norm"] == norm
    assert points[-1].metrics["learning_rate"] == 1e-2
    assert points[-1].metrics["tokens"] == 6
    assert points[-1].metrics["examples"] == 2
    assert points[-1].metrics["seconds"] > 0
    assert points[0].metrics["update_norm"] > 0
    after = json.loads(
        tinkex_command(server.url, "run", "info", training.model_id, "-f", "json").stdout
    )
    assert after["status"] == "finished"


def test_curves_of_different_lengths_are_drawn_where_they_are() -> None:
    long = loss_chart.Curve(label="long", steps=[1, 15], values=[4.0, 0.0])
    short = loss_chart.Curve(label="short", steps=[13, 14, 15], values=[4.0, 4.0, 4.0])
    lines = loss_chart.as_cells([long, short], width=15, height=5, braille=False)
    assert ["".join(char for char, _ in line).rstrip() for line in lines] == [
        "     4 |**          +++",
        "     3 |  ****",
        "     2 |      ***",
        "     1 |         ****",
        "     0 |             **",
        "       +---------------",
        "        step 1  step 15",
    ]
