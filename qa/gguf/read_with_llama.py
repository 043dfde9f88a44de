"""Reads a GGUF file with llama-cpp-python: ids of texts, and greedy tokens after given ids."""

import json
import sys

from llama_cpp import Llama

request = json.load(sys.stdin)
# Keys and values in float32, as in the model that it is compared with; by default they are rounded.
exact = {"type_k": 0, "type_v": 0}
llama = Llama(request["file"], n_ctx=512, verbose=False, seed=0, **exact)
ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]]
tokens = []
for prompt in request["ids"]:
    llama.reset()
    found = []
    for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        found.append(int(token))
        if len(found) == request["new"]:
            break
    tokens.append(found)
print(json.dumps({"ids": ids, "tokens": tokens}))
