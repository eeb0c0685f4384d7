"""What the rows of the escalation experiment are called."""

from __future__ import annotations

import pytest

from experiments.escalation import Choice, choices
from tierkit.types import Tier


@pytest.mark.parametrize(
    ("aim", "lowest", "words"),
    [
        ("accuracy", Tier.EDGE, "0.99 of the next tier's accuracy, from edge"),
        ("accuracy", Tier.END, "0.99 of the next tier's accuracy, from end"),
        ("budget", Tier.END, "budget 0.25, from end"),
    ],
)
def test_a_row_says_of_what_it_promises_a_share(aim: str, lowest: Tier, words: str) -> None:
    made = choices((0.25,) if aim == "budget" else (), (0.99,) if aim == "accuracy" else ())
    (found,) = (choice for choice in made if choice.lowest is lowest)
    assert str(found) == words


def test_a_record_of_before_has_the_same_words() -> None:
    for choice in choices((0.1,), (0.95,)):
        point = {"scheme": str(choice.scheme), "escalate": str(choice.escalate), "aim": choice.aim}
        kept = {**point, "escalate_from": None if choice.lowest is None else str(choice.lowest), "choice": "accuracy"}
        assert Choice.of(kept) == choice
