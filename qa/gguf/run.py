"""
GGUF exports, read by llama.cpp: python -m qa.gguf.run (`make gguf`)

Exports adapters on three models as GGUF and reads the files with llama-cpp-python, which pip builds
from source once, into the user's cache (it needs a C++ compiler and takes minutes). Compares the ids
of texts with those of the model's tokenizer, and greedy tokens with those of transformers for the
same merged weights. If llama-cpp-python cannot be built, transformers' own reader is used for the
tokens, and the report says so. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import sdk_envs
from numerics.helpers import random_adapter
from tinkex.cli.command_group import command
from tinkex.engine import Engine, EngineSettings
from tinkex.models.embedded import ensure_embedded
from tinkex.models.tokenizer import load_tokenizer
from tinkex.testing import write_tiny_model

READER = "llama-cpp-python"
PROGRAM = Path(__file__).with_name("read_with_llama.py")
TEXTS = [
    "The capital of France is",
    "It's 2026, and she'll pay 1234.50 dollars…\n\n  two spaces, a tab\tand émojis 🏴‍☠️!",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "def add(left, right):\n    return left + right  # 100%",
]
NEW_TOKENS = 16


def reader() -> Path | None:
    """An interpreter that has llama-cpp-python; None if it cannot be built here."""
    home = sdk_envs.cache_folder() / "sdk" / f"{READER}-py{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        print(f"Building {READER} from its source; this takes minutes …", flush=True)
        venv.create(home, with_pip=True, clear=True)
        built = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", READER],
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            print(built.stderr[-2000:])
            return None
        (home / ".ready").touch()
    return python


def export(folder: Path, work: Path, form: str, dtype: str) -> Path:
    out = work / f"{form}-{dtype}"
    arguments = [str(work / "adapter"), "--as", form, "--base", str(folder), "-o", str(out)]
    command.main(["export", *arguments, "--dtype", dtype], standalone_mode=False)
    return out


def greedy(model: Any, tokens: list[int]) -> list[int]:
    """The most likely continuation, token by token."""
    found = list(tokens)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


def check(name: str, folder: Path, work: Path, python: Path | None) -> list[str]:
    """What differs between the exported file and the model that it was made from."""
    from transformers import AutoModelForCausalLM

    work.mkdir()
    engine = Engine(EngineSettings(name=name, folder=folder, device="cpu", kv_tokens=64))
    random_adapter(engine, work / "adapter")
    del engine
    merged = AutoModelForCausalLM.from_pretrained(export(folder, work, "hf", "float32"))
    out = export(folder, work, "gguf", "float32")
    file = out / f"{out.name}.gguf"
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    expected = [greedy(merged, each) for each in ids]
    problems = []
    if python is None:
        theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=file.name)
        tokens = [greedy(theirs, each) for each in ids]
    else:
        request = json.dumps({"file": str(file), "texts": TEXTS, "ids": ids, "new": NEW_TOKENS})
        done = subprocess.run(
            [python, PROGRAM], input=request, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return [f"{name}: llama.cpp cannot read the file: {done.stderr[-1500:]}"]
        found = json.loads(done.stdout.splitlines()[-1])
        tokens = found["tokens"]
        problems += [
            f"{name}: {text!r} is {theirs} in llama.cpp, and {ours} here"
            for text, theirs, ours in zip(TEXTS, found["ids"], ids, strict=True)
            if theirs != ours
        ]
    same = sum(a == b for a, b in zip(tokens, expected, strict=True))
    if same < len(TEXTS):
        problems.append(f"{name}: greedy tokens {tokens}, expected {expected}")
    print(f"{name}: {len(TEXTS)} texts, {same} greedy continuations equal", flush=True)
    return problems


def main() -> None:
    python = reader()
    if python is None:
        print(f"{READER} could not be built. Ids are not checked; tokens by transformers' reader.")
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        models = {
            "tiny Llama": write_tiny_model(work / "llama", arch="llama"),
            "tiny Qwen3": write_tiny_model(work / "qwen3", arch="qwen3"),
            "SmolLM2-135M-Instruct": ensure_embedded(),
        }
        for number, (name, model) in enumerate(models.items()):
            if python is None and "Qwen3" in name:
                continue  # that reader knows heads of 128 only
            problems += check(name, model, work / str(number), python)
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
