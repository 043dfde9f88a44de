"""The entry point of Alembic: runs the migrations in a transaction of the store."""

from alembic import context

from tinkex.server.store.schema import metadata

connection = context.config.attributes["connection"]
# `render_as_batch`: SQLite changes a table by copying it.
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
