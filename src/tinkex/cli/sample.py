"""`tinkex sample`: sample from a model for one prompt."""

from __future__ import annotations

import sys
from typing import Any, TextIO

import click

import tinkex
from tinkex.cli.completion import complete_checkpoints
from tinkex.cli.errors import NO_MODELS, CommandFailed, missing_package
from tinkex.cli.output import as_json, examples, printable, show_json
from tinkex.cli.service_options import service_arguments, service_options
from tinkex.models.text_stream import TextStream, text_of


@click.command(
    "sample",
    epilog=examples(
        'tinkex sample "Who are you?"',
        'tinkex sample "Who are you?" --path tinker://RUN/sampler_weights/final',
        'tinkex sample --plain "The ship sails" -n 2 --max-tokens 20 -f json',
        "tinkex sample --prompt-file question.txt --temperature 0 -o answer.txt",
    ),
)
@click.argument("prompt", required=False)
@click.option("--prompt-file", type=click.File(), help="Read the prompt from a file; - is stdin.")
@click.option("--model", metavar="NAME", help="Base model.  [default: the first one served]")
@click.option(
    "--path",
    metavar="PATH",
    shell_complete=complete_checkpoints,
    help="Saved weights: tinker://RUN/sampler_weights/NAME.",
)
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

    The text is printed as it is generated. With several samples, the first one is.

    Uses the service at TINKER_BASE_URL or --base-url; `--base-url local` starts a local server.
    """
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give either a PROMPT or --prompt-file.")
    if model and path:
        raise click.UsageError("Give either --model or --path.")
    text = prompt if prompt_file is None else prompt_file.read()
    sampling["stop"] = list(sampling["stop"]) or None
    with tinkex.ServiceClient(**service_arguments()) as service:
        client = sampler_of(service, model, path)
        tokenizer = light_tokenizer(client, "`tinkex sample`")
        request = (
            _prompt(tokenizer, text or "", system, chat=chat),
            num_samples,
            tinkex.SamplingParams(**sampling),
        )
        if not as_json():
            with client.sample_stream(*request) as stream:
                _print_stream(stream, tokenizer, num_samples, output or sys.stdout)
            return
        answer = client.sample(*request).result()
    sequences = [
        {
            "text": text_of(tokenizer, sequence.tokens),
            "stop_reason": sequence.stop_reason,
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs,
        }
        for sequence in answer.sequences
    ]
    show_json({"sequences": sequences}, file=output)


def _print_stream(
    stream: tinkex.SampleStream, tokenizer: Any, num_samples: int, file: TextIO
) -> None:
    """Print the first sample while it is generated, then the others."""
    # What a model says must not control a terminal; a file or a program gets all of it.
    shown = printable if file.isatty() else str
    first = TextStream(tokenizer)

    def label(number: int) -> None:
        if num_samples > 1:
            click.echo(f"{chr(10) * (number > 1)}sample {number} of {num_samples}:", file=file)

    label(1)
    for event in stream:
        if event.sequence == 0 and (new := first.add(event.tokens)):
            click.echo(shown(new), file=file, nl=False)
    click.echo(shown(first.end()), file=file)
    for number, sequence in enumerate(stream.response().sequences[1:], start=2):
        label(number)
        click.echo(shown(text_of(tokenizer, sequence.tokens)), file=file)


def light_tokenizer(client: tinkex.SamplingClient, what: str) -> Any:
    """Not that of transformers, whose import takes longer than a short answer."""
    try:
        return client._load_tokenizer(light=True)
    except ImportError as error:
        missing = ModuleNotFoundError(name=error.name or "tokenizers")
        raise missing_package(missing, what, "tokenizer") from error


def sampler_of(
    service: tinkex.ServiceClient, model: str | None, path: str | None
) -> tinkex.SamplingClient:
    if path:
        return service.create_sampling_client(model_path=path)
    if not model:
        offered = service.get_server_capabilities().supported_models
        model = next((one.model_name for one in offered if one.model_name), None)
        if model is None:
            raise CommandFailed(NO_MODELS)
    return service.create_sampling_client(base_model=model)


def _prompt(tokenizer: Any, text: str, system: str | None, *, chat: bool) -> Any:
    if not chat:
        return tinkex.ModelInput.from_ints(tokenizer.encode(text))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    # The tokenizers of transformers return a mapping.
    return tinkex.ModelInput.from_ints(list(getattr(tokens, "input_ids", tokens)))
