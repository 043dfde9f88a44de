"""
PostgreSQL's fail-over: a standby that was promoted may lack the newest commits.

This process has acted on commits that may be gone: it has answered clients, and its engines are ahead
of the log. It could not even ask whether its last transaction was committed, because the new server
gives the same transaction ids to others. So it ends as if it had been killed, and the one that is
started in its place knows only what the database has: clients are told that lost requests are
unknown, and models are rebuilt at the last step that is left.

PostgreSQL numbers the histories of a database: each promotion begins a new timeline.
"""

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

log = logging.getLogger("tinkex.server.store")

#: The first eight digits of a WAL file's name are its timeline. A standby that is not promoted has none.
_TIMELINE = """
    SELECT CASE WHEN NOT pg_is_in_recovery()
    THEN substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END
    """


def end_process() -> None:
    """Not an exit: no handler may write anything more, and the requests that ran are not to blame."""
    os.kill(os.getpid(), signal.SIGKILL)


def watch_timeline(*engines: sa.Engine, on_change: Callable[[], object] = end_process) -> None:
    """Compare the timeline of each new connection with that of the first one."""
    refused = engines[0].dialect.loaded_dbapi.DatabaseError
    first: list[str] = []

    def _connected(connection: Any, _record: object) -> None:
        try:
            with connection.cursor() as cursor:
                timeline = cursor.execute(_TIMELINE).fetchone()[0]
        except refused as error:
            if first or connection.closed:
                raise
            # The service does not have these functions, or this user may not call them.
            log.warning("a fail-over of the database would not be noticed: %s", error)
            timeline = None
        connection.rollback()
        if timeline is None:
            return  # unknown, or a standby: whoever writes to that gets an error
        if not first:
            first.append(timeline)
        if timeline != first[0]:
            log.critical(
                "the database has failed over (timeline %s, before: %s) and may lack the newest "
                "commits: this process ends, and its successor reads what the database has",
                int(timeline, 16),
                int(first[0], 16),
            )
            on_change()

    for engine in engines:
        # Before all other listeners: until the timeline is known, nothing may be asked or written.
        event.listen(engine, "connect", _connected, insert=True)
