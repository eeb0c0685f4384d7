"""Labels of people, agreement of audited pictures, and improvements."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("terrace_observations", sa.Column("agrees", sa.Boolean))
    audited = sa.text("agrees IS NOT NULL")
    op.create_index(
        "terrace_observations_audited",
        "terrace_observations",
        ["received"],
        sqlite_where=audited,
        postgresql_where=audited,
    )
    op.add_column("terrace_observation_pictures", sa.Column("useful", sa.Float(53)))
    op.create_index(
        "terrace_observation_pictures_by_use",
        "terrace_observation_pictures",
        ["useful", "node_id", "source", "sequence"],
    )
    op.create_table(
        "terrace_labels",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("node_id", sa.String(63), nullable=False),
        sa.Column("source", sa.String(63), nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("label", sa.Integer),
        sa.Column("hierarchy", sa.String(64), nullable=False),
        sa.Column("said_by", sa.String(63)),
        sa.Column("said_at", sa.Float(53), nullable=False),
        sa.Column("current", sa.Boolean, nullable=False),
        sa.Column("stored_elapsed", sa.Float(53), nullable=False),
    )
    op.create_index("terrace_labels_of_picture", "terrace_labels", ["node_id", "source", "sequence", "current"])
    op.create_index("terrace_labels_of_node", "terrace_labels", ["node_id", "number"])
    op.create_index("ix_terrace_labels_stored_elapsed", "terrace_labels", ["stored_elapsed"])
    op.create_table(
        "terrace_improvements",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("said_by", sa.String(63)),
        sa.Column("content", sa.Text, nullable=False),
    )
