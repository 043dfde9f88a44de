"""
Runs recipes and tutorials of the official cookbook, unmodified and offline, on the embedded model.

    python -m qa.cookbook.run [--client tinker|tinkex] [NAME ...]        (`make cookbook`)

Each runs with the official SDK, and through `tinkex.as_tinker` in an environment without the official
SDK. Models and data sets of the hub are replaced by local folders of the same names. Writes
docs/reference/cookbook.md; recipes that are not run keep their rows.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sdk_envs
from serving import serving
from tinkex.models.resolve import DEFAULT_MODEL, resolve

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.5.8"
SDK, TINKEX = "tinker", "tinkex"
PAGE = ROOT / "docs" / "reference" / "cookbook.md"
CONVERSATIONS = ROOT / "src" / "tinkex" / "cli" / "demo_data" / "pirate.jsonl"
#: Model names that recipes and tutorials use; the server serves the embedded model under all of them.
MODELS = (DEFAULT_MODEL, "Qwen/Qwen3-8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B-Base")
#: Tokens of the embedded model that are renamed to tokens that the renderers need.
RENAMED = {"<issue_start>": "<think>", "<issue_comment>": "</think>"}
R = (f"model_name={DEFAULT_MODEL}", "renderer_name=qwen3_instruct")
PPO = '{"clip_low_threshold":0.8,"clip_high_threshold":1.2}'
LIMIT_S = 900

Metrics = list[dict[str, Any]]


def loss_falls(metrics: Metrics, printed: str) -> str:
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert losses[-1] < losses[0], losses
    return f"NLL {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses)} steps"


def trains_by_reward(metrics: Metrics, printed: str) -> str:
    name = "reward/total" if "reward/total" in metrics[-1] else "env/all/reward/total"
    rewards = [row[name] for row in metrics if name in row]
    assert rewards, f"no reward among {sorted(metrics[-1])}"
    diverged = [
        row["optim/kl_sample_train_v1"] for row in metrics if "optim/kl_sample_train_v1" in row
    ]
    details = f", KL between sampler and trainer {max(map(abs, diverged)):.1e}" if diverged else ""
    if skipped := printed.count("all advantages zero"):
        details += f"; {skipped} without training, because all rewards were equal"
    return f"{len(rewards)} steps, reward {rewards[0]:.2f} → {rewards[-1]:.2f}{details}"


def samples(metrics: Metrics, printed: str) -> str:
    found = re.findall(r"^Sample \d+:", printed, re.MULTILINE)
    assert found, printed[-500:]
    return f"{len(found)} samples of the base model"


def overlaps(metrics: Metrics, printed: str) -> str:
    speedups = re.findall(r"^Speedup: (\S+)x", printed, re.MULTILINE)
    assert speedups, printed[-500:]
    return f"speedup of concurrent over sequential requests: {', '.join(speedups)}"


def computes_losses(metrics: Metrics, printed: str) -> str:
    losses = dict(re.findall(r"^(\w+) +loss:sum = (\S+)", printed, re.MULTILINE))
    assert len(losses) > 3, printed[-500:]
    assert "Custom loss metrics" in printed, printed[-500:]
    return ", ".join(f"{name} {float(value):.2f}" for name, value in losses.items())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A module of the cookbook with its options, or a tutorial, and the check of its output."""

    module: str = ""
    options: tuple[str, ...] = ()
    tutorial: str = ""
    #: Checks metrics and printed text; returns a summary.
    check: Callable[[Metrics, str], str]

    @property
    def command(self) -> str:
        if self.tutorial:
            return f"python tutorials/{self.tutorial}.py"
        return f"python -m tinker_cookbook.recipes.{self.module} {' '.join(self.options)}"


RECIPES: Mapping[str, Recipe] = {
    "chat_sl": Recipe(
        module="chat_sl.train",
        options=(
            *R,
            *("dataset=chat.jsonl", "batch_size=16", "lora_rank=16", "max_length=256"),
            *("learning_rate=1e-3", "save_every=2", "max_steps=12"),
        ),
        check=loss_falls,
    ),
    "math_rl": Recipe(
        module="math_rl.train",
        options=(
            *R,
            *("eval_every=0", "lora_rank=16", "groups_per_batch=8", "group_size=4"),
            *("max_tokens=5", "loss_fn=ppo", f"loss_fn_config={PPO}", "num_substeps=2"),
            *("compute_post_kl=True", "max_steps=4"),
        ),
        check=trains_by_reward,
    ),
    "rl_loop": Recipe(
        module="rl_loop",
        options=(
            *("model_name=Qwen/Qwen3-8B", "batch_size=4", "group_size=4"),
            *("max_tokens=16", "max_steps=2"),
        ),
        check=trains_by_reward,
    ),
    "text_arena": Recipe(
        module="multiplayer_rl.text_arena.train",
        options=(*R, "batch_size=4", "num_train_datapoints=16", "max_tokens=8", "max_steps=1"),
        check=trains_by_reward,
    ),
    "tutorial 101": Recipe(tutorial="101_hello_tinker", check=samples),
    "tutorial 103": Recipe(tutorial="103_async_patterns", check=overlaps),
    "tutorial 202": Recipe(tutorial="202_loss_functions", check=computes_losses),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    client: str
    date: str
    passed: bool
    summary: str
    seconds: float


def write_hub_folders(folder: Path, model: Path) -> None:
    """Writes folders that replace models and data sets of the hub."""
    for name in MODELS:
        copy = folder / name
        copy.mkdir(parents=True)
        for file in model.iterdir():
            if file.name != "tokenizer.json":
                (copy / file.name).symlink_to(file)
        text = (model / "tokenizer.json").read_text()
        for old, new in RENAMED.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        (copy / "tokenizer.json").write_text(text)
    rows = [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()]
    conversations = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
        if "answer" in row
    ]
    # Twelve batches of 16 for any number of conversations.
    write_lines(
        folder / "chat.jsonl", [conversations[n % len(conversations)] for n in range(16 * 13)]
    )
    questions = folder / "openai" / "gsm8k"
    questions.mkdir(parents=True)
    parts = [f"  - split: {part}\n    path: {part}.jsonl\n" for part in ("train", "test")]
    about = f"---\nconfigs:\n- config_name: main\n  data_files:\n{''.join(parts)}---\n"
    (questions / "README.md").write_text(about)
    # As in the real data set, the answer follows four number signs.
    rows = [
        {
            "question": f"1 + 1 = \\boxed{{2}}, 1 + 2 = \\boxed{{3}}, 2 + {n % 3} = ",
            "answer": f"Add them.\n#### {2 + n % 3}",
        }
        for n in range(16)
    ]
    for part in ("train", "test"):
        write_lines(questions / f"{part}.jsonl", rows)


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def interpreter(client: str) -> list[str]:
    """The command that runs a program with either client."""
    if client == SDK:
        return [str(sdk_envs.ensure_cookbook(VERSION))]
    python = sdk_envs.ensure_cookbook_without_sdk(VERSION)
    absent = "import importlib.util as u, sys; sys.exit(u.find_spec('tinker') is not None)"
    subprocess.run([python, "-c", absent], check=True)
    return [str(python), "-m", "tinkex.as_tinker"]


def run_recipe(name: str, client: str, python: list[str], url: str, folder: Path) -> Outcome:
    recipe = RECIPES[name]
    log = folder / "logs" / client / name
    if recipe.tutorial:
        tutorials = sdk_envs.cookbook_tutorials(VERSION)
        command = [*python, str(tutorials / f"{recipe.tutorial}.py")]
    else:
        module = f"tinker_cookbook.recipes.{recipe.module}"
        command = [*python, "-m", module, *recipe.options, f"log_path={log}"]
    env = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-cookbook",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        rows = log / "metrics.jsonl"
        lines = rows.read_text().splitlines() if rows.exists() else []
        metrics = [json.loads(line) for line in lines]
        passed, summary = True, recipe.check(metrics, done.stdout + done.stderr)
    except (AssertionError, subprocess.TimeoutExpired, OSError, LookupError) as error:
        passed, summary = False, f"{type(error).__name__}: {error}"
    return Outcome(
        name=name,
        client=client,
        date=datetime.date.today().isoformat(),
        passed=passed,
        summary=summary,
        seconds=time.monotonic() - began,
    )


def page(outcomes: list[Outcome]) -> str:
    dates = sorted({outcome.date for outcome in outcomes})
    at = {(outcome.name, outcome.client): outcome for outcome in outcomes}
    lines = [
        "# The official cookbook",
        "",
        f"`make cookbook` runs recipes and tutorials of tinker-cookbook {VERSION}, unmodified and",
        f"offline, on a server that serves `{DEFAULT_MODEL}` (CPU) under the",
        "names of the models that they use: with the official SDK 0.36.0, and through",
        "`tinkex.as_tinker` in an environment without the official SDK. The first recipe that uses a",
        "model also waits until it is loaded.",
        f"Last run: {' to '.join(sorted({dates[0], dates[-1]}))}.",
        "",
        "| | client | runs | result | seconds |",
        "|---|---|---|---|---:|",
    ]
    for name in RECIPES:
        for client in (SDK, TINKEX):
            if found := at.get((name, client)):
                runs = "yes" if found.passed else "no"
                summary = found.summary.strip().splitlines()[-1][:200].replace("|", "\\|")
                lines.append(f"| {name} | {client} | {runs} | {summary} | {found.seconds:.0f} |")
    lines += ["", "Commands:", ""]
    lines += [f"- {name}: `{recipe.command}`" for name, recipe in RECIPES.items()]
    return "\n".join([*lines, ""])


def stored_with(new: Outcome) -> list[Outcome]:
    """Stores this outcome; all stored outcomes."""
    file = sdk_envs.cache_folder() / "sdk" / f"cookbook-{VERSION}-outcomes.json"
    old = [Outcome(**row) for row in json.loads(file.read_text())] if file.exists() else []
    at = {(outcome.name, outcome.client): outcome for outcome in [*old, new]}
    file.write_text(json.dumps([asdict(outcome) for outcome in at.values()]))
    return list(at.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--client", choices=(SDK, TINKEX), help="run only this client")
    options = parser.parse_args()
    if unknown := set(options.names) - set(RECIPES):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(RECIPES)}")
    clients = [options.client] if options.client else [SDK, TINKEX]
    pythons = {client: interpreter(client) for client in clients}
    model = resolve(DEFAULT_MODEL)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_hub_folders(folder, model.folder)
        specs = [f"{name}={folder / name}" for name in MODELS]
        with serving(*specs, data=folder / "data", args=("--threads", "2")) as server:
            for name in options.names or RECIPES:
                for client, python in pythons.items():
                    outcome = run_recipe(name, client, python, server.url, folder)
                    outcomes.append(outcome)
                    PAGE.write_text(page(stored_with(outcome)))
                    word = "passed" if outcome.passed else "FAILED"
                    took = f"{outcome.seconds:.0f} s"
                    print(f"{name}, {client}, {word}: {outcome.summary} ({took})", flush=True)
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
