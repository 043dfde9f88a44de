"""How often a request was with an engine that died."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("requests", sa.Column("deaths", sa.Integer(), nullable=False, server_default="0"))
