"""Adds the hash of the base model to each run."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("models", sa.Column("base_hash", sa.String(200), nullable=True))
