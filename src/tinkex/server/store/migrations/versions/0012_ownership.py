"""Adds to each run which worker has it."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("models", sa.Column("home", sa.String(200), nullable=True))
    op.add_column("models", sa.Column("term", sa.BigInteger, nullable=False, server_default="0"))
