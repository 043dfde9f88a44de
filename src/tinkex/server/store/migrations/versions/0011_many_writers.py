"""Lets several processes write: events by sampler, usage by writer, secrets in the database."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column(
        "samplers", sa.Column("events", sa.BigInteger, nullable=False, server_default="0")
    )
    # Running clients continue after the position that they read last, also if its event was deleted
    # since. So every sampler continues after all positions that were ever used.
    used = "SELECT coalesce(max(position), 0) FROM completions"
    if op.get_bind().dialect.name == "sqlite":
        used = (
            f"SELECT max(({used}), "
            "coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'completions'), 0))"
        )
    else:
        used = f"SELECT greatest(({used}), (SELECT last_value FROM completions_position_seq))"
    op.execute(f"UPDATE samplers SET events = ({used})")
    _replace_completions()
    _replace_usage()
    op.create_table(
        "server_secrets",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_server_secrets"),
    )


def _replace_completions() -> None:
    op.drop_index("ix_completions_sampling_session_id_clone_id_position", "completions")
    op.rename_table("completions", "old_completions")
    _drop_constraints("old_completions", "pk_completions", "uq_completions_request_id")
    op.create_table(
        "completions",
        sa.Column("sampling_session_id", sa.String(120), nullable=False),
        sa.Column("clone_id", sa.BigInteger, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("result_bytes", sa.BigInteger),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint(
            "sampling_session_id", "clone_id", "position", name="pk_completions"
        ),
        sa.UniqueConstraint("request_id", name="uq_completions_request_id"),
        sqlite_with_rowid=False,
    )
    names = "sampling_session_id, clone_id, position, request_id, result_bytes, at_s"
    op.execute(f"INSERT INTO completions ({names}) SELECT {names} FROM old_completions")
    op.drop_table("old_completions")


def _replace_usage() -> None:
    op.rename_table("usage", "old_usage")
    _drop_constraints("old_usage", "pk_usage")
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("hour", sa.BigInteger, nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("what", sa.String(20), nullable=False),
        sa.Column("writer", sa.String(64), nullable=False, server_default=""),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            "owner", "hour", "session_id", "base_model", "what", "writer", name="pk_usage"
        ),
    )
    names = "owner, hour, session_id, base_model, what, amount"
    op.execute(f"INSERT INTO usage ({names}) SELECT {names} FROM old_usage")
    op.drop_table("old_usage")


def _drop_constraints(table: str, *names: str) -> None:
    """Free the names of constraints for the new table; in SQLite, tables do not share names."""
    if op.get_bind().dialect.name != "sqlite":
        for name in names:
            op.drop_constraint(name, table)
