"""Observations of sources."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "terrace_observations",
        *_key("sequence"),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("received", sa.BigInteger, nullable=False, unique=True),
        sa.Column("taken_at", sa.Float(53), nullable=False),
        sa.Column("labelled", sa.Boolean, nullable=False),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False, index=True),
        sa.Column("hierarchy", sa.String(64), nullable=False),
        sa.Column("label", sa.Integer),
        sa.Column("confidence", sa.Float(53)),
        sa.Column("tier", sa.String(8)),
        sa.Column("unsure", sa.Boolean, nullable=False),
        sa.Column("waits", sa.Boolean, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_table(
        "terrace_observation_sources",
        *_key(),
        sa.Column("spool", sa.String(16), nullable=False),
        sa.Column("highest", sa.BigInteger, nullable=False),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False),
    )
    op.create_table(
        "terrace_observation_gaps",
        *_key("first"),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False, index=True),
    )
    op.create_table(
        "terrace_observation_pictures",
        *_key("sequence"),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False, index=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )


def _key(*numbers: str) -> list[sa.Column[Any]]:
    key: list[sa.Column[Any]] = [sa.Column(name, sa.String(63), primary_key=True) for name in ("node_id", "source")]
    return [*key, *(sa.Column(name, sa.BigInteger, primary_key=True) for name in numbers)]
