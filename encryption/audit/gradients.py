"""Attacks by someone who holds a network's weights and sees the gradient that some pictures give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from encryption.audit.similarity import as_planes, mean_ssim, ssim
from encryption.audit.whitebox import PRIORS, total_variation
from tierkit.tensors import Array

__all__ = ["Gradient", "Seen", "choose_prior", "from_first_layer", "invert_gradient", "most_alike"]

_RATE = 0.1
_FAINT = 1e-6
"""A unit whose bias has a smaller share of the largest gradient says nothing but rounding errors."""

Gradient = Callable[[Tensor], Sequence[Tensor]]
"""Pictures, float `[n, h, w, c]` from 0 to 1, to the gradient of their mean loss, a tensor for each parameter;
gradients pass through it. It knows the pictures' classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An update, and what gives such updates."""

    gradient: Gradient
    values: Sequence[Tensor]
    """The received update, in the shapes of `gradient`."""


def from_first_layer(weights: Tensor, bias: Tensor) -> Tensor:
    """Return the network's inputs as each unit of a dense first layer reveals them, `[m, inputs]`. The gradient of a
    unit's weights, divided by the gradient of its bias, is the mean of the inputs, weighted by their effect on the
    unit. For a single input it equals that input (Phong et al. 2017, Privacy-preserving deep learning, section 3).

    Args:
        weights: the gradient of the layer's weights, `[units, inputs]`.
        bias: the gradient of its biases, `[units]`.
    """
    told = bias.abs() > _FAINT * bias.abs().max()
    return weights[told] / bias[told, None]


def choose_prior(own: Sequence[tuple[Array, Seen]], *, steps: int, seed: int) -> float:
    """The weight of the total variation with the best SSIM on pictures of the attacker's own.

    Args:
        own: batches of them, UINT8 `[n, h, w, c]`, and the updates that they give.
        steps: of each search.
    """
    alike = [
        np.mean(
            [
                mean_ssim(pictures, invert_gradient(seen, pictures.shape, prior, steps=steps, seed=seed))
                for pictures, seen in own
            ]
        )
        for prior in PRIORS
    ]
    return PRIORS[int(np.argmax(alike))]


def invert_gradient(seen: Seen, shape: Sequence[int], prior: float, *, steps: int, seed: int) -> Array:
    """Return plausible pictures whose gradient has the direction of the received gradient.

    Adam on the signs of the slopes minimises one minus the cosine of the two gradients, plus `prior` times the total
    variation (Geiping et al. 2020, Inverting gradients, arXiv:2003.14053, equation 4).

    Args:
        shape: shape of the pictures, `[n, h, w, c]`.

    Returns:
        UINT8 `[n, h, w, c]`, in the order of the classes that the gradient knows.
    """
    wanted = torch.cat([each.reshape(-1) for each in seen.values])
    start = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    images = (0.5 + 0.1 * (start - 0.5)).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for _ in range(steps):
        found = torch.cat([each.reshape(-1) for each in seen.gradient(images)])
        apart = 1 - torch.nn.functional.cosine_similarity(found, wanted, dim=0)
        loss = apart + prior * total_variation(images).mean()
        (slope,) = torch.autograd.grad(loss, images)
        images.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return np.asarray((255 * images.detach()).round().to(torch.uint8).numpy())


def most_alike(originals: Array, found: Array) -> Array:
    """Return the found picture that is most similar by SSIM to each original. An update does not show the order of
    its pictures, and an attacker sees them all. UINT8 `[n, h, w, c]` and `[m, h, w, c]`."""
    candidates = as_planes(found)
    chosen = [
        int(ssim(as_planes(each[None]).expand(len(found), -1, -1, -1), candidates).argmax()) for each in originals
    ]
    return found[chosen]
