"""The curves of a run: loss and accuracy over its epochs; of a run on many machines more, over seconds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from models.training.record import TrainingRecord
from tierkit.atomic import write_atomically

__all__ = ["draw_curves", "draw_run"]

_OF_RUN = (
    {"loss": "tab:gray"},
    {"accuracy": "tab:blue"},
    {"bytes_sent": "tab:orange", "bytes_received": "tab:green"},
    {"staleness": "tab:red"},
)
"""Values in the rows of the plot of a run, and their colours."""


def draw_curves(record: TrainingRecord, path: Path) -> None:
    """Write a PNG: training loss on the left, held-out accuracy on the right.

    Raises:
        SetupError: it could not be written.
    """
    rows = record.epochs
    epochs = [row["epoch"] for row in rows]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    loss.plot(epochs, [row["loss"] for row in rows], color="tab:gray", marker=".")
    loss.set(xlabel="epoch", ylabel="training loss", title=f"{record.config.name}, {record.minutes:.0f} min")
    accuracy.plot(epochs, [row["held_out_coarse"] for row in rows], color="tab:blue", marker=".", label="coarse")
    if record.config.target == "fine":
        accuracy.plot(epochs, [row["held_out_fine"] for row in rows], color="tab:orange", marker=".", label="fine")
    accuracy.set(xlabel="epoch", ylabel="held-out accuracy", ylim=(0, 1))
    accuracy.legend(loc="lower right")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, path)


def draw_run(points: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of a run on many machines: loss, held-out accuracy, bytes and staleness, over seconds on the left and
    over updates on the right.

    Args:
        points: dumped from `training.host.curves.RunPoint`; missing values are left out.

    Raises:
        SetupError: it could not be written.
    """
    figure = Figure(figsize=(9, 9), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(4, 2, sharex="col", sharey="row")
    for column, (place, label) in enumerate((("seconds", "seconds"), ("updates", "updates"))):
        for row, curves in enumerate(_OF_RUN):
            for name, colour in curves.items():
                shown = [each for each in points if each[name] is not None]
                values = [each[name] / (1e6 if name.startswith("bytes") else 1) for each in shown]
                axes[row][column].plot(
                    [each[place] for each in shown], values, color=colour, marker=".", label=name.replace("_", " ")
                )
            axes[row][column].grid(alpha=0.3)
            axes[row][column].set_ylim(0, 1 if "accuracy" in curves else None)
        axes[-1][column].set_xlabel(label)
    for row, label in enumerate(("training loss", "held-out accuracy", "MB", "staleness")):
        axes[row][0].set_ylabel(label)
    axes[2][0].legend(loc="upper left")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())
