"""SSIM and PSNR against values that can be worked out by hand, and against the definition written out."""

import numpy as np
import pytest

from encryption.metrics import gaussian_window, psnr_db, ssim
from tierkit.errors import InvalidInput

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
    assert ssim(flat(a), flat(b)) == pytest.approx([want])


def test_ssim_of_a_picture_and_its_negative_is_below_zero():
    picture = noise(0)
    assert (ssim(picture, picture) == 1).all()
    assert (ssim(picture, 255 - picture) < -0.8).all()


def test_ssim_follows_equation_13_at_each_position():
    """Wang et al. 2004, written out with loops: window, moments and constants."""
    x, y = noise(1), noise(2)
    y = ((x.astype(int) + y) // 2).astype(np.uint8)
    window = np.outer(gaussian_window(), gaussian_window())
    for image, want in enumerate(ssim(x, y)):
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
        assert np.mean(found) == pytest.approx(want, abs=1e-9)


def test_the_window_is_the_gaussian_of_the_paper():
    window = gaussian_window()
    assert window.sum() == pytest.approx(1)
    assert window[5] / window[4] == pytest.approx(np.exp(1 / 4.5))
    # The same figures are printed in many implementations: the middle of the two-dimensional window.
    assert window[5] ** 2 == pytest.approx(0.07076223776)


@pytest.mark.parametrize(("difference", "want"), [(0, np.inf), (1, 48.1308036), (255, 0.0), (25, 20.1720036)])
def test_psnr(difference: int, want: float):
    assert psnr_db(flat(0), flat(difference)) == pytest.approx(want)


def test_psnr_is_that_of_all_images_together():
    same_and_off = np.concatenate([flat(10), flat(12)])
    assert psnr_db(np.concatenate([flat(10), flat(10)]), same_and_off) == pytest.approx(10 * np.log10(255**2 / 2))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (flat(0), flat(0)[:, :12]),
        (flat(0).astype(np.float32), flat(0).astype(np.float32)),
        (flat(0)[0], flat(0)[0]),
        (flat(0)[:0], flat(0)[:0]),
    ],
)
def test_what_is_no_pair_of_images_is_refused(a: np.ndarray, b: np.ndarray):
    for measure in (ssim, psnr_db):
        with pytest.raises(InvalidInput, match=r"images are|originals for"):
            measure(a, b)


def test_ssim_of_images_smaller_than_its_window_is_refused():
    with pytest.raises(InvalidInput, match="11x11"):
        ssim(flat(0)[:, :10], flat(0)[:, :10])
