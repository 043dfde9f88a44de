"""`tinkex key`: who may use a server that asks for keys. Works on its data folder, also while it runs."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.errors import CommandFailed, needs

if TYPE_CHECKING:
    from tinkex.server.settings import Settings
    from tinkex.server.store import ApiKey, Keys

T = TypeVar("T")

# What was made on a server before it had keys belongs to this owner.
FIRST_OWNER = "local"
LONGEST = 200
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


def _place(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--db", metavar="URL", help="Its database, if given to `serve`.")(
        command
    )
    return click.option(
        "--data",
        metavar="DIR",
        help="The server's data folder.  [default: ~/.local/share/tinkex]",
    )(command)


@click.group("key")
def command() -> None:
    """Make, list and revoke the API keys of a server on this machine.

    A server with a key asks everybody for one, within seconds and without a restart.
    """


@command.command("create")
@click.option("--owner", default=FIRST_OWNER, show_default=True, help="Whose things it opens.")
@click.option("--project", metavar="ID", help="The project of sessions that name none.")
@click.option("--name", default="", help="What it is for; shown in lists.")
@click.option("--expires", metavar="TIME", help="30d, 12h, or a date: 2027-01-31.")
@click.option("--max-requests", type=click.IntRange(0), help="Unfinished requests; 0 is no limit.")
@click.option("--max-queued-tokens", type=click.IntRange(0), help="Tokens of those requests.")
@click.option("--max-samples", type=click.IntRange(0), help="Sequences sampled at once.")
@click.option("--max-training", type=click.IntRange(0), help="Models that train at once.")
@click.option("--max-checkpoint-bytes", type=click.IntRange(0), help="Bytes of checkpoints kept.")
@click.option("--max-checkpoints", type=click.IntRange(0), help="Checkpoints kept.")
@click.option("--max-runs", type=click.IntRange(0), help="Training runs kept.")
@_place
def create(owner: str, project: str | None, name: str, expires: str | None, **options: Any) -> None:
    """Make a key. It is shown this once; only its hash is kept.

    Keys of one owner open the same things. The owner `local`, the default, has what was made
    before there were keys. Limits that are not given are the server's.
    """
    for what, text in (("--owner", owner), ("--project", project), ("--name", name)):
        if text is not None and (len(text) > LONGEST or not (text.isprintable())):
            raise CommandFailed(f"{what} is longer than {LONGEST} characters, or not plain text.")
    if not owner.strip():
        raise CommandFailed("--owner is empty.", hint="Leave it out, or give a name.")
    limits = {key: value for key, value in options.items() if key.startswith("max_")}
    expires_s = None if expires is None else _time(expires)

    async def act(keys: "Keys") -> "tuple[ApiKey, str]":
        return await keys.create(
            owner=owner,
            project_id=project,
            name=name,
            limits={key: value for key, value in limits.items() if value is not None},
            expires_s=expires_s,
        )

    key, secret = _with_keys(act, data=options["data"], db=options["db"], make=True)
    click.echo(secret)
    click.echo(
        f"Key {key.key_id} of owner {key.owner}. It is not shown again: set TINKER_API_KEY to it.",
        err=True,
    )


@command.command("list")
@_place
def list_(data: str | None, db: str | None) -> None:
    """Show all keys, revoked ones included."""
    keys = _with_keys(lambda keys: keys.all(), data=data, db=db)
    if not keys:
        click.echo("No keys: the server takes everybody on this machine as `local`.", err=True)
        return
    now_s = time.time()
    rows = [("ID", "KEY", "OWNER", "PROJECT", "NAME", "CREATED", "USED", "EXPIRES", "STATE")]
    rows += [
        (
            str(key.key_id),
            f"{key.hint}…",
            key.owner,
            key.project_id or "-",
            key.name or "-",
            _shown(key.created_s),
            _shown(key.used_s),
            _shown(key.expires_s),
            key.state(now_s),
        )
        for key in keys
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


@command.command("revoke")
@click.argument("key_id", metavar="ID", type=int)
@_place
def revoke(key_id: int, data: str | None, db: str | None) -> None:
    """Make a key worthless, within seconds on a running server. Its owner's things stay."""

    async def act(keys: "Keys") -> "ApiKey | None":
        key = await keys.by_id(key_id)
        if key is not None:
            await keys.revoke(key_id)
        return key

    key = _with_keys(act, data=data, db=db)
    if key is None:
        raise CommandFailed(f"there is no key {key_id}.", hint="`tinkex key list` shows all.")
    click.echo(f"Key {key_id} ({key.hint}…, owner {key.owner}) is revoked.", err=True)


def _with_keys(
    act: "Callable[[Keys], Awaitable[T]]", *, data: str | None, db: str | None, make: bool = False
) -> T:
    """Open the server's store for one act; one that is not there is made only if that is meant."""
    try:
        from tinkex.server.settings import Settings, SettingsError
        from tinkex.server.store import DatabaseRefused
        from tinkex.server.store.folder_lock import open_shared_store
    except ModuleNotFoundError as error:
        raise needs(error, "`tinkex key`", "all") from error
    try:
        settings = Settings.from_sources({"data": data, "db": db})
    except SettingsError as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    if not make:
        _check_there(settings)
    try:
        store = open_shared_store(settings)
    except OSError as error:
        raise CommandFailed(
            f"the data folder {settings.folder} cannot be opened: {error.strerror}."
        ) from error
    except DatabaseRefused as error:
        raise CommandFailed(str(error)) from error

    async def opened() -> T:
        return await act(store.keys)

    try:
        return asyncio.run(opened())
    finally:
        store.close()


def _check_there(settings: "Settings") -> None:
    """Looking at keys makes no data folder: a slip in its name would look like one without keys."""
    scheme, _, file = settings.db_url.partition(":///")
    if not scheme.startswith("sqlite") or Path(file).is_file():
        return
    found = "there is no data folder" if not settings.folder.is_dir() else "no server has worked in"
    if settings.db:
        found = f"there is no database {file}, and it was to be that of"
    raise CommandFailed(
        f"{found} {settings.folder}.",
        hint="Check --data and --db. `tinkex key create`, or the first start of `tinkex serve`, "
        "makes one.",
    )


def _time(text: str) -> float:
    """A span from now, or a date in UTC; never in the past."""
    now_s = time.time()
    if span := re.fullmatch(r"(\d{1,6})([mhdwy])", text):
        moment_s = now_s + int(span[1]) * SECONDS[span[2]]
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise CommandFailed(
                f"--expires {text} is not a time.",
                hint="Give a span (30m, 12h, 30d, 2w, 1y) or a date (2027-01-31).",
            ) from None
        moment_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if moment_s <= now_s:
        raise CommandFailed(f"--expires {text} is over already.", hint="Give a later time.")
    return moment_s


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
