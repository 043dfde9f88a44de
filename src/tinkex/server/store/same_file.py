"""
Whether the files of a SQLite database are still those that were opened.

A file that is deleted or replaced stays open: writes to it succeed, and are gone when the process ends.
"""

from pathlib import Path

from tinkex.server.store.trouble import DatabaseGone


class SameFile:
    """The database and its write-ahead log, by device and inode."""

    def __init__(self, database: Path) -> None:
        self._files = (database, database.with_name(f"{database.name}-wal"))
        self._opened: dict[Path, tuple[int, int]] = {}

    def check(self) -> None:
        """Raises DatabaseGone when one is not there, or is another. The first call takes note."""
        for file in self._files:
            try:
                stats = file.stat()
            except (FileNotFoundError, NotADirectoryError):
                if file in self._opened:
                    raise DatabaseGone(f"{file} is not there any more") from None
                continue
            found = (stats.st_dev, stats.st_ino)
            if self._opened.setdefault(file, found) != found:
                raise DatabaseGone(f"{file} is another file than the one that was opened")
