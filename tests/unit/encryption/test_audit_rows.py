"""Which attacks count, and which is the strongest."""

from dataclasses import replace

import pytest

from encryption.audit.rows import Row, counts, interval_of, strongest

ROW = Row(
    encoder="conv1",
    network="a",
    form="uint8",
    attack="black-box",
    ssim=0.95,
    psnr_db=30.0,
    recognised=0.6,
    recognised_low=0.5,
    recognised_high=0.7,
    recognised_originals=0.7,
    judge="b",
    fine_accuracy=0.6,
    accuracy_lost=0.01,
    test_images=1000,
    payload_bytes=16384.0,
    device_ms_per_image=0.1,
    images=8,
    effort="some",
    seconds=1.0,
)
LEARNED = replace(ROW, encoder="bottleneck", ssim=0.2)


@pytest.mark.parametrize(
    ("row", "others", "want"),
    [
        (ROW, [], True),
        (replace(ROW, ssim=0.9), [], True),
        (replace(ROW, ssim=0.899), [], False),
        # A form of its own on which it succeeded is proof enough for the other.
        (replace(ROW, ssim=0.5), [replace(ROW, form="float32")], True),
        (LEARNED, [], False),
        (LEARNED, [ROW], True),
        (LEARNED, [replace(ROW, ssim=0.8)], False),
        (LEARNED, [replace(ROW, attack="query-free")], False),
        (LEARNED, [replace(ROW, network="b")], False),
        # What it got out of something else is no proof.
        (LEARNED, [replace(LEARNED, form="float32", ssim=0.95)], False),
        (replace(ROW, encoder="none", attack="none", ssim=1.0), [], True),
    ],
)
def test_an_attack_counts_once_it_has_inverted_the_first_convolution(row: Row, others: list[Row], want: bool):
    assert counts(row, [*others, row]) is want


def test_the_strongest_attack_is_the_one_that_got_most_whether_it_counts_or_not():
    rows = [
        ROW,
        LEARNED,
        replace(LEARNED, attack="optimisation", ssim=0.3, counts=False),
        replace(LEARNED, network="b", ssim=0.9),
    ]
    assert strongest(rows, "bottleneck", "a").attack == "optimisation"
    with pytest.raises(ValueError, match="empty"):
        strongest(rows, "bottleneck", "c")


def test_which_attack_is_the_strongest_depends_on_who_looks():
    seen = replace(LEARNED, attack="optimisation", ssim=0.1, recognised=0.9)
    assert strongest([LEARNED, seen], "bottleneck", "a") is LEARNED
    assert strongest([LEARNED, seen], "bottleneck", "a", by="recognised") is seen


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17, 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
        (1.0, 20, 0.8389, 1.0),
    ],
)
def test_the_interval_of_a_share(share: float, count: int, low: float, high: float):
    assert interval_of(share, count) == pytest.approx((low, high), abs=5e-5)
