"""Jobs, attempts, results, classes, known nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "terrace_properties",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(256), nullable=False),
    )
    op.create_table(
        "terrace_hierarchies",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_table(
        "terrace_nodes",
        sa.Column("id", sa.String(63), primary_key=True),
        sa.Column("registration", sa.Text, nullable=False),
        sa.Column("drained", sa.Boolean, nullable=False),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("trusted", sa.Boolean),
        sa.Column("said_by", sa.String(63), nullable=False),
    )
    op.create_table(
        "terrace_jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(200)),
        sa.Column("owner", sa.String(63)),
        sa.Column("state", sa.String(16), nullable=False, index=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("images", sa.Integer, nullable=False),
        sa.Column("tasks", sa.Integer, nullable=False),
        sa.Column("input_sha256", sa.String(64), nullable=False),
        sa.Column("hierarchy", sa.String(64)),
        sa.Column("labels", sa.LargeBinary),
        sa.Column("names", sa.Text),
        sa.Column("resized", sa.Text),
        sa.Column("damaged", sa.Text),
        sa.Column("resized_images", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String(255), unique=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("traceparent", sa.String(55)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("deadline_at", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53)),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("summary", sa.Text),
    )
    op.create_table(
        "terrace_attempts",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("terrace_jobs.id"), primary_key=True),
        sa.Column("task", sa.Integer, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("node_id", sa.String(63), nullable=False),
        sa.Column("incarnation", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(8), nullable=False),
        sa.Column("upstream", sa.String(63)),
        sa.Column("stage", sa.String(8), nullable=False),
        sa.Column("hedge", sa.Boolean, nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "terrace_results",
        sa.Column("job_id", sa.String(32), sa.ForeignKey("terrace_jobs.id"), primary_key=True),
        sa.Column("task", sa.Integer, primary_key=True),
        sa.Column("stage", sa.String(8), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False, unique=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("ms", sa.Float(53), nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
    )
    op.create_index("terrace_results_by_job", "terrace_results", ["job_id", "seq"])
