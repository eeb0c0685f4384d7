"""The comparison of learned encoders: which settings are on the front, and the files that say so."""

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from encryption.front import Front, Setting, save_front, undominated


def make_setting(name: str, ssim: float, fine: float) -> Setting:
    return Setting(
        name=name,
        ssim=ssim,
        attack="black-box",
        fine_accuracy=fine,
        payload_bytes=300,
        device_ms_per_image=0.1,
        channels=8,
        levels=8,
        noise=0.1,
        adversary_weight=1.0,
        minutes=10,
    )


def make_front(*settings: Setting) -> Front:
    return Front(
        network="resnet-34",
        plain_accuracy=0.608,
        end_ms_per_image=0.18,
        end_network="mobilenet-v1-0.5",
        attacked_images=200,
        effort="1,000 queries",
        hardware="one core",
        settings=settings,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([("a", 0.3, 0.5), ("b", 0.5, 0.6)], ["a", "b"]),
        ([("b", 0.5, 0.6), ("a", 0.3, 0.6)], ["a"]),
        ([("a", 0.3, 0.5), ("b", 0.3, 0.6)], ["b"]),
        ([("a", 0.3, 0.5), ("b", 0.4, 0.4), ("c", 0.5, 0.7)], ["a", "c"]),
        ([("a", 0.3, 0.5), ("twin", 0.3, 0.5)], ["a", "twin"]),
        ([], []),
    ],
)
def test_a_setting_is_on_the_front_unless_another_is_as_good_in_both_and_better_in_one(settings, expected):
    assert [one.name for one in undominated([make_setting(*each) for each in settings])] == expected


def test_a_front_is_written_as_csv_and_picture(tmp_path: Path):
    names = [("open", 0.6, 0.6), ("beaten", 0.7, 0.5), ("shut", 0.2, 0.4)]
    front = make_front(*(make_setting(*each) for each in names))
    written = save_front(front, tmp_path)
    assert [path.name for path in written] == ["front.csv", "front.svg"]
    rows = list(csv.DictReader(written[0].read_text().splitlines()))
    assert [(row["name"], row["on_front"]) for row in rows] == [("open", "1"), ("beaten", "0"), ("shut", "1")]
    drawn = ElementTree.parse(written[1])
    description = next(drawn.iter("{http://purl.org/dc/elements/1.1/}description")).text
    assert description is not None
    for name, *_ in names:
        assert re.search(rf"{name}: .* 0.56 of the time of mobilenet-v1-0.5", description)


@pytest.mark.parametrize("settings", [(), (make_setting("only", 0.3, 0.6),)])
def test_a_front_of_no_or_one_setting_is_drawn(tmp_path: Path, settings: tuple[Setting, ...]):
    assert ElementTree.parse(save_front(make_front(*settings), tmp_path)[1]).getroot().tag.endswith("svg")


def test_the_plot_of_the_documentation_is_that_of_its_record(tmp_path: Path):
    root = Path(__file__).parents[3]
    (plot,) = (root / "docs" / "results" / "plots").glob("privacy-front-*.svg")
    record = root / "benchmarks" / "records" / f"{plot.stem}.json"
    front = Front.model_validate(json.loads(record.read_text())["results"])
    drawn = save_front(front, tmp_path)[1].read_text()
    assert re.findall("<!-- (.*?) -->", plot.read_text()) == re.findall("<!-- (.*?) -->", drawn)
