"""Logs of finished samples, usage, audit and telemetry."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

# SQLite numbers rows by itself only in a column of exactly this type.
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "completions",
        sa.Column("position", NUMBER, nullable=False),
        sa.Column("sampling_session_id", sa.String(length=120), nullable=False),
        sa.Column("clone_id", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("result_bytes", sa.BigInteger(), nullable=True),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_completions")),
        sa.UniqueConstraint("request_id", name=op.f("uq_completions_request_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_completions_sampling_session_id_clone_id_position"),
        "completions",
        ["sampling_session_id", "clone_id", "position"],
    )
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("what", sa.String(length=20), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "owner", "hour", "session_id", "base_model", "what", name=op.f("pk_usage")
        ),
    )
    op.create_table(
        "audit",
        sa.Column("entry_id", NUMBER, nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("topic", sa.String(length=20), nullable=False),
        sa.Column("event", sa.String(length=60), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_audit_owner_at_s"), "audit", ["owner", "at_s"])
    op.create_table(
        "telemetry",
        sa.Column("event_number", NUMBER, nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=120), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("event_number", name=op.f("pk_telemetry")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_telemetry_at_s"), "telemetry", ["at_s"])
    op.add_column(
        "samplers", sa.Column("clients", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column(
        "requests", sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.create_index(op.f("ix_sessions_owner_created_s"), "sessions", ["owner", "created_s"])
    op.create_index(op.f("ix_requests_session_id"), "requests", ["session_id"])
