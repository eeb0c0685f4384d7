"""Workers that a training run lacks before it hands out work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("terrace_runs", sa.Column("missing", sa.Integer))
