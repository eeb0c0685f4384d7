"""Releases, the changes from one to another, and copies of the files of networks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "terrace_releases",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("tuning", sa.Text),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("probes", sa.Text),
    )
    op.create_table(
        "terrace_rollouts",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("trial", sa.Text),
    )
    op.create_table(
        "terrace_networks",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
