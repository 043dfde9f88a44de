"""The snapshot before the newest, and fingerprints of files."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("fingerprint", sa.String(64), nullable=True))
    op.add_column("checkpoint_versions", sa.Column("fingerprint", sa.String(64), nullable=True))
    op.create_table(
        "older_snapshots",
        sa.Column("model_id", sa.String(120), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.String(1000), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("spoiled", sa.Text(), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_older_snapshots_model_id_models")
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_older_snapshots")),
        sa.UniqueConstraint("place", name=op.f("uq_older_snapshots_place")),
    )
