"""
Recipes of the official cookbook, unmodified, with the official SDK, on the embedded model; offline.

    python tests/cookbook/recipes.py [NAME ...]        (`make cookbook`)

The cookbook is installed from PyPI into an environment of its own. Everything runs in a temporary
folder in which folders named like a model stand in for its tokenizer. Writes docs/reference/cookbook.md.
"""

# ruff: noqa: T201

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import sdk_envs
from serving import serving
from tinkex.models.resolve import DEFAULT_MODEL, resolve

VERSION = "0.5.8"
PAGE = ROOT / "docs" / "reference" / "cookbook.md"
TALKS = ROOT / "src" / "tinkex" / "cli" / "demo_data" / "pirate.jsonl"
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
R = (f"model_name={DEFAULT_MODEL}", "renderer_name=qwen3_instruct")
PPO = '{"clip_low_threshold":0.8,"clip_high_threshold":1.2}'
LIMIT_S = 900

Metrics = list[dict[str, Any]]


def falls(metrics: Metrics) -> str:
    losses = [row["train_mean_nll"] for row in metrics if "train_mean_nll" in row]
    assert losses[-1] < losses[0], losses
    return f"NLL {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses)} steps"


def trains_by_reward(metrics: Metrics) -> str:
    rewards = [row["env/all/reward/total"] for row in metrics if "env/all/reward/total" in row]
    assert rewards, f"no reward among {sorted(metrics[-1])}"
    diverged = [
        row["optim/kl_sample_train_v1"] for row in metrics if "optim/kl_sample_train_v1" in row
    ]
    told = f", KL between sampler and trainer {max(map(abs, diverged)):.1e}" if diverged else ""
    return f"{len(rewards)} steps, reward {rewards[0]:.2f} → {rewards[-1]:.2f}{told}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    module: str
    options: tuple[str, ...]
    #: What its metrics must show, and in which words.
    judged: Callable[[Metrics], str]


RECIPES: Mapping[str, Recipe] = {
    "chat_sl": Recipe(
        module="chat_sl.train",
        options=(
            *R,
            *("dataset=chat.jsonl", "batch_size=16", "lora_rank=16", "max_length=256"),
            *("learning_rate=1e-3", "save_every=2", "max_steps=12"),
        ),
        judged=falls,
    ),
    "math_rl": Recipe(
        module="math_rl.train",
        options=(
            *R,
            *("eval_every=0", "lora_rank=16", "groups_per_batch=8", "group_size=4"),
            *("max_tokens=5", "loss_fn=ppo", f"loss_fn_config={PPO}", "num_substeps=2"),
            *("compute_post_kl=True", "max_steps=4"),
        ),
        judged=trains_by_reward,
    ),
    "text_arena": Recipe(
        module="multiplayer_rl.text_arena.train",
        options=(*R, "batch_size=4", "num_train_datapoints=16", "max_tokens=8", "max_steps=1"),
        judged=trains_by_reward,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    name: str
    passed: bool
    seen: str
    seconds: float


def prepared(folder: Path, model: Path) -> None:
    """What stands in for the hub: a tokenizer and a data set."""
    stand_in = folder / DEFAULT_MODEL
    stand_in.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(model / name, stand_in)
    rows = [json.loads(line) for line in TALKS.read_text().splitlines()]
    talks = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
        if "answer" in row
    ]
    # Twelve batches of 16, whatever the number of talks.
    lines = [json.dumps(talks[n % len(talks)]) for n in range(16 * 13)]
    (folder / "chat.jsonl").write_text("\n".join([*lines, ""]))


def tried(name: str, url: str, folder: Path) -> Outcome:
    recipe = RECIPES[name]
    log = folder / "logs" / name
    began = time.monotonic()
    command = [
        str(sdk_envs.ensure_cookbook(VERSION)),
        *("-m", f"tinker_cookbook.recipes.{recipe.module}", *recipe.options),
        *(f"log_path={log}", "behavior_if_log_dir_exists=delete"),
    ]
    env = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-cookbook",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
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
        lines = (log / "metrics.jsonl").read_text().splitlines()
        passed, seen = True, recipe.judged([json.loads(line) for line in lines])
    except (AssertionError, subprocess.TimeoutExpired, OSError, LookupError) as error:
        passed, seen = False, f"{type(error).__name__}: {error}"
    return Outcome(name=name, passed=passed, seen=seen, seconds=time.monotonic() - began)


def page(outcomes: list[Outcome]) -> str:
    date = datetime.date.today().isoformat()
    lines = [
        "# The official cookbook on this server",
        "",
        f"`make cookbook` runs recipes of tinker-cookbook {VERSION}, unmodified, with the official SDK",
        f"0.36.0 on `{DEFAULT_MODEL}` (CPU, offline). Last run: {date}.",
        "",
        "| recipe | runs | seen | seconds |",
        "|---|---|---|---:|",
    ]
    for outcome in outcomes:
        runs = "yes" if outcome.passed else "no"
        seen = outcome.seen.strip().splitlines()[-1][:200].replace("|", "\\|")
        lines.append(f"| `{outcome.name}` | {runs} | {seen} | {outcome.seconds:.0f} |")
    lines += ["", "What was asked of each:", ""]
    for name, recipe in RECIPES.items():
        lines.append(f"- `python -m tinker_cookbook.recipes.{recipe.module}`")
        lines.append(f"  `{' '.join(recipe.options)}` ({name})")
    return "\n".join([*lines, ""])


def main(names: list[str]) -> int:
    model = resolve(DEFAULT_MODEL)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepared(folder, model.folder)
        args = ("--threads", "2")
        spec = f"{DEFAULT_MODEL}={model.folder}"
        with serving(spec, data=folder / "data", args=args) as server:
            for name in names:
                outcome = tried(name, server.url, folder)
                outcomes.append(outcome)
                word = "runs" if outcome.passed else "FAILS"
                print(f"{name} {word}: {outcome.seen} ({outcome.seconds:.0f} s)", flush=True)
    if names == list(RECIPES):
        PAGE.write_text(page(outcomes))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(RECIPES)))
