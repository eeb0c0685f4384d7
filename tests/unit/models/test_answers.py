"""Files of teachers' answers: complete and likeliest classes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="needs the extra 'learn' (safetensors)")

from models.hierarchy import Hierarchy
from models.training.answers import AnswerFacts, TeacherAnswers, ask, read_answers, write_answers
from tests.shapes import SHAPES, shape_images
from tierkit.errors import DataError, InvalidInput
from tierkit.tensors import Array

DATA = shape_images(8)
FACTS = AnswerFacts(data_sha256=DATA.digest(), hierarchy="shapes", teachers=("big",), teachers_sha256="0" * 64)


def made(facts: AnswerFacts = FACTS) -> TeacherAnswers:
    def teacher(images: Array) -> Array:
        found: Array = images.mean(axis=(1, 2), dtype=np.float32) / 10 + images[:, 0, 0, :] / 100
        return found

    return TeacherAnswers(facts=facts, log_probabilities=ask([teacher], DATA, SHAPES))


def test_a_file_gives_back_the_answers_to_each_image_and_its_mirror_image(tmp_path: Path) -> None:
    answers = made()
    assert answers.log_probabilities.shape == (36, 2, 3)
    assert not np.array_equal(answers.log_probabilities[:, 0], answers.log_probabilities[:, 1])
    write_answers(tmp_path / "file", answers)
    found = read_answers(tmp_path / "file", DATA.digest(), SHAPES)
    assert np.array_equal(found.log_probabilities, answers.log_probabilities)
    assert found.digest == answers.digest


def test_the_rest_of_the_probability_is_spread_over_the_other_classes(tmp_path: Path) -> None:
    answers = made()
    write_answers(tmp_path / "file", answers, top=1)
    found = np.exp(read_answers(tmp_path / "file", DATA.digest(), SHAPES).log_probabilities.astype(np.float32))
    right = np.exp(answers.log_probabilities.astype(np.float32))
    np.testing.assert_allclose(found.max(axis=2), right.max(axis=2), atol=1e-3)
    np.testing.assert_allclose(found.sum(axis=2), 1, atol=0.01)
    rest = np.sort(found, axis=2)[:, :, :2]
    np.testing.assert_allclose(rest[:, :, 0], rest[:, :, 1], atol=1e-3)
    with pytest.raises(InvalidInput, match="--top"):
        write_answers(tmp_path / "file", answers, top=3)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_answers(path, made())
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 8 + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_answers(path, DATA.digest(), SHAPES)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="other training images"):
        read_answers(path, "1" * 64, SHAPES)
    with pytest.raises(DataError, match="hierarchy"):
        read_answers(path, DATA.digest(), Hierarchy.flat("others", ["a", "b", "c"]))
    with pytest.raises(DataError, match="cannot read"):
        read_answers(tmp_path / "missing", DATA.digest(), SHAPES)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
def test_numbers_that_are_no_log_probabilities_are_refused(tmp_path: Path, value: float) -> None:
    answers = made()
    answers.log_probabilities[7, 1] = value
    write_answers(tmp_path / "file", answers)
    with pytest.raises(DataError, match="sum to one"):
        read_answers(tmp_path / "file", DATA.digest(), SHAPES)


def test_teachers_with_other_classes_or_without_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="fine"):
        ask([lambda images: np.zeros((len(images), 2), np.float32)], DATA, SHAPES)
    with pytest.raises(DataError, match="not finite"):
        ask([lambda images: np.full((len(images), 3), np.nan, np.float32)], DATA, SHAPES)
