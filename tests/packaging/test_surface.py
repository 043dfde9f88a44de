"""What users may rely on: the names, and the agreement of version, changelog and metadata."""

import ast
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import tinkex

ROOT = Path(__file__).parents[2]


def test_every_public_name_exists_and_is_listed_in_order():
    assert tinkex.__all__ == sorted(tinkex.__all__)
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None
        assert name in dir(tinkex)
    public = {
        name
        for name, value in vars(tinkex).items()
        # Rooms become attributes when any test of this run has imported them.
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations", "TYPE_CHECKING", "Any"} <= set(tinkex.__all__)


def test_type_checkers_and_the_lazy_table_see_the_same_names():
    tree = ast.parse(Path(tinkex.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module.removeprefix("tinkex").lstrip("."), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = {(home, name) for home, names in tinkex._HOMES.items() for name in names.split()}
    assert seen == table | {("", "types")}


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tinkex.Nothing  # noqa: B018


def test_names_are_those_of_the_official_client():
    """What is not there yet belongs to the full client; nothing is there under another name."""
    official = json.loads((ROOT / "tests" / "data" / "api-surface.json").read_text())
    names = set(official["modules"]["."]["names"])
    ours = set(tinkex.__all__)
    assert ours - names == {"RetryConfig"}  # theirs is hidden in a private module
    assert names - ours == {
        "AdminClient",
        "LossHandle",
        "PerDatumLossFn",
        "RequestOptions",
        "RestClient",
        "Timeout",
        "auth",
    }


def test_the_changelog_starts_with_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert heading[1] == project["version"]


def test_the_version_is_that_of_the_installed_distribution():
    try:
        installed = importlib.metadata.version("tinkex")
    except importlib.metadata.PackageNotFoundError:
        assert tinkex.__version__ == "0+unknown"
    else:
        assert tinkex.__version__ == installed
