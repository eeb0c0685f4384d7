"""Training batches: all images stay on the device as UINT8, and augmentation happens there.

Every random choice depends only on the seed and the number of the epoch or step. So a resumed run sees exactly the
batches of an unbroken run, and no generator state has to be saved.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.data import ImageSet
from models.training.config import TrainConfig
from tierkit.errors import DataError

__all__ = ["Batch", "BatchSource", "Statistics", "generator", "normalise", "statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Centre and spread of the UINT8 pixel values, one pair for all colours.

    With a whole number as the centre, the image as it comes is already the quantised input of the first convolution:
    zero point `mean`, scale `1 / std`. Normalisation then costs nothing and the input loses nothing in INT8.
    """

    mean: int
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's images and what is known of them."""

    images: Tensor
    """Float `[n, c, h, w]`, normalised, channels last; `c` is 3, or 1 of grey images."""
    index: Tensor
    """int64 `[n]`: numbers of these images in the data set."""
    flipped: Tensor
    """int64 `[n]`, 1 if the image was mirrored."""
    partner: Tensor
    """int64 `[n]`: position in the batch of the image mixed into this one."""
    share: Tensor
    """Float scalar in [0, 1]: share of the image itself; the partner has the rest."""


def statistics(images: np.ndarray) -> Statistics:
    """Centre and spread of UINT8 images `[n, h, w, c]`."""
    # Some images at a time: numpy counts with eight bytes for each.
    parts = np.array_split(images, max(1, images.size >> 22))
    counts = np.sum([np.bincount(part.ravel(), minlength=256) for part in parts], axis=0)
    values = np.arange(256)
    mean = round(float((counts * values).sum() / counts.sum()))
    variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
    # Images of one flat colour have no spread; dividing by one leaves them at zero.
    return Statistics(mean=mean, std=variance**0.5 or 1.0)


def normalise(images: Tensor, known: Statistics) -> Tensor:
    """UINT8 `[n, h, w, c]` to float `[n, c, h, w]` around zero with unit variance, channels last in memory."""
    # In place: `float` has made a copy.
    return images.float().sub_(known.mean).div_(known.std).permute(0, 3, 1, 2)


def generator(seed: int, number: int) -> torch.Generator:
    """The source of chance of a run's epoch (`2 * epoch`), step (`2 * step + 1`) or labels (-1)."""
    # A product with a large odd number keeps the streams of different seeds apart.
    return torch.Generator().manual_seed(seed * 2_654_435_761 + number)


class BatchSource:
    """Draws augmented batches; a step's batch depends on nothing but the configuration and the step's number.

    Raises:
        DataError: a stream has fewer batches than parts; or the images are too small for `crop_padding` or
            `early_side`.
    """

    def __init__(self, data: ImageSet, train: np.ndarray, config: TrainConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._train = torch.from_numpy(train).to(device)
        self.statistics = statistics(data.images[train])
        self._height, self._width = data.images.shape[1:3]
        border, side = config.crop_padding, min(self._height, self._width)
        if border > side // 2 or (config.early_side or 0) > side:
            raise DataError(
                f"crop_padding is {border} and early_side {config.early_side}, and the images have {self._height} x "
                f"{self._width} pixels: crop_padding may be half of a side at most, and early_side a side"
            )
        widths = ((0, 0), (border, border), (border, border), (0, 0))
        self._padded = torch.from_numpy(np.pad(data.images, widths, mode="reflect")).to(device)
        self._pass_steps = max(1, len(train) // config.batch_size)
        """Batches of one pass over the training images."""
        parts = config.all_epochs if config.stream else 1
        if parts > self._pass_steps:
            raise DataError(
                f"a stream of {len(train):,} images has {self._pass_steps:,} batches of {config.batch_size:,}, too "
                f"few for {parts:,} parts: lower epochs or batch_size"
            )
        self.steps_per_epoch = self._pass_steps // parts
        self._order: tuple[int, Tensor] | None = None
        """The latest pass, and its order."""

    def part(self, number: int, parts: int) -> BatchSource:
        """Return a source with only every `parts`-th training image, from `number` on.

        Raises:
            DataError: there are fewer images than parts.
        """
        found = copy(self)
        found._train, found._order = self._train[number::parts], None
        if not len(found._train):
            raise DataError(f"{len(self._train):,} training images cannot be cut into {parts:,} parts")
        found._pass_steps = max(1, len(found._train) // self._config.batch_size)
        return found

    def batch(self, step: int) -> Batch:
        """The batch of step `step`, counted from 0 over all epochs."""
        epoch = step // self.steps_per_epoch
        number, within = divmod(step, self._pass_steps)
        size = min(self._config.batch_size, len(self._train))
        index = self._train[self._in_order(number)[within * size : (within + 1) * size]]
        draw = generator(self._config.seed, 2 * step + 1)
        images, flipped = self._crop(index, draw)
        if self._config.contrast > 1:
            images = self._with_contrast(images, draw)
        if self._config.early_side is not None and epoch < round(self._config.early_share * self._config.all_epochs):
            images = F.interpolate(images, size=self._config.early_side, mode="bilinear", antialias=True)
        partner, share = torch.arange(len(index), device=self._device), torch.ones((), device=self._device)
        if self._config.mixup or self._config.cutmix:
            images, partner, share = self._mix(images, draw)
        return Batch(images=images, index=index, flipped=flipped, partner=partner, share=share)

    def _in_order(self, number: int) -> Tensor:
        """Positions of the training images in the order of a pass."""
        if self._order is None or self._order[0] != number:
            drawn = torch.randperm(len(self._train), generator=generator(self._config.seed, 2 * number))
            self._order = number, drawn.to(self._device)
        return self._order[1]

    def _crop(self, index: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        n, span = len(index), 2 * self._config.crop_padding + 1
        top, left = torch.randint(span, (2, n, 1), generator=draw).to(self._device)
        flipped = torch.randint(1 + self._config.mirror, (n, 1), generator=draw).to(self._device)
        if not (self._config.crop_padding or self._config.mirror):
            return normalise(self._padded[index], self.statistics), flipped[:, 0]  # whole images, five times faster
        rows = top + torch.arange(self._height, device=self._device)
        columns = torch.arange(self._width, device=self._device)
        columns = left + torch.where(flipped == 1, self._width - 1 - columns, columns)
        picked = self._padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return normalise(picked, self.statistics), flipped[:, 0]

    def _with_contrast(self, images: Tensor, draw: torch.Generator) -> Tensor:
        factor = self._config.contrast ** (2 * torch.rand(len(images), 1, 1, 1, generator=draw) - 1)
        middle = images.mean(dim=(1, 2, 3), keepdim=True)
        known = self.statistics
        darkest, brightest = (0 - known.mean) / known.std, (255 - known.mean) / known.std
        return ((images - middle) * factor.to(self._device) + middle).clamp(darkest, brightest)

    def _mix(self, images: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        cut = bool(config.cutmix) and (not config.mixup or bool(torch.rand((), generator=draw) < 0.5))
        share = _draw_beta(config.cutmix if cut else config.mixup, draw)
        partner = torch.randperm(len(images), generator=draw).to(self._device)
        if not cut:
            mixed = share * images + (1 - share) * images[partner]
            return mixed, partner, torch.tensor(share, device=self._device)
        side = (1 - share) ** 0.5
        height, width = images.shape[2:]
        top, bottom = _interval(height, side, draw)
        left, right = _interval(width, side, draw)
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images[partner][:, :, top:bottom, left:right]
        kept = 1 - (bottom - top) * (right - left) / (height * width)
        return mixed, partner, torch.tensor(kept, device=self._device)


def _draw_beta(alpha: float, draw: torch.Generator) -> float:
    # torch's own Beta sampler takes no generator.
    seed = int(torch.randint(2**31, (), generator=draw))
    return float(np.random.default_rng(seed).beta(alpha, alpha))


def _interval(length: int, side: float, draw: torch.Generator) -> tuple[int, int]:
    centre = int(torch.randint(length, (), generator=draw))
    half = round(length * side) // 2
    return max(0, centre - half), min(length, centre + half)
