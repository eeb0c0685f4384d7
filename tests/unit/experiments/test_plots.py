"""What a plot says of the runs that it shows."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import RECORDS
from experiments.catalog import EXPERIMENTS
from experiments.chaos.faults import Kind
from experiments.figure3 import LOOKS, SERIES
from experiments.plots import Figures, averaged, counted, measured
from experiments.record import read_record

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("runs", "words"), [([5, 5], "n = 5"), ([1, 2, 2], "n = 1 to 2"), ([], "n = 0")], ids=["alike", "unlike", "none"]
)
def test_the_title_counts_the_runs_that_there_were(runs: list[int], words: str) -> None:
    assert counted(runs) == words


@pytest.mark.parametrize("state", ["complete", "interrupted", "invalid"])
def test_a_run_that_is_not_complete_says_so_on_its_plots(state: str) -> None:
    figures = Figures(state)
    figures.panels("plot", ["title"], xlabel="x", ylabel="y")
    warning = figures.by_name["plot"].get_suptitle()
    assert warning == ("" if state == "complete" else f"{state} run")


@pytest.mark.parametrize("highest", [5.0, 50.0, 5e6], ids=["within a decade", "two decades", "many"])
def test_numbers_on_a_logarithmic_axis_are_plain_text(highest: float) -> None:
    figures = Figures()
    (axes,) = figures.panels("plot", ["costs $1 to $2"], xlabel="x", ylabel="y")
    axes.plot([1.0, highest], [2.0, highest])
    axes.set_xscale("log")
    axes.set_yscale("log")
    drawn = figures.render("svg")["plot"].decode()
    texts = set(re.findall("<!-- (.*?) -->", drawn))
    assert "costs $1 to $2" in texts
    assert [text for text in texts if "\\" in text] == []
    assert any(text[:1].isdigit() for text in texts)


@pytest.mark.parametrize("name", ["figure3-2026-11-26T150432Z", "table4-2026-11-30T083030Z"])
def test_lines_tell_apart_without_colours_and_one_legend_names_them(name: str) -> None:
    record = read_record(RECORDS / f"{name}.json")
    figures = Figures()
    EXPERIMENTS[record["experiment"]].draw(record, figures)
    (figure,) = figures.by_name.values()
    for axes in figure.axes:
        looks = [(line.get_linestyle(), line.get_marker()) for line in _curves(axes)]
        assert len(looks) >= 3
        assert len(set(looks)) == len(looks)
    (legend,) = figure.legends
    assert all(text.get_fontsize() >= 9 for text in legend.get_texts())


def _curves(axes: Any) -> list[Any]:
    """Lines that show several figures; error bars have markers alone."""
    return [line for line in axes.get_lines() if len(set(line.get_ydata())) > 1 and line.get_linestyle() != "None"]


MEASURED = [path for path in sorted(RECORDS.glob("*.json")) if read_record(path)["experiment"] in EXPERIMENTS]


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_nothing_that_was_measured_lies_outside_its_plot_or_on_its_edge(path: Path) -> None:
    record = read_record(path)
    figures = Figures()
    EXPERIMENTS[record["experiment"]].draw(record, figures)
    for axes in (axes for figure in figures.by_name.values() for axes in figure.axes):
        axes.autoscale_view()  # it is put off until something is drawn
        low, high = sorted(axes.transAxes.transform([(0, 0.01), (0, 0.99)])[:, 1])
        for line in axes.get_lines():
            if line.get_marker() not in ("None", "_"):
                heights = axes.transData.transform(line.get_xydata())[:, 1] if len(line.get_xydata()) else []
                assert all(low <= height <= high for height in heights), line.get_label()


def test_a_scheme_looks_the_same_in_all_plots() -> None:
    looks: dict[str, set[Any]] = {}
    for path in MEASURED:
        record = read_record(path)
        if record["experiment"] in ("figure3", "scale"):
            for axes in _drawn(record):
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                    line = handle[0] if isinstance(handle, tuple) else handle  # of curves with error bars
                    if label in LOOKS:
                        looks.setdefault(label, set()).add((line.get_color(), line.get_marker()))
    assert len(looks) >= len(SERIES)
    assert {name: len(ways) for name, ways in looks.items() if len(ways) > 1} == {}


def _drawn(record: dict[str, Any]) -> list[Any]:
    """The axes of all plots of a record."""
    figures = Figures()
    EXPERIMENTS[record["experiment"]].draw(record, figures)
    return [axes for figure in figures.by_name.values() for axes in figure.axes]


@pytest.mark.parametrize("name", ["figure3-2026-11-26T150432Z"])
def test_a_single_point_tells_bound_formula_and_measurement_apart(name: str) -> None:
    record = read_record(RECORDS / f"{name}.json")
    alone = {**record, "points": [point for point in record["points"] if point["ends"] == 2]}
    for axes in _drawn(alone):
        looks = [
            (line.get_marker(), line.get_fillstyle(), line.get_markerfacecolor())
            for line in axes.get_lines()
            if line.get_marker() not in ("None", "_", "|") and len(line.get_xydata())
        ]
        assert len(looks) >= 3
        assert len(set(looks)) == len(looks)


def _table5(failures: set[int], **changes: Any) -> dict[str, Any]:
    record = read_record(RECORDS / "table5-2026-11-29T140831Z.json")
    return {**record, "points": [{**point, **changes} for point in record["points"] if point["failures"] in failures]}


@pytest.mark.parametrize(("failures", "seen"), [({3}, True), ({3, 4}, False)], ids=["one point", "a line"])
def test_the_ideal_of_a_single_number_of_failures_is_a_point_that_is_seen(failures: set[int], seen: bool) -> None:
    (axes,) = _drawn(_table5(failures))
    (ideal,) = [line for line in axes.get_lines() if line.get_label() == "ideal"]
    assert sorted(failures) == list(ideal.get_xdata())
    assert (ideal.get_marker() != "None") is seen
    assert list(axes.get_xticks()) == list(range(7))  # those of the paper's figures as well


def test_a_run_of_table_5_that_was_left_out_whole_has_no_plot() -> None:
    assert _drawn(_table5({3}, valid=False)) == []


@pytest.mark.parametrize(("runs", "words"), [([1, 1], "n = 1"), ([1, 5], "n = 1 to 5, mean and range"), ([], "n = 0")])
def test_means_and_ranges_need_several_runs(runs: list[int], words: str) -> None:
    assert averaged(runs) == words


def test_many_panels_stand_in_rows_and_their_titles_apart() -> None:
    figures = Figures()
    titles = [f"links of {number} Mbit/s" for number in range(100, 108)]
    assert len(figures.panels("plot", titles, xlabel="latency to the upstream node and back (s)", ylabel="y")) == 8
    figures.render("svg")
    axes = figures.by_name["plot"].axes
    assert len(axes) == 8
    for words in ([one.title for one in axes], [one.xaxis.label for one in axes]):
        boxes = [text.get_window_extent() for text in words]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert [one.get_ylabel() for one in axes] == ["y", "", "", "y", "", "", "y", ""]


@pytest.mark.parametrize("ticks", [8, 60, 254])
def test_numbers_that_would_run_into_one_another_are_left_out(ticks: int) -> None:
    figures = Figures()
    (axes,) = figures.panels("plot", ["title"], xlabel="x", ylabel="y")
    axes.plot(range(1, ticks + 1), range(1, ticks + 1), **measured(0))
    axes.set_xticks(range(1, ticks + 1))
    figures.render("svg")
    shown = [label for label in axes.get_xticklabels() if label.get_visible()]
    numbers = [int(label.get_text()) for label in shown]
    assert numbers == list(range(1, ticks + 1, numbers[1] - numbers[0]))
    assert 8 <= len(numbers) <= 30
    boxes = [label.get_window_extent() for label in shown]
    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


def _fault(kind: Kind, detection_s: float | None) -> dict[str, Any]:
    return {"what": "fault", "kind": kind, "detection_s": detection_s}


@pytest.mark.parametrize(
    ("points", "lines"),
    [
        ([], None),
        ([_fault(Kind.KILL, None), _fault(Kind.RESET, None)], None),
        ([_fault(Kind.KILL, 0.4)], [[(0.0, 0.0), (0.4, 1.0)]]),
        ([_fault(Kind.STOP, 2.0), _fault(Kind.STOP, 1.0)], [[(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)]]),
    ],
    ids=["no faults", "none noticed", "one", "two"],
)
def test_chaos_draws_what_was_noticed_and_no_empty_plot(
    points: list[dict[str, Any]], lines: list[list[tuple[float, float]]] | None
) -> None:
    figures = Figures()
    EXPERIMENTS["chaos"].draw({"points": points}, figures)
    if lines is None:
        assert figures.by_name == {}
        return
    (axes,) = figures.by_name["detection"].axes
    assert [[tuple(map(float, pair)) for pair in line.get_xydata()] for line in axes.get_lines()] == lines
