"""Training runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "terrace_runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(63)),
        sa.Column("network", sa.String(200), nullable=False),
        sa.Column("strategy", sa.String(200), nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("incarnation", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("heard_at", sa.Float(53), nullable=False),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("done", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("loss", sa.Float(53)),
        sa.Column("accuracy", sa.Float(53)),
        sa.Column("worker_count", sa.Integer, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("workers", sa.Text, nullable=False),
        sa.Column("curve", sa.Text, nullable=False),
        sa.Column("result", sa.Text),
    )
    op.create_index("terrace_runs_by_time", "terrace_runs", ["created_at", "id"])
