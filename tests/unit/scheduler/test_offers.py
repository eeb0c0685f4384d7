"""Hosts that offer runs: what may be started on them, how many wait, and when they are gone. Time is passed in."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from pydantic import ValidationError

from scheduler.runs.offers import Offers
from scheduler.runs.state import SILENT_S
from tierkit.errors import Conflict, LimitReached, NotFound, Overloaded
from tierkit.testing import FakeClock
from tierkit.wire.offers import HostOffer, OfferedNetwork, OfferedRange, StartedRun, StartWish

RUN = "f" * 32


def limits(lowest: float, highest: float) -> OfferedRange:
    return OfferedRange(lowest=lowest, highest=highest, default=lowest)


def offer(**changes: Any) -> HostOffer:
    network = OfferedNetwork(name="net", rate=limits(0.01, 0.5), epochs=limits(1, 9), batch=limits(16, 64))
    return HostOffer(**{"host": "desk", "networks": (network,), "strategies": ("sgd",), "workers": 3, **changes})


def wish(**changes: Any) -> StartWish:
    return StartWish(**{"network": "net", "strategy": "sgd", "rate": 0.1, "epochs": 2, "batch": 32, **changes})


def new_id() -> str:
    return secrets.token_hex(16)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"rate": 0.01, "epochs": 9, "batch": 64, "start_at": 3}, None),
        ({"network": "other"}, "network"),
        ({"strategy": "fedavg"}, "strategy"),
        ({"rate": 0.009}, "rate"),
        ({"rate": 0.51}, "rate"),
        ({"epochs": 10}, "epochs"),
        ({"batch": 15}, "batch"),
        ({"batch": 65}, "batch"),
        ({"start_at": 4}, "start_at"),
    ],
    ids=str,
)
def test_a_wish_is_held_to_what_is_offered(changes: dict[str, Any], field: str | None) -> None:
    fault = offer().fault_of(wish(**changes))
    assert (fault and fault[0]) == field


@pytest.mark.parametrize("wrong", [(0.5, 0.1, 0.2), (0.1, 0.5, 0.6), (0.0, 1.0, 0.5), (0.1, float("inf"), 0.2)])
def test_limits_are_finite_and_in_order(wrong: tuple[float, float, float]) -> None:
    lowest, highest, default = wrong
    with pytest.raises(ValidationError):
        OfferedRange(lowest=lowest, highest=highest, default=default)


def test_a_start_is_told_until_its_host_has_it_and_the_next_one_when_that_is_over() -> None:
    offers, desk = Offers(FakeClock()), new_id()
    assert offers.tell(desk, offer(), "ann").start is None
    first, second = (offers.start(desk, wish(epochs=epochs), "ann") for epochs in (1, 2))
    for _ in range(2):  # the answer may have been lost
        assert offers.tell(desk, offer(), "ann").start == first
    for latest in (StartedRun(start=first.id), StartedRun(start=first.id, run=RUN)):
        assert offers.tell(desk, offer(latest=latest), "ann").start is None
        (seen,) = offers.seen_by("ann")
        assert (seen.latest, seen.waiting) == (latest, (second,))
    over = StartedRun(start=first.id, run=RUN, over=True)
    assert offers.tell(desk, offer(latest=over), "ann").start == second


def test_an_offer_is_gone_with_its_host_and_so_are_the_starts_that_wait_for_it() -> None:
    clock = FakeClock()
    offers, desk = Offers(clock), new_id()
    offers.tell(desk, offer(), None)
    offers.start(desk, wish(), None)
    clock.advance(SILENT_S)
    assert len(offers.seen_by(None)) == 1
    clock.advance(0.1)
    assert offers.seen_by(None) == ()
    with pytest.raises(NotFound):
        offers.start(desk, wish(), None)
    assert offers.tell(desk, offer(), None).start is None


def test_users_have_the_offers_of_their_own_hosts() -> None:
    offers, desk = Offers(FakeClock()), new_id()
    offers.tell(desk, offer(), "ann")
    assert [len(offers.seen_by(who)) for who in ("ann", "bob", None)] == [1, 0, 1]
    with pytest.raises(NotFound):
        offers.start(desk, wish(), "bob")
    with pytest.raises(Conflict):
        offers.tell(desk, offer(), "bob")


def test_a_host_has_few_starts_that_wait() -> None:
    offers, desk = Offers(FakeClock()), new_id()
    offers.tell(desk, offer(), None)
    for _ in range(4):
        offers.start(desk, wish(), None)
    with pytest.raises(Overloaded):
        offers.start(desk, wish(), None)


def test_offers_are_few_and_those_of_one_owner_leave_places_for_others() -> None:
    offers = Offers(FakeClock())
    for _ in range(50):
        offers.tell(new_id(), offer(), "ann")
    with pytest.raises(LimitReached):
        offers.tell(new_id(), offer(), "ann")
    offers.tell(new_id(), offer(), "bob")
    open_ones = Offers(FakeClock())
    for _ in range(100):
        open_ones.tell(new_id(), offer(), None)
    with pytest.raises(Overloaded):
        open_ones.tell(new_id(), offer(), None)
