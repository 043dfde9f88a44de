"""
The tables, with the reason for each constraint and index.

Times (`*_s`) are in seconds since 1970, UTC. A `place` is a storage key: see `blobs`.
"""

import enum

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("sdk_version", sa.String(64)),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("project_id", sa.String(200)),
    sa.Column("display_name", sa.String(500)),
    sa.Column("idempotency_key", sa.String(200)),
    sa.Column("created_s", sa.Float, nullable=False),
    sa.Column("seen_s", sa.Float, nullable=False),
    sa.Column("finished_s", sa.Float),
    sa.Column("finish_reason", sa.String(40)),
    sa.Column("finish_detail", sa.Text),
    # When its client timed out; NULL again if the client comes back.
    sa.Column("lapsed_s", sa.Float),
    # Which of its work failed, and why; NULL again once work succeeds.
    sa.Column("failure", sa.JSON(none_as_null=True)),
    # A repeated `create_session` returns the first session.
    sa.UniqueConstraint("owner", "idempotency_key"),
    # Lists of an owner's sessions, newest first.
    sa.Index("ix_sessions_owner_created_s", "owner", "created_s"),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("model_id", sa.String(120), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.session_id"), nullable=False),
    sa.Column("model_seq_id", sa.BigInteger, nullable=False),
    sa.Column("base_model", sa.String(500), nullable=False),
    sa.Column("lora_config", sa.JSON, nullable=False),
    sa.Column("optimizer_config", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("created_s", sa.Float, nullable=False),
    # The time of its newest deleted request row.
    sa.Column("last_request_s", sa.Float),
    # The hash of its base model when it was created; NULL until it is known.
    sa.Column("base_hash", sa.String(200)),
    # Which worker runs its steps, and how often that has changed. A worker publishes results only
    # while the term is its own (`ownership`). A server on one machine uses neither.
    sa.Column("home", sa.String(200)),
    sa.Column("term", sa.BigInteger, nullable=False, server_default="0"),
    # A repeated `create_model` returns the first model.
    sa.UniqueConstraint("session_id", "model_seq_id"),
)

checkpoint_versions = sa.Table(
    "checkpoint_versions",
    metadata,
    sa.Column("version_id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("model_id", sa.ForeignKey("models.model_id"), nullable=False),
    sa.Column("kind", sa.String(40), nullable=False),
    # NULL for unnamed sampler saves.
    sa.Column("name", sa.String(250)),
    # Its files. Written once, never changed.
    sa.Column("place", sa.String(1000), nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("created_s", sa.Float, nullable=False),
    # When its files were no longer needed; they may be deleted.
    sa.Column("discarded_s", sa.Float),
    # The hash of its files, to detect damage; NULL in rows of old versions.
    sa.Column("fingerprint", sa.String(64)),
    # Two saves never share a folder.
    sa.UniqueConstraint("place"),
)

checkpoint_names = sa.Table(
    "checkpoint_names",
    metadata,
    # A name refers to one version at a time; overwriting changes the version.
    sa.Column("model_id", sa.ForeignKey("models.model_id"), primary_key=True),
    sa.Column("kind", sa.String(40), primary_key=True),
    sa.Column("name", sa.String(250), primary_key=True),
    sa.Column("version_id", sa.ForeignKey("checkpoint_versions.version_id"), nullable=False),
    sa.Column("saved_s", sa.Float, nullable=False),
    sa.Column("expires_s", sa.Float),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("public", sa.Boolean, nullable=False),
)

samplers = sa.Table(
    "samplers",
    metadata,
    sa.Column("sampling_session_id", sa.String(120), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.session_id"), nullable=False),
    sa.Column("sampling_session_seq_id", sa.BigInteger, nullable=False),
    sa.Column("base_model", sa.String(500), nullable=False),
    # NULL for sampling from the base model.
    sa.Column("version_id", sa.ForeignKey("checkpoint_versions.version_id")),
    sa.Column("model_path", sa.String(1000)),
    sa.Column("created_s", sa.Float, nullable=False),
    # The number of copies of its client; the next copy gets the next number.
    sa.Column("clients", sa.Integer, nullable=False, server_default="0"),
    # The position of its newest event in `completions`. Whoever adds events changes this row first,
    # so events of one sampler are committed in the order of their positions.
    sa.Column("events", sa.BigInteger, nullable=False, server_default="0"),
    # A repeated `create_sampling_session` returns the first sampler.
    sa.UniqueConstraint("session_id", "sampling_session_seq_id"),
)

requests = sa.Table(
    "requests",
    metadata,
    sa.Column("request_id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.session_id")),
    sa.Column("model_id", sa.ForeignKey("models.model_id")),
    sa.Column("sampling_session_id", sa.ForeignKey("samplers.sampling_session_id")),
    sa.Column("seq_id", sa.BigInteger),
    sa.Column("kind", sa.String(40), nullable=False),
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("base_model", sa.String(500), nullable=False),
    # Small payloads and results are in the row; large ones are files, durable before the row.
    sa.Column("payload", sa.LargeBinary),
    sa.Column("payload_place", sa.String(1000)),
    # The number of sequences of a sample; their ids are derived from the request's.
    sa.Column("sequences", sa.Integer, nullable=False),
    # The checkpoint version of a load or a sample; a replay uses the same one.
    sa.Column("version_id", sa.ForeignKey("checkpoint_versions.version_id")),
    sa.Column("result", sa.LargeBinary),
    sa.Column("result_place", sa.String(1000)),
    sa.Column("result_bytes", sa.BigInteger),
    sa.Column("error", sa.Text),
    sa.Column("category", sa.String(20)),
    # Why a step failed; recovery needs it.
    sa.Column("cause", sa.String(20)),
    sa.Column("created_s", sa.Float, nullable=False),
    sa.Column("finished_s", sa.Float),
    sa.Column("fetched_s", sa.Float),
    # Tokens in the examples of a pass or the prompt of a sample, counted on arrival.
    sa.Column("tokens", sa.BigInteger, nullable=False, server_default="0"),
    # How often it was lost because its engine ended by itself.
    sa.Column("deaths", sa.Integer, nullable=False, server_default="0"),
    # On several machines: the worker that runs it; of a step, the home of its model.
    sa.Column("home", sa.String(200)),
    # On several machines: cancel a sample at this time of the database's clock.
    sa.Column("cancel_s", sa.Float),
    # The key that it came with; 0 without one, and in rows from before this was stored.
    sa.Column("key_id", sa.Integer, nullable=False, server_default="0"),
    # A repeated step or sample returns the first one.
    sa.UniqueConstraint("model_id", "seq_id"),
    sa.UniqueConstraint("sampling_session_id", "seq_id"),
    sa.CheckConstraint("status IN ('waiting', 'done', 'failed')", name="status"),
    # A finished request has a time, and a failed one an error.
    sa.CheckConstraint("(status = 'waiting') = (finished_s IS NULL)", name="finished"),
    sa.CheckConstraint("(status = 'failed') = (error IS NOT NULL)", name="error"),
    # For the trace of a session.
    sa.Index("ix_requests_session_id", "session_id"),
    # Finds waiting requests at a start without reading finished ones.
    sa.Index("ix_requests_status_created_s", "status", "created_s"),
    # Finds requests to delete without reading the rest.
    sa.Index("ix_requests_finished_s_fetched_s", "finished_s", "fetched_s"),
)
# What waits for each worker. SQLite has one server and no workers.
sa.Index(
    "ix_requests_home_base_model",
    requests.c.home,
    requests.c.base_model,
    postgresql_where=requests.c.status == "waiting",
).ddl_if(dialect="postgresql")

workers = sa.Table(
    "workers",
    metadata,
    # Processes that run the work of one base model (`tinkex worker`); unique in a cluster.
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("base_model", sa.String(500), nullable=False),
    # Grows with each process of this name: an older process sees that it was replaced.
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(20), nullable=False),
    # Times of the database's clock. `seen_s` is its last heartbeat.
    sa.Column("started_s", sa.Float, nullable=False),
    sa.Column("seen_s", sa.Float, nullable=False),
    # The model as `ServedModel` has it.
    sa.Column("model", sa.JSON, nullable=False),
    # Its load, and the statistics of its engines.
    sa.Column("stats", sa.JSON, nullable=False),
    sa.CheckConstraint("state IN ('up', 'draining', 'gone')", name="state"),
)

refused_steps = sa.Table(
    "refused_steps",
    metadata,
    # Steps that web processes refused, for the worker that has their model (`StepQueue.refuse`).
    sa.Column("model_id", sa.ForeignKey("models.model_id"), primary_key=True),
    sa.Column("seq_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(40), nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("refused_s", sa.Float, nullable=False),
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    # The newest one of a model; it contains the steps up to `seq_id`, which never run again.
    sa.Column("model_id", sa.ForeignKey("models.model_id"), primary_key=True),
    sa.Column("seq_id", sa.BigInteger, nullable=False),
    sa.Column("place", sa.String(1000), nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    # The error for the next optimizer step, if it must be refused.
    sa.Column("spoiled", sa.Text),
    sa.Column("created_s", sa.Float, nullable=False),
    # The hash of its files, to detect damage; NULL in rows of old versions.
    sa.Column("fingerprint", sa.String(64)),
    sa.UniqueConstraint("place"),
)

# The snapshot before the newest, kept for a while in case the newest is damaged.
older_snapshots = sa.Table(
    "older_snapshots",
    metadata,
    sa.Column("model_id", sa.ForeignKey("models.model_id"), primary_key=True),
    sa.Column("seq_id", sa.BigInteger, nullable=False),
    # NULL for an empty model (`seq_id` -1): the whole log is there.
    sa.Column("place", sa.String(1000)),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("spoiled", sa.Text),
    sa.Column("created_s", sa.Float, nullable=False),
    sa.Column("fingerprint", sa.String(64)),
    sa.UniqueConstraint("place"),
)

step_metrics = sa.Table(
    "step_metrics",
    metadata,
    # One row for each optimizer step of a run, from 1. Old ones are thinned, and deleted some time
    # after the run ended, except for the last.
    sa.Column(
        "model_id",
        sa.String(120),
        sa.ForeignKey("models.model_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    # A step is stored once: the key refuses a second row.
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    # NULL while the step is not finished: passes have run, and its optim_step has not.
    sa.Column("finished_s", sa.Float),
    # Sums over the passes of the step.
    sa.Column("passes", sa.Integer, nullable=False),
    sa.Column("examples", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    # Tokens that have a gradient.
    sa.Column("loss_tokens", sa.BigInteger, nullable=False),
    # These are NULL if the step has no such number, or if it is not finite or huge.
    sa.Column("loss_sum", sa.Float),
    sa.Column("entropy_sum", sa.Float),
    sa.Column("learning_rate", sa.Float),
    sa.Column("grad_norm", sa.Float),
    sa.Column("update_norm", sa.Float),
    # Seconds that the engine computed, passes included.
    sa.Column("compute_s", sa.Float, nullable=False),
    # Other metrics by name, such as those of a custom loss. While the step is not finished, also
    # what its next pass needs (`step_rows.Step.row`).
    sa.Column("more", sa.JSON(none_as_null=True)),
    # Rows are read by run and in order: without row ids, that is the order on disk.
    sqlite_with_rowid=False,
)

custom_losses = sa.Table(
    "custom_losses",
    metadata,
    # Cannot be guessed; its owner may use it.
    sa.Column("loss_id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.session_id"), nullable=False),
    sa.Column("custom_loss_seq_id", sa.BigInteger, nullable=False),
    sa.Column("request_id", sa.String(64), nullable=False),
    # The request as received; new engine processes get it again.
    sa.Column("definition", sa.LargeBinary, nullable=False),
    sa.Column("created_s", sa.Float, nullable=False),
    # A repeated `create_custom_loss` returns the first loss.
    sa.UniqueConstraint("session_id", "custom_loss_seq_id"),
    sa.UniqueConstraint("request_id"),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    # Never reused. Rows of revoked keys stay, so that a server that had a key keeps requiring one.
    sa.Column("key_id", sa.Integer, primary_key=True),
    # SHA-256 of the key. The key itself is not stored.
    sa.Column("hash", sa.String(64), nullable=False),
    # Its first characters, for lists.
    sa.Column("hint", sa.String(20), nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("project_id", sa.String(200)),
    sa.Column("name", sa.String(200), nullable=False),
    # Limits of this key that differ from the server's, by name.
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("created_s", sa.Float, nullable=False),
    sa.Column("expires_s", sa.Float),
    sa.Column("used_s", sa.Float),
    sa.Column("revoked_s", sa.Float),
    # Whether it may manage the keys of all owners in the console.
    sa.Column("is_admin", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.UniqueConstraint("hash"),
)

console_sessions = sa.Table(
    "console_sessions",
    metadata,
    # SHA-256 of the cookie of a browser that has signed in. The cookie itself is not stored.
    sa.Column("hash", sa.String(64), primary_key=True),
    # The key that the person signed in with; without it the cookie is not valid.
    sa.Column("key_id", sa.ForeignKey("api_keys.key_id"), nullable=False),
    sa.Column("created_s", sa.Float, nullable=False),
    sa.Column("expires_s", sa.Float, nullable=False),
    # Counts the sessions of a key.
    sa.Index("ix_console_sessions_key_id", "key_id"),
)

# SQLite assigns row numbers only in a column of exactly this type.
_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")

completions = sa.Table(
    "completions",
    metadata,
    sa.Column("sampling_session_id", sa.String(120), primary_key=True),
    # Which copy of the sampling client; 0 is the original.
    sa.Column("clone_id", sa.BigInteger, primary_key=True, autoincrement=False),
    # Orders the events of each client; never reused (`samplers.events`).
    sa.Column("position", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", sa.String(64), nullable=False),
    # NULL if the sample failed.
    sa.Column("result_bytes", sa.BigInteger),
    sa.Column("at_s", sa.Float, nullable=False),
    # A sample finishes once.
    sa.UniqueConstraint("request_id"),
    # Rows are read by client and in order: without row ids, that is the order on disk.
    sqlite_with_rowid=False,
)

usage = sa.Table(
    "usage",
    metadata,
    # One row for each hour with usage; stays when the requests are deleted.
    sa.Column("owner", sa.String(200), primary_key=True),
    # Whole hours since 1970.
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    # Empty for work outside a session.
    sa.Column("session_id", sa.String(64), primary_key=True),
    # The key of the requests; 0 without one, and in rows from before this was stored.
    sa.Column("key_id", sa.Integer, primary_key=True, autoincrement=False, server_default="0"),
    sa.Column("base_model", sa.String(500), primary_key=True),
    sa.Column("what", sa.String(20), primary_key=True),
    # Each process that writes has rows of its own, so that none waits for another; empty for a
    # server on one machine. Reports add them up.
    sa.Column("writer", sa.String(64), primary_key=True, server_default=""),
    sa.Column("amount", sa.BigInteger, nullable=False),
)

server_secrets = sa.Table(
    "server_secrets",
    metadata,
    # What signs links and tokens. All web processes of a database share them.
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
    sa.Column("created_s", sa.Float, nullable=False),
)

audit = sa.Table(
    "audit",
    metadata,
    # Rows are added in the transaction of the change, and never updated.
    sa.Column("entry_id", _NUMBER, primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("at_s", sa.Float, nullable=False),
    sa.Column("topic", sa.String(20), nullable=False),
    sa.Column("event", sa.String(60), nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Index("ix_audit_owner_at_s", "owner", "at_s"),
    sqlite_autoincrement=True,
)

telemetry = sa.Table(
    "telemetry",
    metadata,
    sa.Column("event_number", _NUMBER, primary_key=True),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("session_id", sa.String(120), nullable=False),
    sa.Column("at_s", sa.Float, nullable=False),
    # Known fields only, truncated.
    sa.Column("event", sa.JSON, nullable=False),
    sa.Index("ix_telemetry_at_s", "at_s"),
    sqlite_autoincrement=True,
)


class Status(enum.StrEnum):
    """The state of a request; it changes once, from waiting to done or failed."""

    WAITING = "waiting"  # accepted, on disk, not finished
    DONE = "done"  # the result is on disk
    FAILED = "failed"  # the error is on disk
