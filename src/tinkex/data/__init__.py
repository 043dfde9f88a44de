"""
Training data: files of conversations, tokens with weights, and batches.

    from tinkex import data

    rows = data.read("chats.jsonl")
    examples = [example for row in rows for example in data.examples(tokenizer, row)]
    for batch in data.batches(examples, size=8, seed=0):
        training.forward_backward([example.datum() for example in batch], "cross_entropy")

Everything here is plain Python: no torch, no network, and any tokenizer with the methods of
transformers. Nothing is loaded with `import tinkex`.
"""

from tinkex.data.examples import (
    Example,
    Pair,
    batches,
    examples,
    pair,
    prompt_tokens,
    split,
    stream,
)
from tinkex.data.rows import DataError, Kind, Row, check, read

__all__ = [
    "DataError",
    "Example",
    "Kind",
    "Pair",
    "Row",
    "batches",
    "check",
    "examples",
    "pair",
    "prompt_tokens",
    "read",
    "split",
    "stream",
]
