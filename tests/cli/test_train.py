"""`tinkex train`: on a real terminal, killed and resumed, and what it says about mistakes."""

import fcntl
import json
import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from on_terminal import OnTerminal
from serving import Server
from tinkex.cli.command_group import command
from tinkex.cli.train_state import TrainState

pytestmark = pytest.mark.timeout(120)  # with the start of the server

REWARD = """
def prompts():
    return ["the sea", {"prompt": "the ship", "more": 1}]

def reward(row, answer):
    return answer.count("e") / 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a file of chats."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} and {n}?"},
                {"role": "assistant", "content": f"It is {2 * n}, captain."},
            ]
        }
        for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def run(server: Server | None, *args: str) -> tuple[int, str, str]:
    url = [] if server is None else ["--base-url", server.url]
    result = CliRunner().invoke(command, ["train", *args, *url])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_a_chat_file_is_learned_and_the_defaults_are_said_aloud(server, folder):
    status, out, err = run(server, "chats.jsonl", "--learning-rate", "1e-2", "--epochs", "4")
    assert status == 0, err
    assert "18 chats to train on, 2 held out; chat template of the model" in err
    assert "9 steps of 8, 4 times through the data" in err
    assert "LoRA rank 32 (default for a model whose name has no size), learning rate 0.01" in err
    assert re.search(r"step +9 of 9  loss \d\.\d{3}  held-out loss", err)
    before, after = map(float, re.findall(r"^held-out loss: (.*) → (.*)$", out, re.MULTILINE)[0])
    assert after < before - 0.5
    assert out.count("\nbefore  ") == out.count("\nafter   ") == 2
    assert re.search(
        r"^sampler weights  tinker://.*/sampler_weights/step-00009$", out, re.MULTILINE
    )

    status, again, err = run(server, "chats.jsonl", "--learning-rate", "1e-2", "--epochs", "4")
    assert status == 0
    assert "chats-sft is finished; --restart trains again." in err
    assert again == out
    status, _, err = run(server, "chats.jsonl", "--learning-rate", "2e-2", "--epochs", "4")
    assert status == 1
    assert "chats-sft has a run with learning_rate 0.01, not 0.02." in err
    assert "--restart" in err
    (folder / "chats.jsonl").write_text((folder / "chats.jsonl").read_text() + "\n")
    status, _, err = run(server, "chats.jsonl", "--learning-rate", "1e-2", "--epochs", "4")
    assert "error: chats-sft has a run with another content of chats.jsonl." in err


def test_preferences_are_trained_by_dpo(server, folder):
    rows = [
        {"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(8)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ("pairs.jsonl", "--learning-rate", "3e-3", "--steps", "4", "-f", "json", "-o", "dpo")
    status, out, err = run(server, *args)
    assert status == 0, err
    found = json.loads(out)
    assert found["steps"] == 4
    held = [row["held_out_margin"] for row in found["history"] if "held_out_margin" in row]
    assert held[-1] > held[0] + 0.05
    assert len(found["samples"]) == 1
    assert found["output"] == "dpo"
    status, _, err = run(server, "pairs.jsonl", "--method", "sft")
    assert status == 1
    assert "rows of kind preference are for --method dpo, not sft" in err


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_a_reward_file_is_enough_for_reinforcement_learning(server, folder, loss):
    (folder / "vowels.py").write_text(REWARD)
    args = ("--steps", "2", "--max-tokens", "4", "--group-size", "4", "--loss", loss)
    status, out, err = run(server, "--reward", "vowels.py", *args)
    assert status == 0, err
    assert f"{loss} with the reward of vowels.py: 2 prompts" in err
    assert "2 steps of 2 prompts with 4 answers of up to 4 tokens" in err
    assert re.search(r"step +2 of 2  reward \d\.\d{3}  KL \d\.\d{3}", err)
    assert "reward: " in out


MISTAKES: list[tuple[str, tuple[str, ...], str]] = [
    ("{", ("chats.jsonl",), "chats.jsonl, line 1: not JSON"),
    (
        '{"messages": [{"role": "user"}]}',
        ("chats.jsonl",),
        "chats.jsonl, line 1: messages[0].content: is missing",
    ),
    (
        '{"messages": [{"role": "user", "content": "a"}]}',
        ("chats.jsonl",),
        "chats.jsonl, line 1: messages: there is nothing to learn",
    ),
    ("", (), "Give DATA, or --reward FILE.py."),
    ("", ("--reward", "no.py", "--method", "dpo"), "--reward is a method of its own"),
    ("", ("--reward", "no.py"), "no.py has no function reward."),
    ("", ("--reward", "broken.py"), "broken.py: cannot be loaded: ZeroDivisionError"),
    ("", ("--reward", "alone.py"), "alone.py has no function prompts, and there is no DATA."),
    ("", ("--reward", "nan.py"), "nan.py: reward() returned nan for"),
    ("", ("--reward", "fails.py"), "fails.py: reward() failed for"),
    (
        '{"messages": [{"role": "user", "content": "a"}]}',
        ("chats.jsonl", "--reward", "alone.py"),
        "chats.jsonl, line 1: prompt: is missing, and --reward needs one",
    ),
    ("", ("--reward", "missing.py"), "missing.py is not a Python file."),
    ("", ("missing.jsonl",), "missing.jsonl: No such file or directory."),
]


@pytest.mark.parametrize(("line", "args", "message"), MISTAKES, ids=lambda each: str(each)[:30])
def test_mistakes_are_one_sentence(server, folder, line, args, message):
    (folder / "chats.jsonl").write_text(line)
    (folder / "no.py").write_text("")
    (folder / "broken.py").write_text("1 / 0")
    (folder / "alone.py").write_text("def reward(row, answer): return 1")
    start = "def prompts(): return ['a']\n"
    (folder / "nan.py").write_text(f"{start}def reward(row, answer): return float('nan')")
    (folder / "fails.py").write_text(f"{start}def reward(row, answer): return row['no']")
    status, out, err = run(server, *args, "--steps", "1", "--max-tokens", "1")
    assert status in (1, 2)
    first = next(text for text in err.splitlines() if text.startswith("error: "))
    assert message.removeprefix("Give")[1:] in first
    assert out == ""


# -- on a terminal -----------------------------------------------------------------------------------


def on_terminal(server: Server, folder: Path, *args: str) -> OnTerminal:
    return OnTerminal("train", *args, "--base-url", server.url, cwd=folder)


@pytest.mark.timeout(120)
def test_a_run_on_a_terminal_goes_on_after_ctrl_c_and_after_kill_9(server, folder):
    args = ("chats.jsonl", "--steps", "40", "--save-every", "4", "--learning-rate", "3e-3")
    file = folder / "chats-sft" / "run.json"

    def saved() -> int:
        return json.loads(file.read_text())["step"] if file.exists() else 0

    first = on_terminal(server, folder, *args)
    first.read(lambda: saved() >= 4)
    os.kill(first.process.pid, signal.SIGINT)
    status, shown = first.end()
    assert status == 130, shown
    stopped = saved()
    assert f"Stopped after step {stopped} of 40, and saved." in shown
    assert "Stopping: steps that the server has already are finished and saved first." in shown
    assert re.search(r"loss \d\.\d{3}  held out \d\.\d{3} \d+ tokens/s, left \d:\d\d:\d\d", shown)
    assert not re.search(r"(?<!\d)0 tokens/s", shown)  # no speed before something is trained

    second = on_terminal(server, folder, *args)
    second.read(lambda: saved() > stopped)
    os.kill(second.process.pid, signal.SIGKILL)
    status, shown = second.end()
    assert status == -signal.SIGKILL
    assert f"Going on after step {stopped} of 40" in shown
    killed = saved()
    assert killed % 4 == 0

    third = on_terminal(server, folder, *args)
    status, shown = third.end()
    assert status == 0, shown
    assert f"Going on after step {killed} of 40" in shown
    assert "step 40/40" in shown
    assert "held-out loss: " in shown
    joined = json.loads(file.read_text())["history"]
    assert [row["step"] for row in joined] == list(range(41))

    # The same losses as those of a run that nothing interrupted.
    status, out, err = run(server, *args, "-o", "whole", "-f", "json")
    assert status == 0, err
    whole = json.loads(out)["history"]
    losses = [[row["loss"] for row in rows[1:]] for rows in (joined, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_two_runs_do_not_share_a_folder(server, folder):
    (folder / "chats-sft").mkdir()
    with (folder / "chats-sft" / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status, _, err = run(server, "chats.jsonl")
    assert status == 1
    assert "error: another `tinkex train` is using chats-sft." in err


def test_a_state_file_that_is_damaged_is_reported(server, folder):
    (folder / "chats-sft").mkdir()
    (folder / "chats-sft" / "run.json").write_text('{"step": 3}')
    status, _, err = run(server, "chats.jsonl")
    assert status == 1
    assert "hint: --restart begins anew." in err


def test_the_state_may_be_in_the_current_folder(folder):
    TrainState(folder=Path(), settings={"steps": 3}, step=2).save()
    found = TrainState.load(folder)
    assert found is not None
    assert found.step == 2


def test_rows_longer_than_the_context_are_left_out_and_counted(server, folder):
    long = {"prompt": "a " * 3000, "completion": "b"}
    short = [{"prompt": str(n), "completion": "b"} for n in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, [long, *short])))
    status, _, err = run(server, "rows.jsonl", "--steps", "1")
    assert status == 0, err
    assert "1 of 4 rows are left out: longer than 2048 tokens" in err
    assert "3 completions to train on, 0 held out" in err
    (folder / "long.jsonl").write_text(json.dumps(long))
    status, _, err = run(server, "long.jsonl", "--steps", "1")
    assert status == 1
    assert "every row is longer than the model's context of 2048 tokens." in err
