"""The subjects and results of an audit, and the rule for the attacks that count. Pure; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict

from models.manifest import ModelEntry
from tierkit.types import EncoderKind, Privacy

__all__ = ["PROVEN_SSIM", "Row", "Subject", "counts", "interval_of", "strongest"]

PROVEN_SSIM = 0.9
"""An attack that does not get so far against a first convolution proves nothing where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One target of the attacks: a form of an encoder, or pixels."""

    kind: EncoderKind | None
    """None: pixels are sent."""
    network: ModelEntry
    form: str

    @property
    def encoder(self) -> str:
        """Name of the encoder in the rows."""
        return self.kind or Privacy.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack on one encoder of one network; one entry of `terrace privacy audit --json`."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    encoder: str
    """`none` (pixels), `conv1` or `bottleneck`."""
    network: str
    """Name of the network behind the encoder."""
    form: str
    """Form that is sent: `pixels`, or features in `uint8`, `float16` or `float32`."""
    attack: str
    """`none` where pixels are sent, `least-squares`, `optimisation`, `black-box` or `query-free`."""
    ssim: float
    """Mean over the images."""
    psnr_db: float | None
    """Value over all images together; None if the reconstructions equal the images, pixel by pixel."""
    recognised: float
    """Top-1 accuracy of `judge` on the reconstructions."""
    recognised_low: float
    """Lower end of the 95 % interval of `recognised`."""
    recognised_high: float
    """95 % interval of `recognised`: other pictures would give other shares."""
    recognised_originals: float
    """Top-1 accuracy of `judge` on the original images."""
    judge: str
    """A network that had no part in the attack."""
    fine_accuracy: float
    """Accuracy of the network behind the encoder, on `test_images` images."""
    accuracy_lost: float
    """Accuracy of the same network on the pixels of these images, minus `fine_accuracy`."""
    test_images: int
    """Test images on which `fine_accuracy` was measured."""
    payload_bytes: float
    """Mean per image, as sent: after packing and entropy coding, in tasks of 50."""
    device_ms_per_image: float
    """Head and packing on one thread, in tasks of 50; 0 for pixels."""
    images: int
    """Test images that were attacked."""
    effort: str
    """Effort of the attacker: pictures, queries, steps."""
    seconds: float
    """Processor time of the attack, its training included."""
    counts: bool = True
    """True if the same code reached `PROVEN_SSIM` against the network's first convolution."""


def counts(row: Row, rows: Iterable[Row]) -> bool:
    """True if a low figure of this attack is evidence about the encoder. For that, the same attack must have reached
    `PROVEN_SSIM` on the same network's first convolution, in any form. If pixels are sent there is nothing to prove."""
    if row.encoder == Privacy.NONE:
        return True
    return any(
        other.ssim >= PROVEN_SSIM
        for other in rows
        if (other.encoder, other.network, other.attack) == (EncoderKind.CONV1, row.network, row.attack)
    )


def strongest(rows: Sequence[Row], encoder: str, network: str, *, by: Literal["ssim", "recognised"] = "ssim") -> Row:
    """The attack that got most out of an encoder; what is got is got, so attacks that do not count take part.

    Raises:
        ValueError: there is no row of this encoder and network.
    """
    own = (row for row in rows if (row.encoder, row.network) == (encoder, network))
    return max(own, key=lambda row: row.ssim if by == "ssim" else row.recognised)


def interval_of(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was seen in `count` independent tries (E. B. Wilson, Probable inference, the
    law of succession, and statistical inference, JASA 22, 1927)."""
    z2 = 1.959964**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * (share * (1 - share) / count + z2 / (4 * count**2))) / (1 + z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)
