"""Options of commands that talk to a service, clients for them, and paged lists."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypedDict, TypeVar

import click

import tinkex
from tinkex.cli.output import as_json, counted

T = TypeVar("T")

_OPTIONS = (
    click.option(
        "--base-url",
        metavar="URL",
        help="URL of the service.  [default: TINKER_BASE_URL, else your running server]",
    ),
    click.option(
        "--api-key",
        metavar="KEY",
        help="API key.  [default: TINKER_API_KEY, else the stored key]",
    ),
)


def minimum(lowest: int) -> Callable[[click.Context, click.Parameter, int | None], int | None]:
    """A callback that checks an integer option."""

    def check(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
        if value is not None and value < lowest:
            raise click.BadParameter(f"{value} is less than {lowest}.")
        return value

    return check


limit_option = click.option(
    "--limit",
    type=int,
    default=20,
    show_default=True,
    callback=minimum(0),
    help="Maximum number of rows; 0: all.",
)


def service_options(command: Callable[..., T]) -> Callable[..., T]:
    """Decorator: --base-url and --api-key, which `service_arguments()` reads."""

    @functools.wraps(command)
    def without(*args: Any, base_url: None, api_key: None, **kwargs: Any) -> T:
        return command(*args, **kwargs)

    decorated: Callable[..., T] = without
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


class ServiceArguments(TypedDict):
    base_url: str | None
    api_key: str | None


def service_arguments() -> ServiceArguments:
    """The --base-url and --api-key of the running command."""
    params = click.get_current_context().params
    return ServiceArguments(base_url=params.get("base_url"), api_key=params.get("api_key"))


def rest_client() -> tinkex.RestClient:
    return tinkex.RestClient(**service_arguments())


def admin_client() -> tinkex.AdminClient:
    return tinkex.AdminClient(**service_arguments())


def fetch_pages(
    fetch: Callable[[int, int], tuple[list[T], int]], *, limit: int, page: int, what: str
) -> tuple[list[T], int]:
    """
    The first `limit` items (0: all) of a paged list, and the total number of items.

    `fetch` takes (limit, offset) and returns a page and the total.
    """
    found: list[T] = []
    with progress_bar(what) as show:
        while True:
            wanted = page if limit == 0 else min(page, limit - len(found))
            items, total = fetch(wanted, len(found))
            found += items
            goal = total if limit == 0 else min(limit, total)
            show(len(found), goal)
            # An empty page also ends the list: items may have been deleted since the first page.
            if len(found) >= goal or not items:
                return found, max(total, len(found))


def list_title(shown: int, total: int, what: str) -> str:
    """The title of a list of `what` (singular) that may be cut off by --limit."""
    more = f", {total - shown} more not shown (--limit 0 shows all)" if total > shown else ""
    return f"{counted(shown, what)}{more}"


#: A bar for a shorter time would only flicker.
BAR_AFTER_S = 0.7


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """
    A callback for what is done and the total: shows a bar on stderr if that is a terminal and the
    work takes a while. Otherwise, and with JSON, nothing.
    """
    if as_json() or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    started = time.monotonic()
    with ExitStack() as stack:
        update: Callable[[int, int], None] | None = None

        def show(done: int, total: int) -> None:
            nonlocal update
            if update is None and time.monotonic() - started >= BAR_AFTER_S:
                update = stack.enter_context(_rich_bar(what))
            if update is not None:
                update(done, total)

        yield show


@contextmanager
def _rich_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
