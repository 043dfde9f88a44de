"""
Records how many weights the official cookbook counts for adapters of known models.

    python -m qa.cookbook.adapter_sizes

Writes tests/data/adapter_sizes.json, with which `tests/numerics/test_adapter_sizes.py` compares the
adapters of the engine. The cookbook runs unmodified and offline, in its own environment.
"""

import json
import subprocess
import sys
from pathlib import Path

import sdk_envs
from qa.cookbook.run import VERSION

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "adapter_sizes.json"
RANK = 32

MODELS = [
    *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"),
    *("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B"),
    *("meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Base"),
    *("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    *("openai/gpt-oss-20b", "openai/gpt-oss-120b", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B"),
    *("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B"),
    *("Qwen/Qwen3.5-35B-A3B-Base", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"),
    *("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base"),
    "moonshotai/Kimi-K2-Thinking",
]

PROGRAM = """
import json, sys
from tinker_cookbook.hyperparam_utils import get_lora_param_count

rank, *models = sys.argv[1:]
kinds = ("attn", "mlp", "unembed")
print(json.dumps({
    model: {
        kind: get_lora_param_count(
            model, lora_rank=int(rank), **{f"train_{each}": each == kind for each in kinds}
        )
        for kind in kinds
    }
    for model in models
}))
"""


def main() -> int:
    python = sdk_envs.ensure_cookbook(VERSION)
    command = [str(python), "-W", "ignore", "-c", PROGRAM, str(RANK), *MODELS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    FILE.write_text(
        json.dumps({"cookbook": VERSION, "rank": RANK, "weights": found}, indent=1) + "\n"
    )
    print(f"wrote {FILE}: {len(found)} models")
    return 0


if __name__ == "__main__":
    sys.exit(main())
