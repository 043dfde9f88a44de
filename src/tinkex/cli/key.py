"""`tinkex key`: the API keys of a server. Works on its data folder, even while the server runs."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import ago_exact, as_json, examples, report, show_json, show_table
from tinkex.cli.server_options import data_option, db_option, load_settings

if TYPE_CHECKING:
    from tinkex.server.settings import Settings
    from tinkex.server.store import ApiKey, Keys

T = TypeVar("T")

# Owner of everything created on a server before it had keys.
DEFAULT_OWNER = "local"
MAX_CHARS = 200
STYLES = {"active": "green", "revoked": "red", "expired": "yellow"}
SECONDS_PER_UNIT = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}


@click.group("key")
def command() -> None:
    """Create, list and revoke the API keys of a server on this machine.

    As soon as a server has a key, all clients need one. A running server notices within seconds.
    """


@command.command(
    "create",
    epilog=examples(
        "tinkex key create               # owner: local",
        "tinkex key create --owner alice --name laptop --expires 90d",
        "tinkex key create --owner bob --max-training 2 --max-checkpoints 100",
        "tinkex key create --admin       # may manage keys in the console",
    ),
)
@click.option(
    "--owner",
    default=DEFAULT_OWNER,
    show_default=True,
    help="The owner whose data the key gives access to.",
)
@click.option("--project", metavar="ID", help="Project of sessions that do not name one.")
@click.option("--name", default="", help="Purpose of the key; shown in lists.")
@click.option("--expires", metavar="TIME", help="30d, 12h, or a date: 2027-01-31.")
@click.option("--admin", is_flag=True, help="May manage the keys of all owners in the console.")
@click.option("--max-requests", type=click.IntRange(0), help="Unfinished requests; 0: no limit.")
@click.option("--max-queued-tokens", type=click.IntRange(0), help="Tokens in unfinished requests.")
@click.option("--max-samples", type=click.IntRange(0), help="Sequences sampled at the same time.")
@click.option("--max-training", type=click.IntRange(0), help="Models trained at the same time.")
@click.option(
    "--max-checkpoint-bytes", type=click.IntRange(0), help="Total size of checkpoints in bytes."
)
@click.option("--max-checkpoints", type=click.IntRange(0), help="Number of checkpoints.")
@click.option("--max-runs", type=click.IntRange(0), help="Number of training runs.")
@data_option
@db_option
def create(
    owner: str, project: str | None, name: str, expires: str | None, admin: bool, **options: Any
) -> None:
    """Create a key. It is shown only once; the server stores a hash.

    All keys of an owner give access to the same data. The default owner, `local`, has everything
    created before there were keys. Limits that are not given are those of the server.
    """
    for what, text in (("--owner", owner), ("--project", project), ("--name", name)):
        if text is not None and (len(text) > MAX_CHARS or not (text.isprintable())):
            raise CommandFailed(f"{what} must be printable text of at most {MAX_CHARS} characters.")
    if not owner.strip():
        raise CommandFailed("--owner is empty.", hint="Omit it, or give a name.")
    limits = {key: value for key, value in options.items() if key.startswith("max_")}
    expires_s = None if expires is None else _parse_expiry(expires)

    async def operation(keys: "Keys") -> "tuple[ApiKey, str]":
        return await keys.create(
            owner=owner,
            project_id=project,
            name=name,
            limits={key: value for key, value in limits.items() if value is not None},
            expires_s=expires_s,
            is_admin=admin,
        )

    key, secret = _with_keys(operation, data=options["data"], db=options["db"], create=True)
    if as_json():
        show_json({**_fields(key), "key": secret})
        return
    click.echo(secret)
    click.echo(
        f"Key {key.key_id} of owner {key.owner}. It is not shown again: set TINKER_API_KEY to it.",
        err=True,
    )


@command.command(
    "list", epilog=examples("tinkex key list", "tinkex key list --data /srv/tinkex -f json")
)
@data_option
@db_option
def list_(data: str | None, db: str | None) -> None:
    """Show all keys, revoked ones included."""
    keys = _with_keys(lambda keys: keys.all(), data=data, db=db)
    if as_json():
        show_json({"keys": [_fields(key) for key in keys], "total": len(keys)})
        return
    if not keys:
        click.echo(
            "No keys: the server accepts everyone on this machine as owner `local`.", err=True
        )
        return
    now_s = time.time()
    show_table(
        ("ID", "Key", "Owner", "Project", "Name", "Created", "Used", "Expires", "State"),
        [
            (
                str(key.key_id),
                f"{key.hint}…",
                key.owner,
                key.project_id or "",
                key.name or "",
                ago_exact(_moment(key.created_s)),
                "never" if key.used_s is None else ago_exact(_moment(key.used_s)),
                "never" if key.expires_s is None else ago_exact(_moment(key.expires_s)),
                key.state(now_s),
            )
            for key in keys
        ],
        styles=STYLES,
    )


@command.command("revoke", epilog=examples("tinkex key revoke 3"))
@click.argument("key_id", metavar="ID", type=int)
@data_option
@db_option
def revoke(key_id: int, data: str | None, db: str | None) -> None:
    """Revoke a key; a running server notices within seconds. The data of its owner is kept."""

    async def operation(keys: "Keys") -> "ApiKey | None":
        key = await keys.by_id(key_id)
        if key is not None:
            await keys.revoke(key_id)
        return key

    key = _with_keys(operation, data=data, db=db)
    if key is None:
        raise CommandFailed(f"there is no key {key_id}.", hint="`tinkex key list` shows all keys.")
    report(
        f"Key {key_id} ({key.hint}…, owner {key.owner}) is revoked.",
        {"key_id": key_id, "hint": key.hint, "owner": key.owner, "state": "revoked"},
    )


def _with_keys(
    operation: "Callable[[Keys], Awaitable[T]]",
    *,
    data: str | None,
    db: str | None,
    create: bool = False,
) -> T:
    """Run `operation` on the keys of the server's store; without `create` the store must exist."""
    settings = load_settings("key", data=data, db=db, module="tinkex.server.store")
    from tinkex.server.folder_lock import open_shared_store
    from tinkex.server.store import DatabaseRefused

    if not create:
        _check_exists(settings)
    try:
        store = open_shared_store(settings)
    except OSError as error:
        raise CommandFailed(
            f"the data folder {settings.folder} cannot be opened: {error.strerror}."
        ) from error
    except DatabaseRefused as error:
        raise CommandFailed(str(error)) from error

    async def opened() -> T:
        return await operation(store.keys)

    try:
        return asyncio.run(opened())
    finally:
        store.close()


def _check_exists(settings: "Settings") -> None:
    """Do not create a data folder to list keys: a typo in --data would look like an empty one."""
    scheme, _, file = settings.db_url.partition(":///")
    if not scheme.startswith("sqlite") or Path(file).is_file():
        return
    problem = f"there is no data folder {settings.folder}."
    if settings.folder.is_dir():
        problem = f"there is no database in the data folder {settings.folder}."
    if settings.db:
        problem = f"there is no database {file} for the data folder {settings.folder}."
    raise CommandFailed(
        problem,
        hint="Check --data and --db. `tinkex key create` and the first start of `tinkex serve` "
        "create them.",
    )


def _parse_expiry(text: str) -> float:
    """Parse a duration from now or a date in UTC; it must be in the future."""
    now_s = time.time()
    if duration := re.fullmatch(r"(\d{1,6})([mhdwy])", text):
        moment_s = now_s + int(duration[1]) * SECONDS_PER_UNIT[duration[2]]
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise CommandFailed(
                f"--expires {text} is not a time.",
                hint="Give a duration (30m, 12h, 30d, 2w, 1y) or a date (2027-01-31).",
            ) from None
        moment_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if moment_s <= now_s:
        raise CommandFailed(f"--expires {text} is in the past.", hint="Give a later time.")
    return moment_s


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _fields(key: "ApiKey") -> dict[str, Any]:
    """A key for JSON, without its hash."""
    return {
        "key_id": key.key_id,
        "hint": key.hint,
        "owner": key.owner,
        "project_id": key.project_id,
        "name": key.name,
        "is_admin": key.is_admin,
        "limits": dict(key.limits),
        "created_at": _moment(key.created_s),
        "used_at": _moment(key.used_s),
        "expires_at": _moment(key.expires_s),
        "state": key.state(time.time()),
    }
