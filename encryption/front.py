"""The trade between what an encoder gives away, what it costs and how well the network behind it answers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from tierkit.atomic import write_atomically
from tierkit.documents import Frozen

__all__ = ["Front", "Setting", "save_front", "undominated"]


class Setting(Frozen):
    """One encoder, trained and measured."""

    name: str
    """Name of the configuration."""
    ssim: float
    """SSIM of the strongest attack: mean over the attacked images."""
    attack: str
    """Name of that attack."""
    fine_accuracy: float
    payload_bytes: float
    """Mean per image as sent, in tasks of 50."""
    device_ms_per_image: float
    """Head and packing on one thread, in tasks of 50."""
    channels: int
    levels: int
    noise: float
    adversary_weight: float
    minutes: float
    """Minutes of training, including the run that it started from."""


class Front(Frozen):
    """All settings of one upper network, measured in one go, to find the Pareto front of them."""

    network: str
    plain_accuracy: float
    """Fine accuracy of the same upper network on pixels."""
    end_ms_per_image: float
    """Milliseconds per image of the end tier's own network on the same machine, with one thread, in tasks of 50."""
    end_network: str
    attacked_images: int
    effort: str
    """Effort of the attackers."""
    hardware: str
    settings: tuple[Setting, ...]


def undominated(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The Pareto front of SSIM and accuracy: the settings than which no other is at least as good in both and better in
    one; by SSIM."""

    def beaten(one: Setting) -> bool:
        return any(
            other.ssim <= one.ssim
            and other.fine_accuracy >= one.fine_accuracy
            and (other.ssim, other.fine_accuracy) != (one.ssim, one.fine_accuracy)
            for other in settings
        )

    return tuple(sorted((one for one in settings if not beaten(one)), key=lambda one: one.ssim))


def save_front(front: Front, folder: Path) -> list[Path]:
    """Write `front.csv` and `front.svg` into `folder`; returns their paths.

    Raises:
        SetupError: a file could not be written; the old ones are whole.
    """
    table = io.StringIO()
    writer = csv.DictWriter(table, [*Setting.model_fields, "on_front"], lineterminator="\n")
    writer.writeheader()
    best = {one.name for one in undominated(front.settings)}
    writer.writerows({**one.model_dump(), "on_front": int(one.name in best)} for one in front.settings)
    files = {folder / "front.csv": table.getvalue().encode(), folder / "front.svg": _draw(front)}
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _draw(front: Front) -> bytes:
    best = undominated(front.settings)
    title = _finding(front, best)
    with rc_context({"font.size": 10, "svg.hashsalt": "terrace"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([one.ssim for one in best], [100 * one.fine_accuracy for one in best], "-", color="0.7", zorder=1)
        ordered = sorted(front.settings, key=lambda each: each.ssim)
        middle = (ordered[0].ssim + ordered[-1].ssim) / 2 if ordered else 0.0
        for place, one in enumerate(ordered):
            above = place % 2 == 1  # neighbours' names stand apart
            right = one.ssim > middle  # names stay within the axes
            axes.plot(one.ssim, 100 * one.fine_accuracy, "o", color="#0072B2" if one in best else "0.6", zorder=2)
            axes.annotate(
                f"{one.name}\n{one.payload_bytes:.0f} B, {_relative(one, front)} of the end network's time",
                (one.ssim, 100 * one.fine_accuracy),
                textcoords="offset points",
                xytext=(-6 if right else 6, 8 if above else -11),
                ha="right" if right else "left",
                va="bottom" if above else "top",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over lines
                zorder=3,
            )
        axes.axhline(100 * front.plain_accuracy, color="#D55E00", linewidth=1, linestyle="--")
        axes.annotate(
            f"{front.network} on pixels",
            (1, 100 * front.plain_accuracy),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(-4, 4),
            ha="right",
            color="#D55E00",
        )
        axes.set_xlabel(f"SSIM of the strongest attack on {front.attacked_images} held-out images (lower hides more)")
        axes.set_ylabel("fine accuracy on held-out images, %")
        axes.set_title(title)
        axes.margins(x=0.4, y=0.25)
        axes.grid(alpha=0.3)
        buffer = io.BytesIO()
        # Without the date, the same figures give the same file.
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title, "Description": _words(front)})
    return buffer.getvalue()


def _relative(one: Setting, front: Front) -> str:
    return f"{one.device_ms_per_image / front.end_ms_per_image:.2f}"


def _finding(front: Front, best: Sequence[Setting]) -> str:
    """The trade in one line: the setting that hides most, against the setting that answers best."""
    if not best:
        return f"Learned encoders of {front.network}"
    most, dearest = best[0], best[-1]
    lost = [100 * (front.plain_accuracy - one.fine_accuracy) for one in (most, dearest)]
    if most == dearest:
        return f"{most.name} loses {lost[0]:.1f} points at SSIM {most.ssim:.2f}"
    return f"SSIM {most.ssim:.2f} costs {lost[0]:.1f} points of accuracy, SSIM {dearest.ssim:.2f} costs {lost[1]:.1f}"


def _words(front: Front) -> str:
    """The plot in words."""
    points = "; ".join(
        f"{one.name}: SSIM {one.ssim:.3f}, {100 * one.fine_accuracy:.1f} %, {one.payload_bytes:.0f} bytes, "
        f"{_relative(one, front)} of the time of {front.end_network}"
        for one in front.settings
    )
    return (
        f"Fine accuracy against SSIM of the strongest attack, for learned encoders of {front.network}, which has "
        f"{100 * front.plain_accuracy:.1f} % on pixels. {points}"
    )
