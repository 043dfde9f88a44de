"""
The tables of tinkex 0.1.

Versions 0001 to 0007 were never released; tinkex 0.1 upgrades a database of one of them to 0008.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = None

# SQLite assigns row numbers only in a column of exactly this type.
NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


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
        sa.Column("lapsed_s", sa.Float(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name=op.f("pk_sessions")),
        sa.UniqueConstraint(
            "owner", "idempotency_key", name=op.f("uq_sessions_owner_idempotency_key")
        ),
    )
    op.create_index("ix_sessions_owner_created_s", "sessions", ["owner", "created_s"])
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
        sa.Column("last_request_s", sa.Float(), nullable=True),
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
        sa.Column("discarded_s", sa.Float(), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
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
        sa.Column("clients", sa.Integer(), server_default="0", nullable=False),
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
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("deaths", sa.Integer(), server_default="0", nullable=False),
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
    op.create_index("ix_requests_session_id", "requests", ["session_id"])
    op.create_index("ix_requests_status_created_s", "requests", ["status", "created_s"])
    op.create_index("ix_requests_finished_s_fetched_s", "requests", ["finished_s", "fetched_s"])
    op.create_table(
        "snapshots",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.String(length=1000), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("spoiled", sa.Text(), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_snapshots_model_id_models")
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_snapshots")),
        sa.UniqueConstraint("place", name=op.f("uq_snapshots_place")),
    )
    op.create_table(
        "older_snapshots",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.String(length=1000), nullable=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("spoiled", sa.Text(), nullable=True),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"], ["models.model_id"], name=op.f("fk_older_snapshots_model_id_models")
        ),
        sa.PrimaryKeyConstraint("model_id", name=op.f("pk_older_snapshots")),
        sa.UniqueConstraint("place", name=op.f("uq_older_snapshots_place")),
    )
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
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("hint", sa.String(length=20), nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("project_id", sa.String(length=200), nullable=True),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=True),
        sa.Column("used_s", sa.Float(), nullable=True),
        sa.Column("revoked_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_keys_hash")),
    )
    op.create_table(
        "completions",
        sa.Column("position", NUMBER, nullable=False),
        sa.Column("sampling_session_id", sa.String(length=120), nullable=False),
        sa.Column("clone_id", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("result_bytes", sa.BigInteger(), nullable=True),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_completions")),
        sa.UniqueConstraint("request_id", name=op.f("uq_completions_request_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_completions_sampling_session_id_clone_id_position",
        "completions",
        ["sampling_session_id", "clone_id", "position"],
    )
    op.create_table(
        "usage",
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("what", sa.String(length=20), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "owner", "hour", "session_id", "base_model", "what", name=op.f("pk_usage")
        ),
    )
    op.create_table(
        "audit",
        sa.Column("entry_id", NUMBER, nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("topic", sa.String(length=20), nullable=False),
        sa.Column("event", sa.String(length=60), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_owner_at_s", "audit", ["owner", "at_s"])
    op.create_table(
        "telemetry",
        sa.Column("event_number", NUMBER, nullable=False),
        sa.Column("owner", sa.String(length=200), nullable=False),
        sa.Column("session_id", sa.String(length=120), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("event_number", name=op.f("pk_telemetry")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_telemetry_at_s", "telemetry", ["at_s"])
