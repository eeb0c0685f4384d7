"""Which units are computed again, from what, and when an update is what its steps give."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from training.strategies.leases import Leases
from training.trust.config import TrustConfig
from training.trust.recheck import MOST_KEPT, Rechecks, is_same
from training.units import Computed, Flat, Sends, UnitLease, Update

NONE = np.zeros(0, np.float32)


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def leases() -> Leases:
    return Leases(steps=1_000, period=6, lease_s=10.0)


def start() -> tuple[Flat, Flat]:
    return flat(1, 2), NONE


def granted(leases: Leases, worker: str = "w", now: float = 0.0) -> UnitLease:
    lease = leases.grant(worker, 0, now)
    assert lease is not None
    return lease


def update(lease: UnitLease) -> Update:
    computed = Computed(values=flat(0, 0), buffers=NONE, loss=0.0)
    return Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=computed)


def test_the_chance_says_which_units() -> None:
    chances = iter([0.04, 0.06])
    rechecks, own = Rechecks(TrustConfig(recheck=0.05), lambda: next(chances)), leases()
    first, second = (granted(own, name) for name in "ab")
    for each in (first, second):
        rechecks.granted(each, start, own)
    found = rechecks.taken(update(first))
    assert found is not None
    assert found.weights.tolist() == [1, 2]
    # Sent again, it is not computed a second time.
    assert rechecks.taken(update(first)) is None
    assert rechecks.taken(update(second)) is None


@pytest.mark.parametrize("config", [None, TrustConfig()])
def test_none_are_chosen_unless_the_run_wants_some(config: TrustConfig | None) -> None:
    rechecks, own = Rechecks(config, lambda: 0.0), leases()
    lease = granted(own)
    rechecks.granted(lease, start, own)
    assert rechecks.taken(update(lease)) is None


def test_few_are_kept_and_those_whose_lease_has_gone_make_room() -> None:
    rechecks, own = Rechecks(TrustConfig(recheck=1.0), lambda: 0.0), leases()
    given = [granted(own, f"w{number}") for number in range(MOST_KEPT + 2)]
    for lease in given:
        rechecks.granted(lease, start, own)
    assert sum(rechecks.taken(update(lease)) is not None for lease in given[2:]) == MOST_KEPT - 2
    own.give_back(given[0])
    own.give_back(given[1])
    late = [granted(own, f"late{number}") for number in range(3)]
    for lease in late:
        rechecks.granted(lease, start, own)
    found = [rechecks.taken(update(lease)) for lease in late]
    assert [each is not None for each in found] == [True, True, False]
    assert found[0] is not None
    rechecks.done(found[0])
    last = granted(own, "last")
    rechecks.granted(last, start, own)
    assert rechecks.taken(update(last)) is not None


@dataclass
class Doubling:
    """Each step doubles the weights; an update holds its first step, and the weights before it."""

    moments: Any = None
    here: Flat = field(default_factory=lambda: flat(0, 0))

    def load(self, weights: Flat, buffers: Flat) -> None:
        self.here = weights.copy()

    def weights(self) -> Flat:
        return self.here.copy()

    def compute(self, steps: range, sends: Sends, rate: float | None = None) -> Computed:
        found = flat(steps.start, self.here[0])
        self.here = self.here * np.float32(2.0 ** len(steps))
        return Computed(values=found, buffers=NONE, loss=0.0)


def test_an_update_is_computed_from_where_its_unit_began() -> None:
    rechecks, own = Rechecks(TrustConfig(recheck=1.0), lambda: 0.0), leases()
    granted(own, "other")
    lease = granted(own)
    rechecks.granted(lease, start, own)
    chosen = rechecks.taken(dataclasses.replace(update(lease), computed=of(flat(6, 1), NONE)))
    assert chosen is not None
    assert rechecks.is_right(chosen, Doubling(), "gradient", "fp32")
    chosen.update = dataclasses.replace(update(lease), computed=of(flat(6, 64), NONE))
    assert not rechecks.is_right(chosen, Doubling(), "gradient", "fp32")


def of(values: Flat, buffers: Flat) -> Computed:
    return Computed(values=values, buffers=buffers, loss=0.0)


@pytest.mark.parametrize(
    ("came", "tolerance", "same"),
    [
        ([3, 4], 0.0, True),
        ([3, np.nextafter(np.float32(4), np.float32(5))], 0.0, False),
        ([3, np.nextafter(np.float32(4), np.float32(5))], 0.02, True),
        ([3, 4.09], 0.02, True),
        ([3, 4.11], 0.02, False),
        ([0, 0], 0.02, False),
        ([-3, -4], 0.5, False),
        ([3e38, 3e38], 0.5, False),
    ],
)
def test_to_the_bit_or_by_a_share_of_its_length(came: list[float], tolerance: float, same: bool) -> None:
    one, own, alike = flat(*came), flat(3, 4), flat(1, 1)
    assert is_same(of(one, alike), of(own, alike), tolerance=tolerance) is same
    assert is_same(of(alike, one), of(alike, own), tolerance=tolerance) is same  # the running statistics


def test_the_sign_of_a_zero_is_lost_on_the_way() -> None:
    one, other = (Computed(values=flat(zero, 1), buffers=NONE, loss=0.0) for zero in (0.0, -0.0))
    assert is_same(one, other, tolerance=0.0)
