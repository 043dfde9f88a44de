"""
Runs every recipe with the official SDK. Arguments: model, its folder, the sources of tinkex.

Plain text: its environment has no jinja2, which chat templates need.
"""

import json
import sys

MODEL, FOLDER, SOURCE = sys.argv[1:]
sys.path.append(SOURCE)

import tinker
from transformers import AutoTokenizer

from tinkex import data
from tinkex.recipes import common, distill, dpo, evaluate, rl, sft

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(6)]
examples = [example for row in rows for example in data.examples(tokenizer, row, plain=True)]
answers = [{**row, "chosen": row["completion"], "rejected": "No."} for row in rows]
pairs = [data.pair(tokenizer, row, plain=True) for row in answers]
small = {"model": MODEL, "rank": 4, "learning_rate": 1e-2}
few = {**small, "steps": 2, "group_size": 2, "max_tokens": 3, "prompts_per_step": 2, "plain": True}

service = tinker.ServiceClient()
steps = list(sft.train(service, examples, sft.Settings(**small, steps=3, save_every=2)))
resume = common.Resume(checkpoint=steps[1].checkpoint, step=2)
resumed = list(sft.train(service, examples, sft.Settings(**small, steps=3), resume=resume))
preferred = list(dpo.train(service, pairs, dpo.Settings(**small, steps=3)))
rewarded = list(
    rl.train(service, tokenizer, rows, lambda row, answer: len(answer), rl.Settings(**few))
)
teacher = service.create_sampling_client(model_path=steps[-1].sampler)
distilled = list(distill.train(service, teacher, tokenizer, rows, distill.Settings(**few)))
scored = evaluate.evaluate(
    teacher, tokenizer, rows[:4], lambda row, answer: 1.0, max_tokens=2, plain=True
)
print(
    json.dumps(
        {
            "sdk": common.types_of(service).__name__,
            "sft": [step.metrics["loss"] for step in steps],
            "resumed": [step.number for step in resumed],
            "dpo": [step.metrics["margin"] for step in preferred],
            "rl": [step.metrics["reward"] for step in rewarded],
            "distill": [step.metrics["kl"] for step in distilled],
            "evaluated": len(scored.answers),
        }
    )
)
