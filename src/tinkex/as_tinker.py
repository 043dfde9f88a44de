"""
Runs programs written for the official client, unchanged.

    python -m tinkex.as_tinker train.py --steps 100
    python -m tinkex.as_tinker -m tinker_cookbook.recipes.rl_loop

or, as the first import of a program:

    import tinkex.as_tinker

From then on, `import tinker` and its submodules give tinkex, in this process and in those that
`multiprocessing` starts from it, whether or not the official client is installed. The classes are
the same objects under both names. `tinker.__version__` and the metadata of the distribution
`tinker` give the version of the official client that tinkex is compatible with.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from types import ModuleType
from typing import Any

import tinkex
from tinkex.client.settings import PROTOCOL_VERSION

NAME = "tinker"


class _Root(ModuleType):
    """The module `tinker`: the names of tinkex, and the version that it is compatible with."""

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(tinkex, name)
        except AttributeError:
            raise AttributeError(
                f"module 'tinker' (which is tinkex {tinkex.__version__}) has no attribute {name!r}"
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(tinkex)})


class _Distribution(importlib.metadata.Distribution):
    """The distribution that `importlib.metadata` finds as `tinker`."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return (
            f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {PROTOCOL_VERSION}\n"
            f"Summary: tinkex {tinkex.__version__} as a replacement\n"
        )

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        raise FileNotFoundError(f"{NAME} has no files: it is tinkex under another name.")


class _Finder(importlib.metadata.DistributionFinder, Loader):
    """Runs before all other finders, so that an installed official client is not imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == NAME:
            return ModuleSpec(name, self, is_package=True)
        if not name.startswith(f"{NAME}.") or importlib.util.find_spec(_tinkex_name(name)) is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Root(NAME, tinkex.__doc__) if spec.name == NAME else None

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _Root):
            vars(module).update(
                __version__=PROTOCOL_VERSION, __title__=NAME, __all__=tinkex.__all__
            )
        else:  # the same module object, so that a patch applies to both names
            sys.modules[module.__name__] = importlib.import_module(_tinkex_name(module.__name__))

    def find_distributions(
        self,
        context: importlib.metadata.DistributionFinder.Context = (
            importlib.metadata.DistributionFinder.Context()  # noqa: B008 (as the base has it)
        ),
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context.name in (None, NAME) else []


def _tinkex_name(name: str) -> str:
    return "tinkex" + name.removeprefix(NAME)


def install() -> None:
    """Make `tinker` an alias of tinkex. Importing this module does it; it can be repeated."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        where = getattr(sys.modules[NAME], "__file__", None) or "somewhere"
        raise ImportError(
            f"The official client is already loaded (from {where}). Import tinkex.as_tinker before "
            "anything that imports tinker, or start the program with: "
            "python -m tinkex.as_tinker PROGRAM"
        )
    sys.meta_path.insert(0, _Finder())
    _install_in_children()


def _install_in_children() -> None:
    """
    Call `install` in processes that `multiprocessing` spawns, before they import the program.

    They unpickle the result of this function first, and its reference to `install` makes them
    import this module.
    """
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "tinkex_as_tinker": install}

    spawn.get_preparation_data = get_preparation_data


USAGE = """\
Usage: python -m tinkex.as_tinker PROGRAM.py [ARGUMENT ...]
       python -m tinkex.as_tinker -m MODULE [ARGUMENT ...]"""


def main(arguments: Sequence[str]) -> None:
    """`PROGRAM ARGUMENT...` or `-m MODULE ARGUMENT...`, run as `python` would."""
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE + "\n")
        return
    if not arguments or list(arguments) == ["-m"]:
        raise SystemExit(USAGE)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    # `python PROGRAM` puts the program's folder first; `python -m` put the current folder there.
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    # Imported under its full name, which is how child processes find it.
    importlib.import_module("tinkex.as_tinker").main(sys.argv[1:])
else:
    install()
