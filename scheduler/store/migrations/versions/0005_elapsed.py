"""Deadlines and retention by elapsed time, which a clock that is set right does not change."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # Elapsed time begins with the wall clock, so what the columns held until now counts on.
    op.execute("ALTER TABLE terrace_jobs RENAME COLUMN deadline_at TO deadline_elapsed")
    for table, name, before in (
        ("terrace_jobs", "started_elapsed", "started_at"),
        ("terrace_jobs", "finished_elapsed", "finished_at"),
        ("terrace_runs", "heard_elapsed", "heard_at"),
    ):
        op.add_column(table, sa.Column(name, sa.Float(53)))
        op.execute(f"UPDATE {table} SET {name} = {before}")
