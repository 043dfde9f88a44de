"""`tinkex model`: the base models of a service."""

from __future__ import annotations

import click

import tinkex
from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import NONE, as_json, examples, show_json, show_table, yes_no
from tinkex.cli.service_options import service_arguments, service_options


@click.group("model")
def command() -> None:
    """List the base models of a service."""


@command.command(
    "list",
    epilog=examples("tinkex model list", "tinkex model list qwen", "tinkex model list -f json"),
)
@click.argument("substring", required=False)
@service_options
def list_(substring: str | None) -> None:
    """List the base models, or only those with SUBSTRING in their names."""
    offered = tinkex.ServiceClient(**service_arguments()).get_server_capabilities().supported_models
    wanted = (substring or "").lower()
    models = [model for model in offered if wanted in (model.model_name or "").lower()]
    if not models:
        names = ", ".join(model.model_name or NONE for model in offered) or "none"
        raise CommandFailed(
            f"no model has {substring!r} in its name."
            if substring
            else "the service offers no models.",
            hint=f"Available models: {names}.",
        )
    if as_json():
        show_json({"models": models})
        return
    show_table(
        ("Model", "Max context", "Trainable", "Sampleable"),
        [
            (
                model.model_name or NONE,
                NONE if model.max_context_length is None else str(model.max_context_length),
                yes_no(model.trainable),
                yes_no(model.sampleable),
            )
            for model in models
        ],
    )
