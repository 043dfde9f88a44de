"""Adds browsers that have signed in to the console, and keys of administrators."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0012"


def upgrade() -> None:
    op.add_column(
        "api_keys",
        sa.Column("is_admin", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.create_table(
        "console_sessions",
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column(
            "key_id",
            sa.Integer,
            sa.ForeignKey("api_keys.key_id", name="fk_console_sessions_key_id_api_keys"),
            nullable=False,
        ),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.Column("expires_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_console_sessions"),
    )
    op.create_index("ix_console_sessions_key_id", "console_sessions", ["key_id"])
