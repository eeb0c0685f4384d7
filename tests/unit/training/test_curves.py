"""The curves of a host's run: bounded, kept in its folder, and what of a damaged or longer file becomes of them."""

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from training.host.curves import MOST_POINTS, Curves, RunPoint, extended
from training.messages import CURVES, CURVES_PLOT


def point(updates: int, accuracy: float | None = None, seconds: float | None = None) -> RunPoint:
    return RunPoint(
        seconds=updates / 2 if seconds is None else seconds,
        updates=updates,
        steps=10 * updates,
        loss=1.0,
        accuracy=accuracy,
        bytes_sent=100 * updates,
        bytes_received=200 * updates,
        staleness=0.5,
    )


def test_a_long_run_has_few_points_and_all_that_was_measured_seldom() -> None:
    curve: tuple[RunPoint, ...] = ()
    for updates in range(5_000):
        curve = extended(curve, point(updates, updates / 5_000 if updates % 500 == 0 else None))
        assert len(curve) <= MOST_POINTS
    assert (curve[0].updates, curve[-1].updates) == (0, 4_999)
    assert all(one.updates < other.updates for one, other in pairwise(curve))
    assert [each.accuracy for each in curve if each.accuracy is not None] == [k / 10 for k in range(10)]


def test_a_moment_without_news_is_no_point() -> None:
    curve = extended((point(3),), point(3))
    assert len(curve) == 1
    assert len(extended(curve, point(3, accuracy=0.5))) == 2
    assert len(extended(curve, point(4))) == 2


def test_curves_go_on_where_an_earlier_process_left_them(tmp_path: Path) -> None:
    curves = Curves(tmp_path, 0)
    for updates in range(5):
        curves.add(point(updates, accuracy=0.25))
    curves.write()
    assert Curves(tmp_path, 4).points == curves.points
    # After --accept-loss the run has fewer updates than the file.
    assert [each.updates for each in Curves(tmp_path, 2).points] == [0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"points": [{"seconds": 1}]}',
        b'{"points": "x"}',
        point(1).model_dump_json().replace('"loss":1.0', '"loss":NaN').join(['{"points":[', "]}"]).encode(),
        point(1).model_dump_json().replace('"staleness":0.5', '"staleness":-1').join(['{"points":[', "]}"]).encode(),
        b" " * (2 << 20),
        b'{"points": []}' + b" " * (2 << 20),
    ],
    ids=["empty", "cut", "fields", "text", "nan", "negative", "spaces", "long"],
)
def test_curves_that_cannot_be_read_begin_again_and_cost_no_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CURVES).write_bytes(content)
    curves = Curves(tmp_path, 10)
    assert curves.points == ()
    curves.add(point(1))
    curves.write()
    assert Curves(tmp_path, 10).points == (point(1),)


def test_the_plot_shows_a_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'plots' (matplotlib)")
    curves = Curves(tmp_path, 0)
    curves.draw("nothing yet")
    assert not (tmp_path / CURVES_PLOT).exists()
    curves.add(point(0).model_copy(update={"loss": None, "accuracy": 0.1}))
    curves.add(point(1))
    curves.draw("net with sgd")
    assert (tmp_path / CURVES_PLOT).read_bytes().startswith(b"\x89PNG")
