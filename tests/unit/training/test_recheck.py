"""Which units are computed again, from what, and when an update is what its steps give."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from training.strategies.config import Sends
from training.strategies.leases import Leases
from training.trust.config import TrustConfig
from training.trust.recheck import MOST_KEPT, Rechecks, computed_again, is_same
from training.units import Computed, Flat, Lease, Update

NONE = np.zeros(0, np.float32)


def flat(*values: float) -> Flat:
    return np.array(values, np.float32)


def leases() -> Leases:
    return Leases(steps=1_000, unit=6, push=2, lease_s=10.0)


def start() -> tuple[Flat, Flat]:
    return flat(1, 2), NONE


def granted(leases: Leases, worker: str = "w", now: float = 0.0) -> Lease:
    lease = leases.grant(worker, 0, now)
    assert lease is not None
    return lease


def update(lease: Lease, part: int) -> Update:
    computed = Computed(values=flat(0, 0), buffers=NONE, loss=0.0)
    return Update(lease=lease.number, worker=lease.worker, steps=lease.unit.parts()[part], computed=computed)


def test_the_chance_says_which_units_and_which_of_their_updates() -> None:
    chances = iter([0.04, 0.5, 0.06, 0.0, 0.99])
    rechecks, own = Rechecks(TrustConfig(recheck=0.05), lambda: next(chances)), leases()
    first, second, third = (granted(own, name) for name in "abc")
    for each in (first, second, third):
        rechecks.granted(each, start, own)
    assert [rechecks.taken(update(first, part)) is not None for part in (0, 1, 2)] == [False, True, False]
    assert all(rechecks.taken(update(second, part)) is None for part in (0, 1, 2))
    found = rechecks.taken(update(third, 2))
    assert found is not None
    assert (found.part, found.weights.tolist()) == (2, [1, 2])
    # Sent again, it is not computed a second time.
    assert rechecks.taken(update(third, 2)) is None


@pytest.mark.parametrize("config", [None, TrustConfig()])
def test_none_are_chosen_unless_the_run_wants_some(config: TrustConfig | None) -> None:
    rechecks, own = Rechecks(config, lambda: 0.0), leases()
    lease = granted(own)
    rechecks.granted(lease, start, own)
    assert rechecks.taken(update(lease, 0)) is None


def test_few_are_kept_and_those_whose_lease_has_gone_make_room() -> None:
    rechecks, own = Rechecks(TrustConfig(recheck=1.0), lambda: 0.0), leases()
    given = [granted(own, f"w{number}") for number in range(MOST_KEPT + 2)]
    for lease in given:
        rechecks.granted(lease, start, own)
    assert sum(rechecks.taken(update(lease, 0)) is not None for lease in given[2:]) == MOST_KEPT - 2
    own.give_back(given[0])
    own.give_back(given[1])
    late = [granted(own, f"late{number}") for number in range(3)]
    for lease in late:
        rechecks.granted(lease, start, own)
    found = [rechecks.taken(update(lease, 0)) for lease in late]
    assert [each is not None for each in found] == [True, True, False]
    assert found[0] is not None
    rechecks.done(found[0])
    last = granted(own, "last")
    rechecks.granted(last, start, own)
    assert rechecks.taken(update(last, 0)) is not None


@dataclass
class Doubling:
    """Each step doubles the weights; an update holds its first step, and the weights before it."""

    here: Flat = field(default_factory=lambda: flat(0, 0))

    def load(self, weights: Flat, buffers: Flat) -> None:
        self.here = weights.copy()

    def weights(self) -> Flat:
        return self.here.copy()

    def compute(self, steps: range, sends: Sends) -> Computed:
        found = flat(steps.start, self.here[0])
        self.here = self.here * np.float32(2.0 ** len(steps))
        return Computed(values=found, buffers=NONE, loss=0.0)


def test_an_update_is_computed_from_where_its_unit_began() -> None:
    chances = iter([0.0, 0.99])
    rechecks, own = Rechecks(TrustConfig(recheck=1.0), lambda: next(chances)), leases()
    lease = granted(own)
    rechecks.granted(lease, start, own)
    chosen = rechecks.taken(update(lease, 2))
    assert chosen is not None
    assert computed_again(chosen, Doubling(), "gradient", "fp32").tolist() == [4, 16]


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
    assert is_same(flat(*came), flat(3, 4), tolerance=tolerance) is same


def test_the_sign_of_a_zero_is_lost_on_the_way() -> None:
    assert is_same(flat(0.0, 1), flat(-0.0, 1), tolerance=0.0)
