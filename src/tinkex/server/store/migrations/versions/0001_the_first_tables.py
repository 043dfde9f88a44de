"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("sdk_version", sa.String(length=64), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("project_id", sa.String(length=200), nullable=True),
        sa.Column("display_name", sa.String(length=500), nullable=True),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("seen_s", sa.Float(), nullable=False),
        sa.Column("finished_s", sa.Float(), nullable=True),
        sa.Column("finish_reason", sa.String(length=40), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
        sa.UniqueConstraint(
            "owner", "idempotency_key", name=op.f("uq_sessions_owner_idempotency_key")
        ),
    )
    op.create_table(
        "models",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("lora_config", sa.JSON(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name=op.f("fk_models_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_models")),
        sa.UniqueConstraint(
            "session_id", "model_seq_id", name=op.f("uq_models_session_id_model_seq_id")
        ),
    )
    op.create_table(
        "checkpoint_versions",
        sa.Column("version_id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=250), nullable=True),
        sa.Column("place", sa.String(length=1000), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_checkpoint_versions_model_id_models")
        ),
        sa.PrimaryKeyConstraint("version_id", name=op.f("pk_checkpoint_versions")),
        sa.UniqueConstraint("place", name=op.f("uq_checkpoint_versions_place")),
    )
    op.create_table(
        "checkpoint_names",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("name", sa.String(length=250), nullable=False),
        sa.Column("version_id", sa.String(length=64), nullable=False),
        sa.Column("saved_s", sa.Float(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_checkpoint_names_model_id_models")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["checkpoint_versions.version_id"],
            name=op.f("fk_checkpoint_names_version_id_checkpoint_versions"),
        ),
        sa.PrimaryKeyConstraint("model_id", "kind", "name", name=op.f("pk_checkpoint_names")),
    )
    op.create_table(
        "samplers",
        sa.Column("sampling_session_id", sa.String(length=120), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("sampling_session_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("version_id", sa.String(length=64), nullable=True),
        sa.Column("model_path", sa.String(length=1000), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name=op.f("fk_samplers_session_id_sessions")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["checkpoint_versions.version_id"],
            name=op.f("fk_samplers_version_id_checkpoint_versions"),
        ),
        sa.PrimaryKeyConstraint("sampling_session_id", name=op.f("pk_samplers")),
        sa.UniqueConstraint(
            "session_id",
            "sampling_session_seq_id",
            name=op.f("uq_samplers_session_id_sampling_session_seq_id"),
        ),
    )
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("model_id", sa.String(length=120), nullable=True),
        sa.Column("sampling_session_id", sa.String(length=120), nullable=True),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=True),
        sa.Column("payload_place", sa.String(length=1000), nullable=True),
        sa.Column("sequences", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.String(length=64), nullable=True),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_place", sa.String(length=1000), nullable=True),
        sa.Column("result_bytes", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("category", sa.String(length=20), nullable=True),
        sa.Column("cause", sa.String(length=20), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("finished_s", sa.Float(), nullable=True),
        sa.Column("fetched_s", sa.Float(), nullable=True),
        sa.CheckConstraint(
            "(status = 'failed') = (error IS NOT NULL)", name=op.f("ck_requests_error")
        ),
        sa.CheckConstraint(
            "(status = 'waiting') = (finished_s IS NULL)", name=op.f("ck_requests_finished")
        ),
        sa.CheckConstraint(
            "status IN ('waiting', 'done', 'failed')", name=op.f("ck_requests_status")
        ),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_requests_model_id_models")
        ),
        sa.ForeignKeyConstraint(
            ["sampling_session_id"],
            ["samplers.sampling_session_id"],
            name=op.f("fk_requests_sampling_session_id_samplers"),
        ),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.session_id"], name=op.f("fk_requests_session_id_sessions")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"],
            ["checkpoint_versions.version_id"],
            name=op.f("fk_requests_version_id_checkpoint_versions"),
        ),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_requests")),
        sa.UniqueConstraint("model_id", "seq_id", name=op.f("uq_requests_model_id_seq_id")),
        sa.UniqueConstraint(
            "sampling_session_id", "seq_id", name=op.f("uq_requests_sampling_session_id_seq_id")
        ),
    )
    op.create_index("ix_requests_status_created_s", "requests", ["status", "created_s"])
