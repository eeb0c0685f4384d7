"""The lease of the leading scheduler; the secret and the inputs, which all schedulers of a database share."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("DELETE FROM terrace_properties WHERE name = 'schema_version'")
    lease = op.create_table(
        "terrace_lease",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("awaited_until", sa.Float(53), nullable=False),
        sa.Column("commits", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(
        lease,
        [{"id": 1, "epoch": 0, "url": "", "expires_at": 0.0, "awaited_until": 0.0, "commits": 0}],
    )
    op.create_table(
        "terrace_inputs",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("part", sa.Integer, primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
