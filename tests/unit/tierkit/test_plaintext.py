"""Text in a spreadsheet: nothing is computed, and the text can be had back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tierkit.plaintext import from_cell, spreadsheet_cell

STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@given(st.text() | st.builds(str.__add__, st.sampled_from(["", "'", "''"]), st.sampled_from(STARTS)))
def test_no_cell_begins_a_formula_and_each_stands_for_its_text(text: str) -> None:
    cell = spreadsheet_cell(text)
    assert not cell.startswith(STARTS)
    assert from_cell(cell) == text


@pytest.mark.parametrize("text", ["", "cam1/IMG_1.JPG", "'tis.png", "a=1.png", "1.5", "ä b, c.png"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert spreadsheet_cell(text) == from_cell(text) == text


def test_a_formula_is_kept_from_being_one() -> None:
    assert spreadsheet_cell("=1+1.png") == "'=1+1.png"
