"""`tinkex session`: export the trace of a session."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import examples, report
from tinkex.cli.output import size as shown_size
from tinkex.cli.service_options import progress_bar, rest_client, service_options


@click.group("session")
def command() -> None:
    """Export the trace of a session."""


@command.command(
    "export-trace",
    epilog=examples(
        "tinkex session export-trace SESSION",
        "tinkex session export-trace SESSION --output trace.pftrace",
        "tinkex session export-trace SESSION --url-only",
    ),
)
@click.argument("session_id")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Output file.  [default: SESSION_ID.pftrace]",
)
@click.option("--url-only", is_flag=True, help="Print a download link instead, which needs no key.")
@service_options
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Download the trace of a session for a trace viewer."""
    if url_only and output:
        raise click.UsageError("Give either --output or --url-only.")
    if sys.stderr.isatty():
        click.echo("Preparing the trace ...", err=True)
    client = rest_client()
    url = client.export_session_trace(session_id).result()
    if url_only:
        report(url, {"session_id": session_id, "url": url}, err=False)
        return
    from tinkex.client.files.file_download import fetch_file

    target = output or Path(f"{session_id}.pftrace".replace("/", "_").replace(":", "_"))
    if target.is_dir():
        raise CommandFailed(f"{target} is a folder.", hint="Use --output with the name of a file.")
    with progress_bar("Downloading") as show:
        written = fetch_file(url, target, settings=client.holder.settings, progress=show)
    report(
        f"{target} ({shown_size(written)})",
        {"session_id": session_id, "destination": str(target), "size_bytes": written},
    )
