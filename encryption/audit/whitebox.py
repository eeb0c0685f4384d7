"""Attacks by someone who holds the head's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from encryption.audit.onnx_torch import OnnxNetwork
from encryption.audit.similarity import mean_ssim
from tierkit.tensors import Array

__all__ = ["PRIORS", "Search", "is_linear", "least_squares", "optimise", "total_variation"]

_GREY = 127.5
_PIXEL_DEVIATION = 8.0
"""How far from grey pixels are taken to be where the features say little, of 0 to 255. Pictures reach farther, but what
a convolution hides is fine detail, of which there is little."""
PRIORS = (1e-3, 1e-2, 1e-1)
"""Weights of the total variation that are tried; the error of the features is a share of their variance."""
_RATE = 0.05

Tell = Callable[[int, int], None]
Imitate = Callable[[Tensor], Tensor]


def is_linear(head: OnnxNetwork, shape: Sequence[int]) -> bool:
    """Whether the features of a mean of two images are the mean of their features.

    Args:
        shape: height, width and colours.
    """
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.uniform(0, 255, (1, *shape)).astype(np.float32)) for _ in range(2))
    with torch.inference_mode():
        middle, ends = head((a + b) / 2), (head(a) + head(b)) / 2
    return bool((middle - ends).abs().max() <= 1e-4 * ends.abs().max())


def least_squares(
    head: OnnxNetwork,
    sent: Array,
    shape: Sequence[int],
    *,
    bounds: tuple[float, float] | None,
    noise: float,
    steps: int,
    tell: Tell = lambda done, of: None,
) -> Array:
    """The images whose features are nearest to those that arrived, where the head is linear.

    Values at the ends of the range may have been cut off, so they are left out: each of the others gives a linear
    equation. The conjugate gradient method solves the normal equations, with a slight pull to grey that stands for what
    is known of pictures and of the rounding: one equation of weight `(noise / 8)^2` for each pixel.

    Args:
        sent: FP32 `[n, c, h, w]`.
        shape: height, width and colours of the images.
        bounds: lowest and highest value that can arrive.
        noise: standard deviation of what rounding and the device's own noise add to a feature.
        steps: of the conjugate gradient method.

    Returns:
        UINT8 `[n, h, w, 3]`.
    """
    wanted = torch.from_numpy(sent)
    known = torch.ones_like(wanted)
    if bounds is not None:
        margin = 1e-6 * (bounds[1] - bounds[0])
        known = ((wanted > bounds[0] + margin) & (wanted < bounds[1] - margin)).float()
    grey = torch.full((len(sent), *shape), _GREY)
    with torch.no_grad():
        offset = head(torch.zeros(1, *shape))
        missing = known * (wanted - head(grey))
    pull = (noise / _PIXEL_DEVIATION) ** 2

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
    """How long the optimisation searches."""

    steps: int
    own_images: int
    """The attacker's own pictures, on which every setting is tried with half the steps."""


def optimise(
    head: OnnxNetwork,
    imitate: Imitate,
    sent: Array,
    starts: dict[str, Array],
    own: Array,
    own_sent: Array,
    own_starts: dict[str, Array],
    search: Search,
    tell: Tell = lambda done, of: None,
) -> tuple[Array, str]:
    """The images whose features, sent the same way, are nearest to those that arrived, among plausible ones.

    Adam on the pixels makes the squared error of the features plus a weight times the total variation small
    (He et al., Model inversion attacks against collaborative inference, 2019, section 4.1). Where it starts and the
    weight are those with the best SSIM on the attacker's own images, of which it knows both sides.

    Args:
        head: with its weights; gradients pass through its rounding.
        imitate: what the way does to features.
        sent: FP32 `[n, c, h, w]`.
        starts: images UINT8 `[n, h, w, 3]` to start from, by name; grey is always tried.
        own, own_sent, own_starts: the same for images that the attacker knows.

    Returns:
        UINT8 `[n, h, w, 3]`, and the setting that was chosen, in words.
    """
    shape = own.shape[1:]
    settings = list(product(("grey", *starts), PRIORS))
    half = search.steps // 2
    in_all = half * len(settings) * len(own) + search.steps * len(sent)
    done = 0

    def told(images: int) -> Callable[[], None]:
        def step() -> None:
            nonlocal done
            done += images
            tell(done, in_all)

        return step

    def begin(name: str, given: dict[str, Array], count: int) -> Array:
        return given[name] if name in given else np.full((count, *shape), round(_GREY), dtype=np.uint8)

    tried = []
    for name, prior in settings:
        found = _descend(head, imitate, own_sent, begin(name, own_starts, len(own)), prior, half, told(len(own)))
        tried.append(mean_ssim(own, found))
    name, prior = settings[int(np.argmax(tried))]
    images = _descend(head, imitate, sent, begin(name, starts, len(sent)), prior, search.steps, told(len(sent)))
    return images, f"from {name}, total variation {prior:g}"


def _descend(
    head: OnnxNetwork, imitate: Imitate, sent: Array, start: Array, prior: float, steps: int, told: Callable[[], None]
) -> Array:
    wanted = torch.from_numpy(sent)
    variance = wanted.var().clamp_min(1e-12)
    images = (torch.from_numpy(start).float() / 255).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        error = (imitate(head(255 * images)) - wanted).square().mean(dim=(1, 2, 3)) / variance
        loss = (error + prior * total_variation(images)).sum()
        (images.grad,) = torch.autograd.grad(loss, images)
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
