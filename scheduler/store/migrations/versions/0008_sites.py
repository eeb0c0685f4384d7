"""Sites, and the sites of jobs, of results and of observations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("jobs", "results", "observations"):
        op.add_column(f"terrace_{name}", sa.Column("site", sa.String(63)))
    op.create_index("terrace_observations_by_site", "terrace_observations", ["site", "taken_at"])
    op.create_table(
        "terrace_sites",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("drained", sa.Boolean, nullable=False),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("said_by", sa.String(63), nullable=False),
    )
