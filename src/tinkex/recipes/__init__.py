"""
Training recipes: short programs to run as they are, or to copy and change.

    from tinkex.recipes import sft

    for step in sft.train(service, examples, sft.Settings(model=MODEL, steps=100)):
        print(step.number, step.metrics["loss"])

Each recipe is one file: `sft` (supervised fine-tuning), `dpo` (preferences), `rl` (a reward of
your own), `distill` (from a teacher) and `evaluate`. `service` is a client of tinkex or of the
official SDK: recipes build the types of the SDK that they are given. What they share is in
`common`; they read data with `tinkex.data`.
"""
