"""The attack of whoever neither holds the head's weights nor can query it: a head of one's own in its place.

He et al., Model inversion attacks against collaborative inference, 2019, section 4.3: an attacker who holds the tail
trains a head on pictures of its own so that the tail answers right, and inverts that one. Here the attacker also uses
what it has seen arrive from others: the values of its own head are to be spread as those are. Neither the pictures
behind them nor any answer of the head are needed for that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encryption.audit.onnx_torch import OnnxNetwork
from tierkit.model import Array

__all__ = ["Imitation", "train_surrogate"]

_BATCH, _ANSWERED = 64, 32
_DIRECTIONS, _SAMPLES = 64, 4096
_SIDES = (1, 3, 5)
_RATE = 0.1
"""Of a weight's own size, per step at first."""

Imitate = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """How long the attacker's own head is trained."""

    steps: int
    answered_every: int
    """Each so many steps it is also asked for right answers of the tail, which costs more than all the rest."""


def train_surrogate(
    surrogate: OnnxNetwork,
    tail: OnnxNetwork,
    imitate: Imitate,
    images: Array,
    labels: Array,
    overheard: Array,
    imitation: Imitation,
    seed: int,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Train the attacker's own head in place.

    Args:
        surrogate: with weights drawn at random.
        tail: with its weights.
        imitate: what the way does to features; it can be seen on any that arrive.
        images: the attacker's own, UINT8 `[n, h, w, 3]`.
        labels: fine labels of them, int64 `[n]`.
        overheard: what arrived from others, FP32 `[m, c, h, w]`.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    seen = torch.from_numpy(overheard)
    spread = seen.std(dim=(0, 2, 3), keepdim=True)[0].clamp_min(1e-6)
    seen = seen / spread
    _begin(surrogate, images[:256], seen.mean(dim=(0, 2, 3)) * spread[:, 0, 0], spread[:, 0, 0])
    groups = []
    for weight, bias in surrogate.weights():
        size = float(weight.std())
        groups += [{"params": [part], "lr": _RATE * size} for part in (weight, bias) if part is not None]
        weight.requires_grad_()
        if bias is not None:
            bias.requires_grad_()
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=imitation.steps + 1, pct_start=0.1
    )
    for step in range(imitation.steps):
        drawn = rng.integers(len(images), size=_BATCH)
        own = imitate(surrogate(torch.from_numpy(images[drawn]).float()))
        others = seen[torch.from_numpy(rng.integers(len(seen), size=_BATCH))]
        loss = sum((_distance(own / spread, others, side) for side in _SIDES), torch.zeros(()))
        if step % imitation.answered_every == 0:
            few = slice(0, _ANSWERED)
            with torch.autocast("cpu", torch.bfloat16):
                answers = tail(own[few])
            loss = loss + 0.1 * F.cross_entropy(answers.float(), torch.from_numpy(labels[drawn[few]]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        tell(step + 1, imitation.steps)
    surrogate.requires_grad_(False)


def _begin(surrogate: OnnxNetwork, images: Array, mean: Tensor, spread: Tensor) -> None:
    """Give the last layer's channels the means and deviations that were seen."""
    weight, bias = surrogate.weights()[-1]
    with torch.no_grad():
        features = surrogate(torch.from_numpy(images).float())
        gain = spread / features.std(dim=(0, 2, 3)).clamp_min(1e-6)
        weight.mul_(gain[:, None, None, None])
        if bias is not None:
            bias.copy_(mean - gain * features.mean(dim=(0, 2, 3)) + gain * bias)


def _distance(own: Tensor, others: Tensor, side: int) -> Tensor:
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
