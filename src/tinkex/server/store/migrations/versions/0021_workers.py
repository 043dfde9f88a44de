"""Adds workers, and which of them runs a request."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("requests", sa.Column("home", sa.String(200)))
    op.add_column("requests", sa.Column("cancel_s", sa.Float))
    if op.get_bind().dialect.name == "postgresql":
        op.create_index(
            "ix_requests_home_base_model",
            "requests",
            ["home", "base_model"],
            postgresql_where=sa.text("status = 'waiting'"),
        )
    op.create_table(
        "workers",
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("started_s", sa.Float, nullable=False),
        sa.Column("seen_s", sa.Float, nullable=False),
        sa.Column("model", sa.JSON, nullable=False),
        sa.Column("stats", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_workers"),
        sa.CheckConstraint("state IN ('up', 'draining', 'gone')", name="state"),
    )
    op.create_table(
        "refused_steps",
        sa.Column("model_id", sa.String(120), nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("refused_s", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name="pk_refused_steps"),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name="fk_refused_steps_model_id_models"
        ),
    )
