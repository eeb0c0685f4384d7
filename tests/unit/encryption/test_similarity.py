"""SSIM and PSNR against values that can be worked out by hand, and against the definition written out."""

import numpy as np
import pytest

from tierkit.errors import InvalidInput

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from encryption.audit.similarity import as_planes, mean_ssim, psnr_db, ssim  # noqa: E402

pytestmark = pytest.mark.train

C1, C2 = 2.55**2, 7.65**2


def flat(value: int) -> np.ndarray:
    return np.full((1, 16, 16, 3), value, np.uint8)


def noise(seed: int, shape: tuple[int, ...] = (3, 17, 19, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (0, 0, 1.0),
        (100, 100, 1.0),
        # Without any contrast the means alone are compared.
        (0, 255, C1 / (255**2 + C1)),
        (100, 120, (2 * 100 * 120 + C1) / (100**2 + 120**2 + C1)),
    ],
)
def test_ssim_of_flat_images(a: int, b: int, want: float):
    assert mean_ssim(flat(a), flat(b)) == pytest.approx(want, abs=1e-4)


def test_ssim_of_a_picture_and_its_negative_is_below_zero():
    picture = noise(0)
    assert mean_ssim(picture, picture) == pytest.approx(1)
    assert mean_ssim(picture, 255 - picture) < -0.8


def test_ssim_follows_equation_13_at_each_position():
    """Wang et al. 2004, written out with loops: window, moments and constants."""
    x, y = noise(1), noise(2)
    y = ((x.astype(int) + y) // 2).astype(np.uint8)
    grid = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    window = np.outer(grid, grid) / grid.sum() ** 2
    for image, want in enumerate(ssim(as_planes(x), as_planes(y)).tolist()):
        found = []
        for top in range(17 - 10):
            for left in range(19 - 10):
                for colour in range(3):
                    place = (image, slice(top, top + 11), slice(left, left + 11), colour)
                    a, b = x[place].astype(float), y[place].astype(float)
                    ma, mb = (window * a).sum(), (window * b).sum()
                    va, vb = (window * (a - ma) ** 2).sum(), (window * (b - mb) ** 2).sum()
                    cov = (window * (a - ma) * (b - mb)).sum()
                    found.append((2 * ma * mb + C1) * (2 * cov + C2) / ((ma**2 + mb**2 + C1) * (va + vb + C2)))
        assert np.mean(found) == pytest.approx(want, abs=1e-5)


def test_a_step_along_the_gradient_of_ssim_makes_pictures_more_alike():
    first = as_planes(noise(1)).requires_grad_()
    second = as_planes(noise(2))
    before = ssim(first, second).mean()
    (gradient,) = torch.autograd.grad(before, first)
    assert ssim(first + 0.01 * gradient / gradient.abs().max(), second).mean() > before


@pytest.mark.parametrize(("difference", "want"), [(0, None), (1, 48.1308036), (255, 0.0), (25, 20.1720036)])
def test_psnr(difference: int, want: float | None):
    assert psnr_db(flat(0), flat(difference)) == (want if want is None else pytest.approx(want, abs=1e-5))


def test_psnr_is_that_of_all_images_together():
    same_and_off = np.concatenate([flat(10), flat(12)])
    assert psnr_db(np.concatenate([flat(10), flat(10)]), same_and_off) == pytest.approx(10 * np.log10(255**2 / 2))


def test_ssim_of_images_smaller_than_its_window_is_refused():
    with pytest.raises(InvalidInput, match="11x11"):
        mean_ssim(flat(0)[:, :10], flat(0)[:, :10])
