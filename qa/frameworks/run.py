"""
Runs frameworks that are written for OpenAI's API, unmodified, against a server of the tiny model.

    python -m qa.frameworks.run        (`make frameworks`)

LangChain and `llm` run in an environment of their own: chats, streams, tools and structured output,
on a base model and on a checkpoint that was trained to call a tool.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import sdk_envs
import tinkex
from serving import TINY, serving
from tinkex.testing import write_tiny_model
from together.test_openai import DATA, trained_to_call

EXAMPLE = Path(__file__).parents[2] / "examples" / "frameworks" / "langchain_chat.py"
PACKAGES = ("langchain-openai==1.7.3", "llm==0.36")

LANGCHAIN = """
import sys
from typing import Literal
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

url, base, trained = sys.argv[1:]
question = [("user", "What is 2 + 3?")]

class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=99)

def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

for model in (base, trained):
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="x", max_tokens=60, seed=1)
    answer = chat.invoke(question)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
    streamed = [piece for piece in chat.stream(question)]
    assert "".join(piece.content for piece in streamed) == answer.content
    person = chat.with_structured_output(Person, method="json_schema").invoke(question)
    assert isinstance(person, Person), person
    print(model, "->", repr(answer.content[:40]), person)

from openai_tool import ADD
greedy = ChatOpenAI(model=trained, base_url=f"{url}/v1", api_key="x", max_tokens=100, temperature=0)
(call,) = greedy.bind_tools([ADD]).invoke(question).tool_calls
assert (call["name"], add(**call["args"])) == ("add", 5), call
print("a call of the checkpoint:", call["name"], call["args"])
"""

LLM_MODELS = """
- model_id: base
  model_name: {base}
  api_base: {url}/v1
  api_key_name: tinkex
- model_id: trained
  model_name: "{trained}"
  api_base: {url}/v1
  api_key_name: tinkex
"""


def run_langchain(python: Path, folder: Path, url: str, trained: str) -> None:
    from together.test_openai import ADD

    (folder / "openai_tool.py").write_text(f"ADD = {ADD!r}\n")
    subprocess.run([python, "-c", LANGCHAIN, url, TINY, trained], cwd=folder, check=True)
    subprocess.run([python, EXAMPLE, trained, "--base-url", url], check=True)


def run_llm(python: Path, folder: Path, url: str, trained: str) -> None:
    text = LLM_MODELS.format(url=url, base=TINY, trained=trained)
    (folder / "extra-openai-models.yaml").write_text(text)
    (folder / "keys.json").write_text('{"tinkex": "x"}')
    env = {**os.environ, "LLM_USER_PATH": str(folder)}
    for model in ("base", "trained"):
        for options in ([], ["--no-stream"]):
            command = [python, "-m", "llm", "-m", model, "-o", "max_tokens", "20", *options, "hi"]
            done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            assert done.stdout.strip(), done
            print("llm", model, *options, "->", repr(done.stdout[:40]))


def main() -> None:
    python = sdk_envs.ensure_frameworks(PACKAGES)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_tiny_model(folder / "model", arch="llama")
        shutil.copy(DATA / "chat_templates" / "hermes.jinja", model / "chat_template.jinja")
        with (
            serving(f"{TINY}={model}", data=folder / "data") as server,
            tinkex.ServiceClient(base_url=server.url) as service,
        ):
            trained = trained_to_call(service)
            run_langchain(python, folder, server.url, trained)
            run_llm(python, folder, server.url, trained)
    print("all frameworks ran")


if __name__ == "__main__":
    main()
