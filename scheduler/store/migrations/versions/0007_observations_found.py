"""Observations found by class, by time and by source; the rights of sources."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_PART = 1000


def upgrade() -> None:
    table = "terrace_observations"
    op.execute(f"ALTER TABLE {table} RENAME COLUMN label TO fine_label")
    op.add_column(table, sa.Column("coarse_label", sa.Integer))
    op.execute(f"UPDATE {table} SET coarse_label = fine_label, fine_label = NULL WHERE tier = 'end'")
    _read_superclasses()
    op.create_index("terrace_observations_by_time", table, ["taken_at"])
    op.create_index("terrace_observations_by_source", table, ["node_id", "source", "taken_at"])
    op.create_index("terrace_observations_by_coarse", table, ["coarse_label", "taken_at"])
    op.create_index("terrace_observations_by_fine", table, ["fine_label", "taken_at"])
    op.create_table(
        "terrace_source_rights",
        *(sa.Column(name, sa.String(63), primary_key=True) for name in ("name", "node_id", "source")),
        sa.Column("owner", sa.Boolean, nullable=False),
    )


def _read_superclasses() -> None:
    """The superclass that an upstream node's answer adds up to was only in the JSON of the row."""
    connection = op.get_bind()
    observations = sa.table("terrace_observations", *map(sa.column, ("received", "tier", "content", "coarse_label")))
    number = observations.c.received
    rows = sa.select(number, observations.c.content).where(observations.c.tier != "end").order_by(number).limit(_PART)
    change = (
        observations.update()
        .where(number == sa.bindparam("its_number"))
        .values(coarse_label=sa.bindparam("its_superclass"))
    )
    last = -1
    while found := connection.execute(rows.where(number > last)).all():
        values = [
            {"its_number": row.received, "its_superclass": json.loads(row.content)["finer"]["coarse_label"]}
            for row in found
        ]
        connection.execute(change, values)
        last = found[-1].received
