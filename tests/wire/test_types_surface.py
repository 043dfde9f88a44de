"""`tinkex.types` offers what the official client's `types` offers, and importing it is light."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from qa.api_surface import compare, extract
from tinkex import types

DATA = Path(__file__).parents[1] / "data"

#: Deliberate differences: check -> reason.
DELIBERATE = {
    "SamplingParams extra": "a misspelt setting is an error, not ignored (T16)",
}


@cache
def reference() -> dict[str, Any]:
    return json.loads((DATA / "api-surface.json").read_text())["modules"]["types"]["names"]


@cache
def ours() -> dict[str, Any]:
    return extract.describe_module(types, extract.Normaliser("tinkex"))["names"]


@pytest.mark.parametrize("name", sorted(reference()))
def test_a_public_name_is_what_it_is_in_the_official_client(name):
    checks = compare.object_checks(name, reference()[name], ours().get(name))

    different = [check for check in checks if not check.ok and check.key not in DELIBERATE]

    assert different == []


def test_the_deliberate_differences_are_still_differences():
    for key in DELIBERATE:
        name = key.split()[0]
        checks = compare.object_checks(name, reference()[name], ours()[name])
        assert [check.key for check in checks if not check.ok] == [key]


def test_every_name_is_exported_once_and_in_order():
    assert types.__all__ == sorted(set(types.__all__))
    public = {
        name
        for name, value in vars(types).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert public == set(types.__all__)


@pytest.mark.parametrize(
    "module",
    ["tinkex.types", "tinkex.wire.inputs", "tinkex.wire.codec", "tinkex.wire.sdk_versions"],
)
def test_importing_is_light(module):
    heavy = ["numpy", "torch", "transformers", "zstandard", "fastapi", "sqlalchemy", "click"]
    code = (
        f"import sys, {module}\n"
        f"loaded = [name for name in {heavy} if name in sys.modules]\n"
        "sys.exit(', '.join(loaded) or 0)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_numpy_comes_with_the_first_tensor():
    code = (
        "import sys; from tinkex import types\n"
        "assert 'numpy' not in sys.modules\n"
        "types.ModelInput.from_ints([1])\n"
        "assert 'numpy' in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
