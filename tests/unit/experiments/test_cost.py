"""The cost of 1,000 images."""

import html
import shutil
from pathlib import Path

import pytest

from benchmarks.tables import RECORDS
from experiments.catalog import EXPERIMENTS
from experiments.cost import ServedImages, cost_of_1000, parse_prices
from experiments.harness import RECORD
from experiments.record import read_record
from experiments.report import write_report
from tierkit.errors import InvalidInput
from tierkit.types import Tier

SERVED = ServedImages(words="a fleet", nodes={Tier.END: 8, Tier.CLOUD: 1}, images=10_000, seconds=36.0)


@pytest.mark.parametrize(
    ("prices", "cost"),
    [({}, 0.0), ({Tier.CLOUD: 1.0}, 0.001), ({Tier.END: 0.5, Tier.CLOUD: 1.0}, 0.005), ({Tier.EDGE: 9.0}, 0.0)],
)
def test_the_machines_of_a_fleet_are_paid_for_its_time(prices: dict[Tier, float], cost: float) -> None:
    assert cost_of_1000(SERVED, prices) == pytest.approx(cost)


def test_prices_are_read() -> None:
    assert parse_prices(["end=0", "cloud=0.525"]) == {Tier.END: 0.0, Tier.CLOUD: 0.525}


@pytest.mark.parametrize("texts", [["cloud"], ["moon=1"], ["cloud=x"], ["cloud=-1"], ["cloud=inf"], ["end=1", "end=2"]])
def test_other_texts_are_no_prices(texts: list[str]) -> None:
    with pytest.raises(InvalidInput):
        parse_prices(texts)


def test_the_report_has_the_cost_of_fleets_if_prices_are_given(tmp_path: Path) -> None:
    shutil.copyfile(RECORDS / "figure3-2026-11-26T150432Z.json", tmp_path / RECORD)
    page, _ = write_report(tmp_path, EXPERIMENTS)
    assert "cost of 1,000 images" not in page.read_text()
    page, _ = write_report(tmp_path, EXPERIMENTS, {Tier.CLOUD: 0.525})
    text = html.unescape(page.read_text())
    assert '<th scope="col">cost of 1,000 images</th>' in text
    assert "<td>1 end, 4 edge, 1 cloud</td>" in text


def test_each_fleet_has_the_machines_of_its_scheme() -> None:
    experiment = EXPERIMENTS["figure3"]
    point = {
        "by_formula": False,
        "window": 1,
        "ends": 2,
        "n_map": 1,
        "state": "completed",
        "reason": "",
        "seconds": 10.0,
        "images": 100,
        "fallback": 0,
        "images_by_tier": {"end": 100, "edge": 50, "cloud": 50},
        "tasks_by_form": {},
        "coarse_accuracy": 0.8,
        "fine_accuracy": 0.7,
    }
    record = read_record(RECORDS / "figure3-2026-11-26T150432Z.json")
    record = {
        **record,
        "points": [{**point, "scheme": scheme} for scheme in ("end", "end-cloud", "end-edge", "mapping")],
    }
    machines = [dict(each.nodes) for each in experiment.served(record)]
    ends = {Tier.END: 2}
    assert machines == [ends, {**ends, Tier.CLOUD: 1}, {**ends, Tier.EDGE: 4}, {**ends, Tier.EDGE: 4, Tier.CLOUD: 1}]
