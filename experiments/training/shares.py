"""The table of shares: where networks have their computation and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness import Table

__all__ = ["NETWORKS", "SHARES", "shares_table"]

SHARES = "shares"
"""Name of the table. It trains nothing, so it is made by itself."""
NETWORKS = ("alexnet", "wrn-16-4", "mobilenet-v1-0.5", "mnist-100")


def shares_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each network, and one for the source.

    Args:
        rows: of `experiments.training.layers.shares`.
    """
    lines = []
    for row in rows:
        line = [row["network"]]
        for unit in ("macs", "parameters"):
            convolution, dense = row[f"convolution_{unit}"], row[f"dense_{unit}"]
            line += [f"{(convolution + dense) / 1e6:,.2f}"]
            line += [f"{100 * each / (convolution + dense):.2f}" for each in (convolution, dense)]
        lines.append(line)
    lines.append(["the source (Krizhevsky 2014)", "-", "90 to 95", "5 to 10", "-", "5", "95"])
    return Table(
        headings="network | million multiply-adds of an image | in convolutions, % | in dense layers, % | "
        "million parameters | in convolutions, % | in dense layers, %",
        rows=lines,
    )
