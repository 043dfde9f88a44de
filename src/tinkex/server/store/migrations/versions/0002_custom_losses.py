"""Losses that users wrote."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("custom_loss_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("definition", sa.LargeBinary(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.session_id"],
            name=op.f("fk_custom_losses_session_id_sessions"),
        ),
        sa.PrimaryKeyConstraint("loss_id", name=op.f("pk_custom_losses")),
        sa.UniqueConstraint("request_id", name=op.f("uq_custom_losses_request_id")),
        sa.UniqueConstraint(
            "session_id",
            "custom_loss_seq_id",
            name=op.f("uq_custom_losses_session_id_custom_loss_seq_id"),
        ),
    )
