"""Import paths of the official client that lead to one module here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_ENTRY = "tinkex-aliases:"
_names: dict[str, tuple[str, ...]] = {}


def aliases(package: str, names: str) -> str:
    """
    An entry for the `__path__` of a package that makes `names` its submodules.

    Each of them *is* the package: `tinkex.types.tensor_data.TensorData` and `tinkex.types.TensorData`
    are one attribute of one module, so nothing is copied, and a patch applies to both.
    """
    _names[package] = tuple(names.split())
    if Aliases not in sys.path_hooks:
        sys.path_hooks.append(Aliases)
    return _ENTRY + package


class Aliases(Loader):
    """Finds and loads the aliases of one package, and lists them for `pkgutil`."""

    def __init__(self, entry: str) -> None:
        if not entry.startswith(_ENTRY):
            raise ImportError(f"{entry} is not an alias entry", path=entry)
        self._package = entry.removeprefix(_ENTRY)

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        known = name.removeprefix(f"{self._package}.") in _names[self._package]
        return ModuleSpec(name, self) if known else None

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        for name in _names[self._package]:
            yield prefix + name, False

    def create_module(self, spec: ModuleSpec) -> None:
        """The default empty module; `exec_module` replaces it."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = sys.modules[self._package]
