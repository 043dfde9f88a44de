"""Snapshots, and what may be forgotten."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.String(length=1000), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("spoiled", sa.Text(), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_snapshots_model_id_models")
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_snapshots")),
        sa.UniqueConstraint("place", name=op.f("uq_snapshots_place")),
    )
    op.add_column("models", sa.Column("last_request_s", sa.Float(), nullable=True))
    op.add_column("checkpoint_versions", sa.Column("discarded_s", sa.Float(), nullable=True))
    op.create_index(
        op.f("ix_requests_finished_s_fetched_s"), "requests", ["finished_s", "fetched_s"]
    )
