"""Attack by an adversary that has neither the head's weights nor queries: it trains a surrogate head.

He et al., Model inversion attacks against collaborative inference, 2019, section 4.3: an attacker who holds the tail
trains a head on its own pictures and inverts that head. Here the surrogate is trained so that the tail answers the
class of each picture, and so that its values are spread like the received features. It needs neither the pictures
behind these features nor any answer of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encryption.audit.target import Target
from models.data import ImageSet
from models.training.onnx_network import OnnxNetwork
from tierkit.tensors import Array

__all__ = ["Overheard", "train_surrogate"]

_CLASSES, _OF_EACH = 8, 16
"""Classes of the pictures of each step, and pictures of each class."""
_WEIGHT = 20.0
"""Weight of the classes' means in the loss; their differences are small compared with the spread within a class."""
_SPREAD_IMAGES = 64
_DIRECTIONS, _SAMPLES = 64, 4096
_SIDES = (1, 3)
_RATE = 0.1
"""Initial step size, as a share of the size of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheard:
    """Features that arrived from others, and how to train a surrogate on them."""

    features: Array
    """Some of the features that arrived from others, FP32 `[m, c, h, w]`."""
    means: Array
    """Mean of the features that arrived for each class, FP32 `[classes, c, h, w]`."""
    steps: int
    seed: int


def train_surrogate(
    surrogate: OnnxNetwork,
    target: Target,
    own: ImageSet,
    overheard: Overheard,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Train the attacker's own head in place.

    Args:
        surrogate: with weights drawn at random.
        target: only its form is known, which can be seen on any features that arrive.
        own: the attacker's pictures, with fine labels.
    """
    rng = np.random.default_rng(overheard.seed)
    torch.manual_seed(overheard.seed)
    images, labels, steps = own.images, own.fine, overheard.steps
    assert labels is not None
    seen, wanted = torch.from_numpy(overheard.features), torch.from_numpy(overheard.means)
    spread = seen.std(dim=(0, 2, 3), keepdim=True)[0].clamp_min(1e-6)
    _begin(surrogate, images[:256], seen.mean(dim=(0, 2, 3)), spread[:, 0, 0])
    members = {int(label): np.flatnonzero(labels == label) for label in np.unique(labels)}
    groups = []
    for part in (part for layer in surrogate.layers() for part in layer.parameters):
        groups.append({"params": [part.requires_grad_()], "lr": _RATE * max(float(part.detach().std()), 1e-3)})
    optimizer = torch.optim.Adam(groups)
    rates = [group["lr"] for group in groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.1)
    for step in range(steps):
        classes = rng.choice(list(members), size=min(_CLASSES, len(members)), replace=False)
        drawn = np.stack([rng.choice(members[int(label)], size=_OF_EACH) for label in classes])
        given = target.imitate(surrogate(torch.from_numpy(images[drawn.ravel()]).float())) / spread
        loss = _WEIGHT * _unlike(given.unflatten(0, drawn.shape), wanted[torch.from_numpy(classes)] / spread)
        some = torch.from_numpy(rng.integers(len(given), size=_SPREAD_IMAGES))
        others = seen[torch.from_numpy(rng.integers(len(seen), size=_SPREAD_IMAGES))] / spread
        for side in _SIDES:
            loss = loss + _apart(given[some], others, side)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tell(step + 1, steps)
    surrogate.requires_grad_(False)


def _begin(surrogate: OnnxNetwork, images: Array, mean: Tensor, spread: Tensor) -> None:
    """Give the last layer's channels the means and deviations that were seen."""
    weight, bias = surrogate.layers()[-1].weight, surrogate.layers()[-1].bias
    with torch.no_grad():
        features = surrogate(torch.from_numpy(images).float())
        gain = spread / features.std(dim=(0, 2, 3)).clamp_min(1e-6)
        weight.mul_(gain[:, None, None, None])
        if bias is not None:
            bias.copy_(mean - gain * features.mean(dim=(0, 2, 3)) + gain * bias)


def _unlike(own: Tensor, wanted: Tensor) -> Tensor:
    """Squared distance of the classes' mean features from those wanted, with no bias by the few images of each: the
    product of the distances of two halves.

    Args:
        own: `[classes, images, c, h, w]`.
        wanted: `[classes, c, h, w]`.
    """
    first, second = (half.mean(dim=1) - wanted for half in own.chunk(2, dim=1))
    return (first * second).mean()


def _apart(own: Tensor, others: Tensor, side: int) -> Tensor:
    """Sliced Wasserstein distance (Bonneel et al., 2015) between the neighbourhoods of `side` x `side` positions: the
    mean squared difference of the sorted values along directions drawn at random, many of them of few channels."""
    channels = own.shape[1]
    directions = torch.randn(_DIRECTIONS, channels, side, side)
    directions *= torch.rand(_DIRECTIONS, channels, 1, 1) < torch.rand(_DIRECTIONS, 1, 1, 1) ** 2
    directions /= directions.flatten(1).norm(dim=1).clamp_min(1e-6)[:, None, None, None]
    values = []
    for features in (own, others):
        along = F.conv2d(features, directions).transpose(0, 1).flatten(1)
        drawn = torch.randint(along.shape[1], (_SAMPLES,))
        values.append(along[:, drawn].sort(dim=1)[0])
    return (values[0] - values[1]).square().mean()
