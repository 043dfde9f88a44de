"""
A file system that fails on demand, `failing://...` for fsspec.

Otherwise it is fsspec's memory file system.
"""

import errno
import os
from typing import Any, ClassVar

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]


class FailingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Writes succeed unless `error` is set; then they fail with that errno."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[int | None] = None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        number = FailingFileSystem.error
        if number is not None:
            raise OSError(number, os.strerror(number), path)
        super().pipe_file(path, value, mode=mode, **options)


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)

FULL = errno.ENOSPC
READ_ONLY = errno.EROFS
