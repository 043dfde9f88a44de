"""
Every requirement in `tests/requirements.toml` names tests that exist.

The file begins with the list of all requirements (`[lines]`), so that an untested one is found.
"""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tinkex.conformance import CHECKS

ROOT = Path(__file__).parents[2]
RECIPES = "qa/cookbook/run.py"
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text())
LINES: dict[str, Any] = TABLE.pop("lines")
ROWS = {name: row for name, row in TABLE.items() if name != "needs"} | {
    f"needs.{name}": row for name, row in TABLE["needs"].items()
}
LEDGER = [f"{letter}{n}" for letter, last in LINES["ledger"].items() for n in range(1, last + 1)]
NEEDS = [f"needs.{name}" for name in LINES["needs"]]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@cache
def recipes() -> set[str]:
    """The names of the recipes that `make cookbook` runs."""
    nodes = ast.walk(ast.parse((ROOT / RECIPES).read_text()))
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def test_every_requirement_has_tests() -> None:
    missing = [name for name in LEDGER + NEEDS if name not in ROWS]
    assert not missing, f"add these to tests/requirements.toml: {', '.join(missing)}"


def test_the_list_of_requirements_is_complete() -> None:
    """The list has the known number of requirements, and every row belongs to one of them."""
    assert LINES["ledger"] == {"T": 17, "O": 9, "H": 12, "E": 4, "M": 7, "S": 16}
    assert [name for name in ROWS if name.startswith("needs.") and name not in NEEDS] == []
    assert len(NEEDS) == 23
    assert all(LINES["needs"].values())


@pytest.mark.parametrize("name", ROWS)
def test_the_tests_of_a_requirement_exist(name: str) -> None:
    row = ROWS[name]
    assert row["says"]
    assert row.get("tests") or row.get("recipes")
    for node in row.get("tests", []):
        file, _, test = node.partition("::")
        assert test in functions_of(file), f"{name} names {node}, which does not exist"
    assert set(row.get("recipes", [])) <= recipes(), f"{name}: no such recipe in {RECIPES}"
    known = {check.name for check in CHECKS}
    assert set(row.get("checks", [])) <= known


def test_conformance_checks_name_existing_requirements() -> None:
    named = {name for check in CHECKS for name in check.requirements}
    known = {name for name in ROWS if name.startswith("S")}
    assert {name for name in named if name.startswith("S")} <= known
