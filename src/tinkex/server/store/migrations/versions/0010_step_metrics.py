"""Adds the metrics of each optimizer step of a run."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "step_metrics",
        sa.Column(
            "model_id",
            sa.String(120),
            sa.ForeignKey(
                "models.model_id", name="fk_step_metrics_model_id_models", ondelete="CASCADE"
            ),
            nullable=False,
        ),
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("finished_s", sa.Float),
        sa.Column("passes", sa.Integer, nullable=False),
        sa.Column("examples", sa.BigInteger, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("loss_tokens", sa.BigInteger, nullable=False),
        sa.Column("loss_sum", sa.Float),
        sa.Column("entropy_sum", sa.Float),
        sa.Column("learning_rate", sa.Float),
        sa.Column("grad_norm", sa.Float),
        sa.Column("update_norm", sa.Float),
        sa.Column("compute_s", sa.Float, nullable=False),
        sa.Column("more", sa.JSON),
        sa.PrimaryKeyConstraint("model_id", "number", name="pk_step_metrics"),
        sqlite_with_rowid=False,
    )
