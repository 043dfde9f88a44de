"""Locks on open files, which the system releases when the file is closed or the process ends."""

import errno
import os
import sys
from typing import IO, Any

#: Windows locks bytes, and lets nobody else read them. No file that is locked here is this long.
_LOCKED_BYTE = 2**30


def lock(file: IO[Any]) -> None:
    """Lock an open file. Waits while another process has it locked."""
    if sys.platform == "win32":
        while not _lock_byte(file, wait=True):
            pass  # each call waits ten seconds
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file; False if another process has it locked."""
    if sys.platform == "win32":
        return _lock_byte(file, wait=False)
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if sys.platform == "win32":

    def _lock_byte(file: IO[Any], *, wait: bool) -> bool:
        import msvcrt

        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EDEADLK):
                raise
            return False
        return True
