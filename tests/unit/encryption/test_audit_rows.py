"""Which attacks count, and which is the strongest."""

from dataclasses import replace

import pytest

from encryption.audit.rows import Row, counts, strongest

ROW = Row(
    encoder="conv1",
    network="a",
    form="uint8",
    attack="black-box",
    ssim=0.95,
    psnr_db=30.0,
    recognised=0.6,
    recognised_originals=0.7,
    judge="b",
    fine_accuracy=0.6,
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
