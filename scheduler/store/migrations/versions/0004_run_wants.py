"""The workers that a training run wants, and further addresses of its host."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for name, nothing in (("more_urls", "[]"), ("wants", "{}")):
        op.add_column("terrace_runs", sa.Column(name, sa.Text, nullable=False, server_default=nothing))
