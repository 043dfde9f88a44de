"""Ask a checkpoint questions with LangChain: a prompt template, the model, and a parser.

    pip install langchain-openai
    python examples/frameworks/langchain_chat.py tinker://RUN/sampler_weights/NAME

LangChain knows nothing of tinkex: it speaks OpenAI's API to the server of the checkpoint.
"""

import argparse
import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

QUESTIONS = ["Where do fish live?", "What is two plus two?", "What color is the sun?"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a tinker:// path, or the name of a base model")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=30)
    options = parser.parse_args()

    model = ChatOpenAI(
        model=options.checkpoint,
        base_url=f"{options.base_url}/v1",
        api_key=os.environ.get("TINKER_API_KEY", "none"),
        max_tokens=options.max_tokens,
        temperature=0,
    )
    prompt = ChatPromptTemplate([("user", "Answer in one sentence. {question}")])
    chain = prompt | model | StrOutputParser()

    for piece in chain.stream({"question": QUESTIONS[0]}):
        print(piece, end="", flush=True)
    print()
    for answer in chain.batch([{"question": question} for question in QUESTIONS[1:]]):
        print(answer)


if __name__ == "__main__":
    main()
