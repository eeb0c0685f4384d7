"""Pictures read back from the gradients that they give."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from encryption.audit.gradients import (  # noqa: E402
    Gradient,
    Seen,
    choose_prior,
    from_first_layer,
    invert_gradient,
    most_alike,
)
from encryption.audit.similarity import mean_ssim  # noqa: E402
from encryption.audit.whitebox import PRIORS  # noqa: E402

pytestmark = pytest.mark.train

SIDE = 12


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """Bright discs on dark ground, UINT8 `[n, 12, 12, 1]`."""
    draw, rows = np.random.default_rng(seed), np.arange(SIDE)
    found = np.zeros((count, SIDE, SIDE, 1), np.uint8)
    for each in found:
        high, wide = draw.uniform(3, 8, 2)
        inside = (rows[:, None] - high) ** 2 + (rows - wide) ** 2 < 9
        each[..., 0] = 30 + 190 * inside
    return found


def network() -> Any:
    draw = torch.Generator().manual_seed(1)
    sizes = [(16, SIDE * SIDE), (16,), (4, 16), (4,)]
    return [(0.2 * torch.randn(*size, generator=draw)).requires_grad_() for size in sizes]


def gradient_of(labels: Sequence[int]) -> Gradient:
    weights = network()

    def gradient(images: Any) -> Any:
        hidden = torch.tanh(images.flatten(1) @ weights[0].T + weights[1])
        loss = torch.nn.functional.cross_entropy(hidden @ weights[2].T + weights[3], torch.tensor(labels))
        return torch.autograd.grad(loss, weights, create_graph=True)

    return gradient


def seen(images: np.ndarray, labels: Sequence[int]) -> Seen:
    gradient = gradient_of(labels)
    return Seen(gradient=gradient, values=[each.detach() for each in gradient(torch.from_numpy(images).float() / 255)])


def test_the_first_layer_tells_a_single_input_exactly() -> None:
    image = pictures(1)
    values = seen(image, [2]).values
    found = from_first_layer(values[0], values[1])
    assert len(found) == 16
    expected = torch.from_numpy(image).float().flatten() / 255
    assert torch.allclose(found, expected.expand_as(found), atol=1e-4)


def test_units_that_saw_nothing_tell_nothing() -> None:
    weights, bias = torch.ones(3, 5), torch.tensor([1.0, 0.0, 1e-9])
    assert from_first_layer(weights, bias).tolist() == [[1.0] * 5]


def test_a_search_finds_a_picture_by_its_gradient() -> None:
    image = pictures(1)
    found = invert_gradient(seen(image, [2]), image.shape, PRIORS[1], steps=150, seed=0)
    assert found.shape == image.shape
    assert found.dtype == np.uint8
    assert mean_ssim(image, found) > 0.7
    # And not by any gradient.
    assert mean_ssim(image, invert_gradient(seen(pictures(1, 5), [1]), image.shape, PRIORS[1], steps=150, seed=0)) < 0.5


def test_the_prior_is_chosen_by_pictures_of_the_attackers_own() -> None:
    own = pictures(1, 7)
    assert choose_prior([(own, seen(own, [1]))], steps=60, seed=0) in PRIORS


def test_the_order_of_what_is_found_does_not_matter() -> None:
    images = pictures(3)
    assert np.array_equal(most_alike(images, images[[2, 0, 1]]), images)
