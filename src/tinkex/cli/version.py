"""`tinkex version`: the version of tinkex and of the protocol."""

import click

from tinkex.cli.output import as_json, examples, show_json


@click.command("version", epilog=examples("tinkex version", "tinkex version -f json"))
def command() -> None:
    """Show the version of tinkex."""
    from tinkex.client.settings import PROTOCOL_VERSION
    from tinkex.client.version import __version__

    if as_json():
        show_json({"version": __version__, "protocol": PROTOCOL_VERSION})
    else:
        click.echo(f"tinkex {__version__}")
