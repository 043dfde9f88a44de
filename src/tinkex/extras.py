"""
Packages that come with extras. They are imported where they are used, and in one way:

    with needs("TensorData.to_torch()"):
        import torch

Where the package is missing, the error names the extra that brings it.
"""

from __future__ import annotations

from types import TracebackType

__all__ = ["EXTRAS", "MissingExtra", "needs"]

#: Package -> the extra of tinkex that brings it.
EXTRAS = {
    "huggingface_hub": "hub",
    "jinja2": "tokenizer",
    "opentelemetry": "otel",
    "rich": "cli",
    "tokenizers": "tokenizer",
    "torch": "engine",
    "transformers": "engine",
    "zstandard": "zstd",
}
#: What a package is called on PyPI, where that is another name.
_DISTRIBUTIONS = {"opentelemetry": "opentelemetry-api"}


class MissingExtra(ModuleNotFoundError):
    """A package that is optional is needed now. The text says how to install it."""


class needs:
    """Around the import of optional packages: a missing one is a `MissingExtra` that names `what`."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, ModuleNotFoundError):
            return
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            alone = _DISTRIBUTIONS.get(package, package)
            raise MissingExtra(
                f"{self.what} needs {package}, which is not installed: "
                f"pip install 'tinkex[{EXTRAS[package]}]', or only: pip install {alone}",
                name=error.name,
            ) from error
