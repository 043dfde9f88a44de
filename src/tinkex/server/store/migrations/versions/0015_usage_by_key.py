"""Adds the key to requests and to usage; 0 for what was there before."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("requests", sa.Column("key_id", sa.Integer, nullable=False, server_default="0"))
    op.rename_table("usage", "old_usage")
    # In SQLite, tables do not share names of constraints.
    if op.get_bind().dialect.name != "sqlite":
        op.drop_constraint("pk_usage", "old_usage")
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("hour", sa.BigInteger, nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False, server_default="0"),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("what", sa.String(20), nullable=False),
        sa.Column("writer", sa.String(64), nullable=False, server_default=""),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint(
            *("owner", "hour", "session_id", "key_id", "base_model", "what", "writer"),
            name="pk_usage",
        ),
    )
    names = "owner, hour, session_id, base_model, what, writer, amount"
    op.execute(f"INSERT INTO usage ({names}) SELECT {names} FROM old_usage")
    op.drop_table("old_usage")
