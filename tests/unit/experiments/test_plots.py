"""What a plot says of the runs that it shows."""

import pytest

from experiments.plots import Figures, counted

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
    warning = figures._figures["plot"].get_suptitle()
    assert warning == ("" if state == "complete" else f"{state} run")
