"""Attacks of an adversary that has the head's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from encryption.audit.similarity import mean_ssim
from encryption.audit.target import Target
from models.training.onnx_network import OnnxNetwork
from tierkit.tensors import Array

__all__ = ["PRIORS", "Arrived", "Search", "is_linear", "least_squares", "optimise", "total_variation"]

_GREY = 127.5
_PIXEL_DEVIATION = 8.0
"""Assumed deviation of pixels (0 to 255) from grey where the features reveal little. Pictures deviate more, but a
convolution hides fine detail, of which there is little."""
PRIORS = (1e-3, 1e-2, 1e-1)
"""Weights of the total variation that are tried; the error of the features is a share of their variance."""
_RATE = 0.05

Tell = Callable[[int, int], None]


def is_linear(head: OnnxNetwork, shape: Sequence[int]) -> bool:
    """True if the features of a mean of two images are the mean of their features.

    Args:
        shape: height, width and colours.
    """
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.uniform(0, 255, (1, *shape)).astype(np.float32)) for _ in range(2))
    with torch.inference_mode():
        middle, ends = head((a + b) / 2), (head(a) + head(b)) / 2
    return bool((middle - ends).abs().max() <= 1e-4 * ends.abs().max())


def least_squares(
    head: OnnxNetwork, target: Target, sent: Array, steps: int, tell: Tell = lambda done, of: None
) -> Array:
    """Return the images whose features are nearest to the received ones. Only with a linear head.

    Values at the ends of the range may have been clipped, so they are left out: each of the others gives a linear
    equation. The conjugate gradient method solves the normal equations. A slight pull to grey stands for the knowledge
    of pictures and of the rounding: one equation of weight `(deviation of the target / 8)^2` per pixel.

    Args:
        head: the target's head, with its weights.
        sent: FP32 `[n, c, h, w]`.
        steps: number of steps of the conjugate gradient method.

    Returns:
        UINT8 `[n, h, w, 3]`.
    """
    wanted, shape, bounds = torch.from_numpy(sent), target.head.entry.input_shape, target.bounds
    known = torch.ones_like(wanted)
    if bounds is not None:
        margin = 1e-6 * (bounds[1] - bounds[0])
        known = ((wanted > bounds[0] + margin) & (wanted < bounds[1] - margin)).float()
    grey = torch.full((len(sent), *shape), _GREY)
    with torch.no_grad():
        offset = head(torch.zeros(1, *shape))
        missing = known * (wanted - head(grey))
    pull = (target.deviation / _PIXEL_DEVIATION) ** 2

    def transposed(features: Tensor) -> Tensor:
        images = torch.zeros_like(grey, requires_grad=True)
        return torch.autograd.grad((head(images) * features).sum(), images)[0]

    def apply(images: Tensor) -> Tensor:
        with torch.no_grad():
            features = known * (head(images) - offset)
        return transposed(features) + pull * images

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=(1, 2, 3), keepdim=True)

    change = torch.zeros_like(grey)
    rest = transposed(missing)
    towards = rest
    squared = dot(rest, rest)
    for step in range(steps):
        applied = apply(towards)
        length = squared / dot(towards, applied).clamp_min(1e-30)
        change = change + length * towards
        rest = rest - length * applied
        squared, before = dot(rest, rest), squared
        towards = rest + squared / before.clamp_min(1e-30) * towards
        tell(step + 1, steps)
    return _pixels(grey + change)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Length of the search by optimisation."""

    steps: int
    own_images: int
    """The attacker's own pictures, on which every setting is tried with half the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Features of some images, as they arrived."""

    features: Array
    """FP32 `[n, c, h, w]`."""
    starts: Mapping[str, Array]
    """Images UINT8 `[n, h, w, 3]` to start from, by name; grey is always tried."""

    def start(self, name: str, shape: Sequence[int]) -> Array:
        """The start of this name."""
        grey = np.full((len(self.features), *shape), round(_GREY), dtype=np.uint8)
        return self.starts.get(name, grey)


def optimise(
    target: Target,
    arrived: Arrived,
    own: tuple[Array, Arrived],
    search: Search,
    tell: Tell = lambda done, of: None,
) -> tuple[Array, str]:
    """The images whose features, sent the same way, are nearest to those that arrived, among plausible ones.

    Adam on the pixels minimises the squared error of the features plus a weight times the total variation
    (He et al., Model inversion attacks against collaborative inference, 2019, section 4.1). Start and weight are those
    with the best SSIM on the attacker's own images, of which it knows both sides.

    Args:
        target: with the head's weights; gradients pass through its rounding.
        own: images that the attacker knows, UINT8 `[n, h, w, 3]`, and what arrived of them.

    Returns:
        UINT8 `[n, h, w, 3]`, and the setting that was chosen, in words.
    """
    head, (images, own_arrived) = target.open_head(), own
    settings = list(product(("grey", *arrived.starts), PRIORS))
    half = search.steps // 2
    in_all = half * len(settings) * len(images) + search.steps * len(arrived.features)
    done = 0

    def told(images: int) -> Callable[[], None]:
        def step() -> None:
            nonlocal done
            done += images
            tell(done, in_all)

        return step

    def inverted(sent: Arrived, name: str, prior: float, steps: int) -> Array:
        start = sent.start(name, images.shape[1:])
        wanted = torch.from_numpy(sent.features)
        variance = wanted.var().clamp_min(1e-12)

        def loss(pixels: Tensor) -> Tensor:
            error = (target.imitate(head(255 * pixels)) - wanted).square().mean(dim=(1, 2, 3)) / variance
            return (error + prior * total_variation(pixels)).sum()

        return _descend(loss, start, steps, told(len(start)))

    tried = [mean_ssim(images, inverted(own_arrived, name, prior, half)) for name, prior in settings]
    name, prior = settings[int(np.argmax(tried))]
    return inverted(arrived, name, prior, search.steps), f"from {name}, total variation {prior:g}"


def _descend(loss: Callable[[Tensor], Tensor], start: Array, steps: int, told: Callable[[], None]) -> Array:
    """Minimise a loss of pixels in [0, 1].

    Args:
        start: UINT8 `[n, h, w, 3]`.
    """
    images = (torch.from_numpy(start).float() / 255).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        (images.grad,) = torch.autograd.grad(loss(images), images)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
        told()
    return _pixels(255 * images.detach())


def total_variation(images: Tensor) -> Tensor:
    """Mean length of the step from a pixel to its neighbours, `[n]`, of `[n, h, w, c]`."""
    down, right = images[:, 1:, :-1] - images[:, :-1, :-1], images[:, :-1, 1:] - images[:, :-1, :-1]
    return (down.square() + right.square() + 1e-6).sqrt().mean(dim=(1, 2, 3))


def _pixels(images: Tensor) -> Array:
    return np.asarray(images.round().clamp(0, 255).to(torch.uint8).numpy())
