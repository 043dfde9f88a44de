"""
Optional packages. They are imported where they are used, always like this:

    with needs("TensorData.to_torch()"):
        import torch

If the package is missing, the error names the extra that installs it.
"""

from __future__ import annotations

from types import TracebackType

__all__ = ["EXTRAS", "MissingExtra", "needs"]

#: Package -> the extra of tinkex that installs it.
EXTRAS = {
    "PIL": "images",
    "gguf": "gguf",
    "huggingface_hub": "hub",
    "jinja2": "tokenizer",
    "llguidance": "guided",
    "opentelemetry": "otel",
    "rich": "cli",
    "tensorboardX": "tensorboard",
    "tokenizers": "tokenizer",
    "torch": "engine",
    "trackio": "trackio",
    "transformers": "engine",
    "wandb": "wandb",
    "zstandard": "zstd",
}
#: Names on PyPI, where they differ from the package.
_DISTRIBUTIONS = {"PIL": "pillow", "opentelemetry": "opentelemetry-api"}


class MissingExtra(ModuleNotFoundError):
    """An optional package is needed. The message says how to install it."""


class needs:
    """A context for imports of optional packages. `MissingExtra` says that `what` needs one."""

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
