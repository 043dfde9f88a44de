"""Databases with the tables of earlier versions."""

import sqlalchemy as sa

from tinkex.server.store.migrations import migrate


def make_0014(engine: sa.Engine) -> None:
    """Create the tables of version 0014: requests and usage without keys."""
    migrate(engine)
    statements = (
        "ALTER TABLE requests DROP COLUMN key_id",
        "DROP TABLE usage",
        """
        CREATE TABLE usage (owner VARCHAR(200) NOT NULL, hour BIGINT NOT NULL,
        session_id VARCHAR(64) NOT NULL, base_model VARCHAR(500) NOT NULL,
        what VARCHAR(20) NOT NULL, writer VARCHAR(64) DEFAULT '' NOT NULL, amount BIGINT NOT NULL,
        CONSTRAINT pk_usage PRIMARY KEY (owner, hour, session_id, base_model, what, writer))
        """,
        "UPDATE alembic_version SET version_num = '0014'",
    )
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def make_0013(engine: sa.Engine) -> None:
    """Create the tables of version 0013: without the console's."""
    make_0014(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE console_sessions")
        connection.exec_driver_sql("ALTER TABLE api_keys DROP COLUMN is_admin")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0013'")


def make_0012(engine: sa.Engine) -> None:
    """Create the tables of version 0012: without workers."""
    make_0013(engine)
    statements = (
        "DROP INDEX IF EXISTS ix_requests_home_base_model",
        "ALTER TABLE requests DROP COLUMN home",
        "ALTER TABLE requests DROP COLUMN cancel_s",
        "DROP TABLE workers",
        "DROP TABLE refused_steps",
        "UPDATE alembic_version SET version_num = '0012'",
    )
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def make_0011(engine: sa.Engine) -> None:
    """Create the tables of version 0011: models without owners among workers."""
    make_0012(engine)
    with engine.begin() as connection:
        for column in ("home", "term"):
            connection.exec_driver_sql(f"ALTER TABLE models DROP COLUMN {column}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0011'")


def make_0010(engine: sa.Engine) -> None:
    """Create the tables of version 0010: one numbering of events, usage without writers."""
    make_0011(engine)
    number = (
        "INTEGER NOT NULL CONSTRAINT pk_completions PRIMARY KEY AUTOINCREMENT"
        if engine.dialect.name == "sqlite"
        else "BIGSERIAL NOT NULL CONSTRAINT pk_completions PRIMARY KEY"
    )
    statements = (
        "DROP TABLE server_secrets",
        "ALTER TABLE samplers DROP COLUMN events",
        "DROP TABLE completions",
        f"""
        CREATE TABLE completions (position {number},
        sampling_session_id VARCHAR(120) NOT NULL, clone_id BIGINT NOT NULL,
        request_id VARCHAR(64) NOT NULL, result_bytes BIGINT, at_s FLOAT NOT NULL,
        CONSTRAINT uq_completions_request_id UNIQUE (request_id))
        """,
        """
        CREATE INDEX ix_completions_sampling_session_id_clone_id_position
        ON completions (sampling_session_id, clone_id, position)
        """,
        "DROP TABLE usage",
        """
        CREATE TABLE usage (owner VARCHAR(200) NOT NULL, hour BIGINT NOT NULL,
        session_id VARCHAR(64) NOT NULL, base_model VARCHAR(500) NOT NULL,
        what VARCHAR(20) NOT NULL, amount BIGINT NOT NULL,
        CONSTRAINT pk_usage PRIMARY KEY (owner, hour, session_id, base_model, what))
        """,
        "UPDATE alembic_version SET version_num = '0010'",
    )
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def make_0009(engine: sa.Engine) -> None:
    """Create the tables of version 0009: without the table that 0010 adds."""
    make_0010(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE step_metrics")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0009'")


def make_older(engine: sa.Engine) -> None:
    """Create the tables of version 0008: without the column and the table of later ones."""
    make_0009(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE models DROP COLUMN base_hash")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0008'")
