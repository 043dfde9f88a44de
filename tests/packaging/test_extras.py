"""Optional packages are imported under `needs`, and a missing one raises an error that names its extra."""

import ast
import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.extras import _DISTRIBUTIONS, EXTRAS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinkex"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Packages that are installed with all their dependencies (`tinkex[server,engine]`), and the command
#: line, which has its own error message (`cli/errors.py`).
OTHERS = ("server", "engine", "cli")
#: Packages that no extra installs: the caller has already imported them, or the import is in a `try`.
NO_EXTRA = {"compression", "pytest", "tml_tokenizers"}
CORE = {"yarl", "aiohttp", "google", "numpy", "pydantic", "pydantic_core"}


def client_modules() -> list[Path]:
    found = [path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name]
    return sorted(p for p in found if p.relative_to(SOURCE).parts[0] not in OTHERS)


def optional_packages(node: ast.AST) -> set[str]:
    """The optional packages that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    packages = {name.partition(".")[0] for name in names}
    return packages - CORE - NO_EXTRA - {"tinkex", ""} - set(sys.stdlib_module_names)


def is_needs(node: ast.AST) -> bool:
    return isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("needs(")


def bare_imports(node: ast.AST) -> Iterator[ast.AST]:
    """Imports of optional packages outside `with needs(...)` and type checking."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if is_needs(node):
        return
    if optional_packages(node):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from bare_imports(child)


@pytest.mark.parametrize("path", client_modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_optional_package_is_imported_under_needs(path: Path) -> None:
    bare = [f"{path}:{node.lineno}" for node in bare_imports(ast.parse(path.read_text()))]  # type: ignore[attr-defined]
    assert not bare, "put these imports into `with needs('WHAT'):`"


def guarded() -> list[tuple[str, int, str]]:
    """File, line and text of each `with needs(...)` statement."""
    return [
        (str(path.relative_to(SOURCE)), node.lineno, ast.unparse(node))
        for path in client_modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if is_needs(node)
    ]


def test_each_import_names_the_extra_if_the_package_is_missing() -> None:
    """Runs every statement in an interpreter without the optional packages."""
    code = """
import json, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
from tinkex.extras import needs
errors = []
for statement in json.load(sys.stdin):
    try:
        exec(statement, {"needs": needs, "name": "org/model"})
        errors.append("no error")
    except ModuleNotFoundError as error:
        errors.append(str(error))
print(json.dumps(errors))
"""
    statements = guarded()
    assert {
        "wire/tensors.py",
        "wire/dtype_casts.py",
        "client/tokenizer.py",
        "client/observe/instrumentation.py",
    } <= {file for file, _, _ in statements}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(EXTRAS))],
        input=json.dumps([statement for _, _, statement in statements]),
        capture_output=True,
        text=True,
        check=True,
    )
    for (file, line, statement), error in zip(statements, json.loads(done.stdout), strict=True):
        package = next(iter(optional_packages(ast.parse(statement).body[0].body[0])))  # type: ignore[attr-defined]
        assert f"pip install 'tinkex[{EXTRAS[package]}]'" in error, f"{file}:{line}: {error}"
        assert f"needs {package}, which is not installed" in error


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_installs_the_package(package: str) -> None:
    installed = PROJECT["optional-dependencies"][EXTRAS[package]]
    wanted = _DISTRIBUTIONS.get(package, package)
    assert any(each.startswith(f"{wanted}>") for each in installed)


def test_needs_does_not_change_errors_about_other_packages() -> None:
    from tinkex.extras import MissingExtra, needs

    with pytest.raises(ModuleNotFoundError) as raised, needs("This"):
        importlib.import_module("no_such_package")
    assert not isinstance(raised.value, MissingExtra)
