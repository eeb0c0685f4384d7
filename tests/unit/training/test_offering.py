"""A host that waits: what it offers, and which starts it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.config import find_config
from tierkit.errors import SetupError
from tierkit.wire.offers import OfferedStart, StartedRun
from training.host.offering import Offering, limits_of
from training.host.settings import HostSettings

pytestmark = pytest.mark.train


def settings(**given: Any) -> HostSettings:
    return HostSettings(**{"offer": "mnist-100", "scheduler": "http://127.0.0.1:1", "share_data": True, **given})


def start(number: int = 1, **changes: Any) -> OfferedStart:
    chosen = {"network": "mnist-100", "strategy": "fedavg", "rate": 0.1, "epochs": 2, "batch": 64, **changes}
    return OfferedStart(id=f"{number:032x}", **chosen)


@pytest.mark.parametrize(
    ("given", "rate", "epochs"),
    [
        ({}, (0.1, 10), (1, 2)),
        ({"offer_rate": "0.01:0.5"}, (0.01, 0.5), (1, 2)),
        ({"offer_epochs": "3:9"}, (0.1, 10), (3, 9)),
    ],
    ids=str,
)
def test_the_limits_of_a_network(given: dict[str, str], rate: tuple[float, float], epochs: tuple[float, float]) -> None:
    network = find_config("mnist-100", None)
    found = limits_of(network.model_copy(update={"peak_rate": 1.0, "epochs": 1}), settings(**given))
    assert (found.rate.lowest, found.rate.highest) == rate
    assert (found.epochs.lowest, found.epochs.highest) == epochs
    assert found.rate.default == min(1.0, rate[1])
    assert found.epochs.default == max(1, epochs[0])


def test_a_start_becomes_the_flags_of_a_host_once(tmp_path: Path) -> None:
    offering = Offering(settings(folder=tmp_path, offer_strategies="fedavg,sgd", workers=3, port=8075))
    flags = offering.taken(start(start_at=2, strategy="sgd"))
    assert flags is not None
    pairs = dict(zip(flags, [*flags[1:], ""], strict=True))
    assert (pairs["--network"], pairs["--strategy"], pairs["--rate"]) == ("mnist-100", "sgd", "0.1")
    assert (pairs["--epochs"], pairs["--batch-size"], pairs["--start-at"]) == ("2", "64", "2")
    assert (pairs["--port"], pairs["--workers"], pairs.get("--offer")) == ("8075", "3", None)
    assert pairs["--folder"] == str(tmp_path / start().id)
    assert pairs["--scheduler"] == "http://127.0.0.1:1"
    assert pairs["--share-data"].startswith("--")
    assert offering.taken(start()) is None  # it has it
    assert offering.taken(start(2)) is None  # the first one is not over
    assert offering.said.latest == StartedRun(start=start().id)


def test_a_start_beyond_the_limits_is_refused_here_as_well(tmp_path: Path) -> None:
    offering = Offering(settings(folder=tmp_path, offer_rate="0.01:0.5"))
    assert offering.taken(start(rate=2.0)) is None
    assert offering.said.latest == StartedRun(start=start().id, over=True, error="rate: this host takes 0.01 to 0.5")
    assert offering.taken(start(2)) is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"offer": "no-such"}, "no bundled configuration"),
        ({"offer_strategies": "allreduce"}, "ranks"),
        ({"offer": "mobilenet-v1-0.5"}, "teacher"),
    ],
    ids=str,
)
def test_what_cannot_be_offered(given: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Offering(settings(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"network": "mnist-100"},
        {"scheduler": None},
        {"epochs": 3},
        {"start_at": 2},
        {"offer_rate": "1"},
        {"offer_rate": "2:1"},
        {"offer_rate": "0:1"},
        {"offer_batch": "a:b"},
    ],
    ids=str,
)
def test_wrong_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings(**given)
