"""`tinkex tiny-model DIR`: write a small random model for tests."""

from __future__ import annotations

from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import examples, report
from tinkex.wire.text_format import format_bytes


@click.command(
    "tiny-model",
    epilog=examples(
        "tinkex tiny-model tiny",
        "tinkex tiny-model tiny --arch llama && tinkex serve test/tiny=tiny",
    ),
)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--arch",
    type=click.Choice(["qwen3", "llama"]),
    default="qwen3",
    show_default=True,
    help="Architecture.",
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same weights.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def command(folder: Path, arch: str, seed: int, force: bool) -> None:
    """Write a small random model with its tokenizer to DIR, in seconds.

    It can be trained: a LoRA of rank 8 memorizes a few lines of text within 60 steps.
    """
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise CommandFailed(
            f"{folder} is not empty.", hint="Use another folder, or add --force to write into it."
        )
    try:
        from tinkex.models.tiny_model import write_tiny_model
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex tiny-model`", "engine") from error
    write_tiny_model(folder, arch="llama" if arch == "llama" else "qwen3", seed=seed)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    report(
        f"{folder}: a random {arch} model of {format_bytes(size)}, tokenizer included.\n"
        f"Serve it: tinkex serve {folder}",
        {"folder": str(folder), "arch": arch, "seed": seed, "size_bytes": size},
        err=False,
    )
