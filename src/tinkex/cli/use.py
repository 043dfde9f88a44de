"""`tinkex use`: choose the service of commands and programs that name none."""

from __future__ import annotations

from urllib.parse import urlsplit

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, counted, examples, report, show_json, show_table, yes_no
from tinkex.client.settings import LOCAL, normalize_url
from tinkex.local import profiles
from tinkex.local.profiles import BadProfiles, Profiles


@click.command(
    "use",
    epilog=examples(
        "tinkex use http://gpu-box:8000 --name lab",
        "tinkex use local                 # a server on this machine",
        "tinkex use lab",
        "tinkex use --list",
    ),
)
@click.argument("service", required=False, metavar="[URL|NAME]")
@click.option("--name", metavar="NAME", help="Name for URL.  [default: its host and port]")
@click.option("--list", "listed", is_flag=True, help="List the names.")
@click.option("--clear", is_flag=True, help="Use none again; the names stay.")
def command(service: str | None, name: str | None, listed: bool, clear: bool) -> None:
    """Use a service by default: a URL, the name of one, or `local`.

    Commands and programs use it if neither an argument nor TINKER_BASE_URL names another. Keys are
    stored separately: `tinkex auth login`. TINKEX_PROFILE=NAME chooses a name for one command.
    """
    if sum((service is not None, listed, clear)) != 1:
        raise click.UsageError("Give a URL or NAME, --list or --clear.")
    try:
        stored = profiles.read()
        if listed:
            _show(stored)
            return
        if service is None:
            changed = Profiles(current=None, urls=stored.urls)
        elif service == LOCAL or "://" in service:
            url = normalize_url(service)
            changed = stored.adding(name or urlsplit(url).netloc or url, url)
        elif name is not None:
            raise click.UsageError("--name needs a URL.")
        else:
            changed = stored.using(service)
        profiles.write(changed)
    except BadProfiles as error:
        raise CommandFailed(str(error)) from error
    if changed.current is None:
        report("No service is used by default.", {"name": None, "url": None}, err=False)
        return
    url = changed.url(changed.current)
    report(f"Using {url} ({changed.current}).", {"name": changed.current, "url": url}, err=False)


def _show(stored: Profiles) -> None:
    if as_json():
        show_json({"current": stored.current, "profiles": dict(stored.urls)})
        return
    rows = [(name, url, yes_no(name == stored.current)) for name, url in stored.urls.items()]
    show_table(("Name", "URL", "In use"), rows, title=counted(len(rows), "profile"))
