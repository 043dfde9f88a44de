"""`tinkex sample`: sample from a model for one prompt."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import click

import tinkex
from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import as_json, show_json
from tinkex.cli.service_options import service_arguments, service_options


@click.command("sample")
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File(), help="Read the prompt from a file; - is stdin.")
@click.option("--model", metavar="NAME", help="Base model.  [default: the first one served]")
@click.option("--path", metavar="PATH", help="Saved weights: tinker://RUN/sampler_weights/NAME.")
@click.option(
    "--chat/--plain",
    default=True,
    show_default=True,
    help="Use the chat template, or the prompt as it is.",
)
@click.option("--system", metavar="TEXT", help="System message, with --chat.")
@click.option("--num-samples", "-n", type=click.IntRange(1), default=1, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--top-k", type=int, default=-1, show_default=True)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text; can be repeated.")
@click.option(
    "--output", "-o", type=click.File("w", lazy=True), help="Write to a file instead of stdout."
)
@service_options
def command(
    prompt: str | None,
    prompt_file: TextIO | None,
    model: str | None,
    path: str | None,
    chat: bool,
    system: str | None,
    num_samples: int,
    output: TextIO | None,
    **sampling: Any,
) -> None:
    """Sample from a model for PROMPT, or for the text of a file.

    Uses the service at TINKER_BASE_URL or --base-url; `--base-url local` starts a local server.
    """
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give either a PROMPT or --prompt-file.")
    if model and path:
        raise click.UsageError("Give either --model or --path.")
    text = prompt if prompt_file is None else prompt_file.read()
    sampling["stop"] = list(sampling["stop"]) or None
    with tinkex.ServiceClient(**service_arguments()) as service:
        client = _sampler(service, model, path)
        try:
            tokenizer = client.get_tokenizer()
        except ImportError as error:
            missing = ModuleNotFoundError(name=error.name or "tokenizers")
            raise missing_package(missing, "`tinkex sample`", "tokenizer") from error
        answer = client.sample(
            _prompt(tokenizer, text or "", system, chat=chat),
            num_samples,
            tinkex.SamplingParams(**sampling),
        ).result()
    texts = [_text(tokenizer, sequence) for sequence in answer.sequences]
    if as_json():
        show_json(
            {
                "sequences": [
                    {
                        "text": text,
                        "stop_reason": sequence.stop_reason,
                        "tokens": sequence.tokens,
                        "logprobs": sequence.logprobs,
                    }
                    for text, sequence in zip(texts, answer.sequences, strict=True)
                ]
            }
        )
        return
    click.echo("\n---\n".join(texts), file=output or sys.stdout)


def _sampler(
    service: tinkex.ServiceClient, model: str | None, path: str | None
) -> tinkex.SamplingClient:
    if path:
        return service.create_sampling_client(model_path=path)
    if not model:
        offered = service.get_server_capabilities().supported_models
        model = next((one.model_name for one in offered if one.model_name), None)
        if model is None:
            raise CommandFailed("the service offers no models.")
    return service.create_sampling_client(base_model=model)


def _prompt(tokenizer: Any, text: str, system: str | None, *, chat: bool) -> Any:
    if not chat:
        return tinkex.ModelInput.from_ints(tokenizer.encode(text))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    # The tokenizers of transformers return a mapping.
    return tinkex.ModelInput.from_ints(list(getattr(tokens, "input_ids", tokens)))


def _text(tokenizer: Any, sequence: tinkex.SampledSequence) -> str:
    return str(tokenizer.decode(sequence.tokens, skip_special_tokens=True))
