"""Sinks: receivers of events, the events that wait for them, and those that they did not take."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "terrace_sinks",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("kind", sa.String(63), nullable=False),
        sa.Column("filter", sa.Text, nullable=False),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("created_by", sa.String(63)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("dropped", sa.BigInteger, nullable=False),
        sa.Column("lost_letters", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "terrace_outbox",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("type", sa.String(63), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "terrace_dead_letters",
        sa.Column("sink", sa.String(63), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("wanted", sa.Boolean, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
