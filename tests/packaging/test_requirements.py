"""Every requirement of the server has a test that exists: `tests/requirements.toml`."""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tinkex.conformance import CHECKS

ROOT = Path(__file__).parents[2]
TABLE: dict[str, Any] = tomllib.loads((ROOT / "tests" / "requirements.toml").read_text())
ROWS = {name: row for name, row in TABLE.items() if name != "needs"} | {
    f"needs.{name}": row for name, row in TABLE["needs"].items()
}


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_row_of_the_server_s_requirements_is_there() -> None:
    assert [name for name in ROWS if name.startswith("S")] == [f"S{n}" for n in range(1, 17)]


@pytest.mark.parametrize("name", ROWS)
def test_the_tests_of_a_requirement_exist(name: str) -> None:
    row = ROWS[name]
    assert row["says"]
    assert row["tests"]
    for node in row["tests"]:
        file, _, test = node.partition("::")
        assert test in functions_of(file), f"{name} names {node}, which is not there"
    known = {check.name for check in CHECKS}
    assert set(row.get("checks", [])) <= known


def test_the_checks_of_the_conformance_suite_name_requirements_that_are_there() -> None:
    named = {name for check in CHECKS for name in check.requirements}
    known = {name for name in ROWS if name.startswith("S")}
    assert {name for name in named if name.startswith("S")} <= known
