"""PostgreSQL fails over to a standby that lost the newest commits."""

import pytest
import sqlalchemy as sa

from postgres import binaries, postgres_server
from tinkex.server.store.failover import watch_timeline


@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_a_new_timeline_is_noticed_before_anything_else_happens_on_the_connection():
    with postgres_server() as postgres:
        engine = sa.create_engine(postgres.database())
        seen = []

        @sa.event.listens_for(engine, "connect")
        def _connected(_connection, _record):
            seen.append("connected")

        watch_timeline(engine, on_change=lambda: seen.append("timeline changed"))
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE kept (number int)")
        postgres.make_standby()
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
        engine.dispose()
        postgres.stop()
        postgres.start()
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT number FROM kept").all() == [(1,)]
        assert seen == ["connected", "connected"]
        # A restart keeps the timeline, and all commits.
        engine.dispose()
        postgres.fail_over()
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT number FROM kept").all() == []
        assert seen == ["connected", "connected", "timeline changed", "connected"]
        engine.dispose()


@pytest.mark.skipif(binaries() is None, reason="PostgreSQL is not installed")
def test_a_service_that_does_not_tell_its_timeline_can_be_used(postgres, caplog):
    url = sa.make_url(postgres.database())
    with postgres.connect(url.database) as connection:
        connection.execute("CREATE ROLE plain LOGIN PASSWORD 'plain'")
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_current_wal_lsn() FROM PUBLIC")
    engine = sa.create_engine(url.set(username="plain", password="plain"))
    watch_timeline(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() == "plain"
    assert "permission denied for function pg_current_wal_lsn" in caplog.text
    engine.dispose()
