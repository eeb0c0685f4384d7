"""Environment that Alembic runs; `scheduler.store.database` gives it the connection, in a transaction that is all or
nothing."""

from __future__ import annotations

from alembic import context

from scheduler.store.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
