"""Where a request is, from its acceptance to its end."""

import enum


class Status(enum.StrEnum):
    """Where a request is; it moves once, from waiting to one of the others."""

    WAITING = "waiting"  # accepted, on disk, not finished
    DONE = "done"  # the result is on disk
    FAILED = "failed"  # the error is on disk
