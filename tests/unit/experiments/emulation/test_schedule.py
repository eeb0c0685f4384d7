"""When bytes arrive, and which exchanges are lost: the pure part of the emulated links."""

from random import Random

import pytest

from experiments.emulation.links import LinkSpec
from experiments.emulation.schedule import Fault, draw_fate, transmitted_at


@pytest.mark.parametrize(
    ("bandwidth_bps", "n_bytes", "now", "free_at", "expected"),
    [
        (None, 10_000, 5.0, 0.0, 5.0),
        (None, 10_000, 5.0, 9.0, 5.0),  # no limit, so nothing queues
        (8000, 1000, 5.0, 0.0, 6.0),  # 8,000 bits at 8,000 bit/s
        (8000, 1000, 5.0, 5.5, 6.5),  # half a second behind what was there before
        (8000, 0, 5.0, 5.5, 5.5),  # even an empty message keeps its turn
        (1e6, 153_600, 0.0, 0.0, 1.2288),  # a task of 50 images at 1 Mbit/s
    ],
)
def test_transmission(bandwidth_bps: float | None, n_bytes: int, now: float, free_at: float, expected: float) -> None:
    spec = LinkSpec(bandwidth_bps=bandwidth_bps)
    assert transmitted_at(spec, n_bytes, now=now, free_at=free_at) == pytest.approx(expected)


def test_transfers_at_the_same_time_share_the_bandwidth() -> None:
    spec, free_at, arrivals = LinkSpec(bandwidth_bps=8_000_000), 0.0, []
    for _ in range(4):
        free_at = transmitted_at(spec, 1_000_000, now=0.0, free_at=free_at)
        arrivals.append(free_at)
    assert arrivals == pytest.approx([1.0, 2.0, 3.0, 4.0])


def test_an_idle_link_saves_nothing_up() -> None:
    spec = LinkSpec(bandwidth_bps=8000)
    assert transmitted_at(spec, 1000, now=100.0, free_at=1.0) == pytest.approx(101.0)


def test_without_jitter_and_loss_every_exchange_is_alike() -> None:
    random = Random(1)
    fates = [draw_fate(LinkSpec(delay_s=0.25), random) for _ in range(100)]
    assert {(fate.there_s, fate.back_s, fate.fault) for fate in fates} == {(0.25, 0.25, None)}


def test_jitter_stays_within_its_bounds_and_fills_them() -> None:
    random = Random(2)
    spec = LinkSpec(delay_s=0.1, jitter_s=0.04)
    delays = [delay for _ in range(2000) for fate in [draw_fate(spec, random)] for delay in (fate.there_s, fate.back_s)]
    assert min(delays) == pytest.approx(0.06, abs=1e-3)
    assert max(delays) == pytest.approx(0.14, abs=1e-3)
    assert sum(delays) / len(delays) == pytest.approx(0.1, abs=2e-3)


def test_loss_strikes_as_often_as_it_says_on_both_ways() -> None:
    random = Random(3)
    fates = [draw_fate(LinkSpec(reset=0.1, stall=0.3), random) for _ in range(10_000)]
    for fault, share in ((Fault.RESET, 0.1), (Fault.STALL, 0.3), (None, 0.6)):
        struck = [fate for fate in fates if fate.fault is fault]
        assert len(struck) / len(fates) == pytest.approx(share, abs=0.02)
        assert sum(fate.in_answer for fate in struck) / len(struck) == pytest.approx(0.5, abs=0.06)


def test_the_seed_decides_and_loss_does_not_change_the_jitter() -> None:
    calm, lossy = LinkSpec(delay_s=0.1, jitter_s=0.1), LinkSpec(delay_s=0.1, jitter_s=0.1, reset=0.5)
    a, b = Random(4), Random(4)
    for _ in range(50):
        one, other = draw_fate(calm, a), draw_fate(lossy, b)
        assert (one.there_s, one.back_s) == (other.there_s, other.back_s)
