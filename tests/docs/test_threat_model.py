"""The threat model names tests that exist, and every route of the console."""

import re
from pathlib import Path

from starlette.routing import Route

from tinkex.server.app import ROUTERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "threat-model.md"

CONSOLE = "/api/v1/console/"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def protections() -> list[list[str]]:
    """The rows of the table "Ways in"."""
    table = PAGE.read_text().partition("## Ways in")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_protection_names_a_test_that_exists() -> None:
    rows = protections()
    assert len(rows) > 15
    for way, _, shown in rows:
        named = TEST.findall(shown)
        assert named, f"{way}: no test is named"
        for file, name in named:
            text = (ROOT / file).read_text()
            assert re.search(rf"def {name}\(", text), f"{way}: {file}::{name} does not exist"


def console_routes() -> set[tuple[str, str]]:
    return {
        (method, route.path.removeprefix(CONSOLE))
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route) and route.path.startswith(CONSOLE)
        for method in (route.methods or set()) - {"HEAD"}
    }


def test_every_route_of_the_console_is_in_its_table() -> None:
    table = PAGE.read_text().partition("## Routes of the console")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([A-Z]+) (\S+)` \|", table, re.MULTILINE)
    assert len(console_routes()) > 8
    assert sorted(listed) == sorted(console_routes()), "say what it does and of whom"
