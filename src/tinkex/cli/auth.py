"""`tinkex auth`: store an API key on this machine, check it, and show its owner."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import (
    NONE,
    as_json,
    examples,
    report,
    show_json,
    show_properties,
    yes_no,
)
from tinkex.cli.service_options import service_arguments, service_options
from tinkex.client.auth import key_store
from tinkex.client.auth.credentials import ApiKey
from tinkex.client.auth.key_store import StoredKeys
from tinkex.client.errors import TinkerError
from tinkex.client.settings import DEFAULT_URL, LOCAL, Settings, is_loopback, service_url

if TYPE_CHECKING:
    from tinkex.client.connection import Connection


@click.group("auth")
def command() -> None:
    """Store an API key on this machine, check it, and show its owner.

    Keys are stored in ~/.tinker/credentials.json, which the official client reads too.
    """


@command.command(
    "login",
    epilog=examples("tinkex auth login", "tinkex auth login --base-url https://tinker.example.org"),
)
@service_options
def login() -> None:
    """Check a key and store it for this service.

    Prompts for the key, or reads it from stdin if that is not a terminal.
    """
    from tinkex.client.auth import sessionless_requests

    service, stored, found = _stored()
    if service == LOCAL:
        raise CommandFailed(
            "the local server (base_url 'local') runs under your account and needs no key.",
            hint="Use --base-url to name another service.",
        )
    if found is not None:
        raise CommandFailed(
            f"a key for {service} is already stored: {_describe(stored, found)}.",
            hint="`tinkex auth logout` removes it.",
        )
    key = ApiKey((service_arguments()["api_key"] or _prompt_for_key(service)).strip())
    if (problem := key.problem) is not None:
        raise CommandFailed(
            "a key must start with 'tml-' (or 'eyJ', if it is a token); the one given "
            f"{problem if key.value else 'is empty'}.",
            hint="Copy the complete key and nothing else.",
        )
    key_info = sessionless_requests.ask(
        Settings.resolve(base_url=service, api_key=key.value), sessionless_requests.own_key
    )
    if not key_info.get("key_id"):
        raise CommandFailed(
            f"{service} does not use keys: it accepts everyone on its machine. Nothing was stored.",
            hint="`tinkex key create` creates keys for your own server.",
        )
    key_id, details = _key_id(service, key_info), key_info.get("details") or {}
    entry = key_store.StoredKey(
        key=key,
        name=str(key_info.get("name") or key_id),
        note=key_info.get("note") or None,
        details=details,
        base_url=service,
    )
    stored = stored.with_key(key_id, entry)
    if stored.default is None:  # keep a default that belongs to another service
        stored = stored.with_default(key_id)
    key_store.write(key_store.default_path(), stored)
    if os.environ.get("TINKER_API_KEY") or os.environ.get("TINKEX_API_KEY"):
        click.echo(
            "note: TINKER_API_KEY is set and takes precedence over the stored key.", err=True
        )
    shown = {"base_url": service, "key": entry.name, **_owner(details)}
    words = f"Stored key {entry.name} of {shown['email'] or NONE} for {service}."
    report(words, shown, err=False)


@command.command("logout", epilog=examples("tinkex auth logout"))
@service_options
def logout() -> None:
    """Remove the stored key for this service.

    A key that was created for this machine is also deleted on the service.
    """
    from tinkex.client.auth import sessionless_requests

    service, stored, key_id = _stored()
    if key_id is None:
        raise CommandFailed(
            f"no key for {service} is stored.", hint="`tinkex auth login` stores one."
        )
    entry, failure = stored.keys[key_id], None
    if entry.type == "generated":
        settings = Settings.resolve(base_url=service, api_key=entry.key.value)
        try:
            sessionless_requests.ask(settings, sessionless_requests.delete_own_key)
        except TinkerError as error:
            failure = error
    deleted = entry.type == "generated" and failure is None
    key_store.write(key_store.default_path(), stored.without(key_id))
    name = entry.name or key_id
    report(
        f"Removed key {name} for {service} from this machine.",
        {"base_url": service, "removed": name, "deleted_on_service": deleted},
        err=False,
    )
    if failure is not None:
        raise CommandFailed(
            f"the key was removed here but could not be deleted on the service: {failure.summary}",
            hint="It still works: delete it in the console of the service.",
        )
    if not deleted:
        where = f" at {_console()}/keys/{quote(key_id, safe='')}" if service == DEFAULT_URL else ""
        click.echo(
            f"The key itself still works. Delete it{where} if it is no longer used.", err=True
        )


@command.command(
    "status",
    epilog=examples("tinkex auth status", "tinkex auth status --base-url http://127.0.0.1:8000"),
)
@service_options
def status() -> None:
    """Check the credentials and the connection. Exits with 1 if they do not work."""
    from tinkex.client.auth import sessionless_requests

    settings, problem = None, None
    try:
        settings = Settings.resolve(**service_arguments())
        sessionless_requests.ask(settings, sessionless_requests.capabilities)
    except TinkerError as error:
        problem = error
    has_credentials, is_accessible = settings is not None, problem is None
    report(
        f"Credentials available: {yes_no(has_credentials)}\n"
        f"Service accessible: {yes_no(is_accessible)}",
        {
            "credentials_available": has_credentials,
            "service_accessible": is_accessible,
            "problem": None if problem is None else problem.summary,
        },
        err=False,
    )
    if problem is not None and not as_json():
        raise problem
    if problem is not None:
        raise click.exceptions.Exit(1)


@command.command("whoami", epilog=examples("tinkex auth whoami", "tinkex auth whoami -f json"))
@service_options
def whoami() -> None:
    """Show the owner of the key: email, user, organization."""
    from tinkex.client.auth import sessionless_requests

    async def fetch_owner(connection: Connection) -> dict[str, str | None]:
        try:
            claims = await connection.credential.claims()
        except RuntimeError:  # a plain key: ask the service for its owner
            return _owner((await sessionless_requests.own_key(connection)).get("details") or {})
        try:
            details = _owner((await sessionless_requests.own_key(connection)).get("details") or {})
        except TinkerError:  # a token that has no key: only ids are known
            details = {}
        return {
            "email": claims.get("email") or details.get("email"),
            "user": claims.get("sub") or details.get("user"),
            "organization": details.get("organization"),
            "organization_id": claims.get("org_id") or None,
        }

    owner = sessionless_requests.ask(Settings.resolve(**service_arguments()), fetch_owner)
    if as_json():
        show_json(owner)
        return
    org_id = owner.pop("organization_id", None)
    if org_id and owner["organization"] not in (None, org_id):
        owner["organization"] = f"{owner['organization']} ({org_id})"
    elif org_id:
        owner["organization"] = org_id
    show_properties({name.capitalize(): value or NONE for name, value in owner.items()})


def _stored() -> tuple[str, StoredKeys, str | None]:
    """The service, all stored keys, and the id of the key for this service."""
    service = service_url(service_arguments()["base_url"])
    stored = key_store.read(key_store.default_path())
    return service, stored, stored.key_for(service, is_local=is_loopback(service))


def _prompt_for_key(service: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    if service == DEFAULT_URL:
        name = quote(f"tinkex-cli-{platform.node()}", safe="")
        click.echo(f"Create a key at {_console()}/keys?new_key=true&key_name={name}", err=True)
    else:
        click.echo(
            "The administrator of the server creates keys with `tinkex key create`.", err=True
        )
    key: str = click.prompt("API key", hide_input=True, err=True)
    return key


def _console() -> str:
    from tinkex.wire.checkpoints import CONSOLE_URL

    return CONSOLE_URL


def _key_id(service: str, key_info: dict[str, Any]) -> str:
    """The id of the key, with the host unless that is the hosted service: ids may repeat."""
    number = str(key_info["key_id"])
    return number if service == DEFAULT_URL else f"{number}@{urlsplit(service).netloc}"


def _describe(stored: StoredKeys, key_id: str) -> str:
    entry = stored.keys[key_id]
    email = _owner(entry.details or {})["email"]
    return (entry.name or key_id) + (f" of {email}" if email else "")


def _owner(details: Any) -> dict[str, str | None]:
    def detail(part: str, name: str) -> str | None:
        value = (details.get(part) or {}).get(name)
        return str(value) if value else None

    email = detail("user_details", "email")
    return {"email": email, "user": email, "organization": detail("org_details", "name")}
