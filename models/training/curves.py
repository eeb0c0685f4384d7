"""Loss and accuracy of a run, drawn over its epochs."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from models.training.record import TrainingRecord
from tierkit.atomic import write_atomically

__all__ = ["draw_curves"]


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
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    write_atomically(path, picture.getvalue())
