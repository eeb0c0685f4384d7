"""Rows, cells, CSV and cautions."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.bench.levels import Closed, Level, Load, Open
from experiments.bench.report import as_cells, as_row, cautions, check_folder, write_csv
from experiments.bench.server_stats import ServerTimes
from experiments.bench.summary import OK, Sample, Window, summarise
from tierkit.errors import InvalidInput

SERVER = ServerTimes(queue_ms=1.0, compute_input_ms=0.5, compute_infer_ms=4.0, compute_output_ms=0.5, batch_images=12.5)


def level(
    load: Load,
    outcomes: Sequence[str] = (OK,),
    *,
    server: ServerTimes | None = SERVER,
    generator_cpu: float = 0.2,
    times: Sequence[float] = (),
) -> Level:
    samples = [Sample(1.0, 1.002, 1.005, 1.010, outcome) for outcome in outcomes]
    window = Window(1.0, 2.0)
    if times:
        samples, window = [Sample(moment, moment, moment, moment, OK) for moment in times], Window(0.0, 5.0)
    return Level(
        load=load,
        summary=summarise(samples, window, images=50, open_loop=isinstance(load, Open)),
        server=server,
        generator_cpu=generator_cpu,
        interrupted=False,
        samples=samples,
        window=window,
    )


def test_the_parts_of_a_row_add_up_to_the_mean_latency() -> None:
    row = as_row(level(Closed(4)))
    parts = ["send_ms", "network_ms", "queue_ms", "compute_input_ms", "compute_infer_ms", "compute_output_ms"]
    figures = [row[name] for name in parts]
    assert figures == pytest.approx([2.0, 2.0, 1.0, 0.5, 4.0, 0.5])
    assert row["mean_ms"] == pytest.approx(10.0)
    assert row["concurrency"] == 4
    assert row["images_per_s"] == pytest.approx(50.0)


def test_a_server_that_counts_more_than_its_clients_waited_leaves_no_negative_rest() -> None:
    slow = ServerTimes(
        queue_ms=99.0, compute_input_ms=0.0, compute_infer_ms=0.0, compute_output_ms=0.0, batch_images=None
    )
    assert as_row(level(Closed(1), server=slow))["network_ms"] == 0.0


def test_without_server_statistics_their_columns_are_empty() -> None:
    row = as_row(level(Open(100.0), server=None))
    assert (row["queue_ms"], row["network_ms"], row["batch_images"]) == (None, None, None)
    assert row["offered_per_s"] == pytest.approx(1.0)
    headings, _ = as_cells([row])
    assert headings == ["requests/s", "images/s", "p50", "p90", "p95", "p99", "p99.9", "send"]


def test_cells_show_what_there_is() -> None:
    headings, [cells] = as_cells([as_row(level(Closed(4), [OK, "503"]), streams=True)], with_goodput=True)
    shown = dict(zip(headings, cells, strict=True))
    assert shown == {
        "clients": "4",
        "images/s": "50.0",
        "in time/s": "50.0",
        "first p50": "5.00",
        "p50": "10.00",
        "p90": "10.00",
        "p95": "10.00",
        "p99": "10.00",
        "p99.9": "10.00",
        "send": "2.00",
        "network": "2.00",
        "queue": "1.00",
        "compute": "5.00",
        "batch": "12.5",
        "not answered": "1 x 503",
    }


def test_csv_holds_every_row_and_leaves_unknown_cells_empty(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(path, [as_row(level(Closed(1))), as_row(level(Closed(2), ["timeout"], server=None))])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["concurrency"], first["p99_ms"], first["queue_ms"]) == ("1", "10.0", "1.0")
    assert (second["p99_ms"], second["queue_ms"], second["errors"]) == ("", "", "1 x timeout")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="missing"):
        write_csv(tmp_path / "missing" / "out.csv", [as_row(level(Closed(1)))])


def test_a_folder_that_there_is_not_is_named_before_the_measurement(tmp_path: Path) -> None:
    check_folder(tmp_path / "out.csv")
    with pytest.raises(InvalidInput, match=r"no folder .*missing"):
        check_folder(tmp_path / "missing" / "out.csv")


@pytest.mark.parametrize(
    ("load", "rate", "noted"),
    [
        (Open(40.0), 40, False),  # 40 +- 6.3 in each fifth: a first fifth of 24 is scatter
        (Open(40.0, "constant"), 40, True),
        (Closed(1), 40, True),
        (Open(4000.0), 4000, True),  # 4000 +- 63
    ],
)
def test_chance_is_not_called_unsteady(load: Load, rate: int, noted: bool) -> None:
    begun = [number / rate for number in range(5 * rate)]
    moments = [moment for number, moment in enumerate(begun) if moment >= 1.0 or number % 10 < 6]
    measured = level(load, times=moments)
    assert measured.summary.unsteady is not None
    assert measured.summary.unsteady > 0.3
    assert any("lengthen" in caution for caution in cautions([measured])) is noted


def test_cautions_say_what_to_doubt() -> None:
    assert list(cautions([level(Closed(1))])) == []
    [busy] = cautions([level(Closed(1), generator_cpu=0.97)])
    assert "97 %" in busy
    silent, counted = cautions([level(Closed(2), ["timeout"])])
    assert "no answer" in silent
    assert "1 x timeout" in counted
