"""Training of a personal head on kept pictures, and the decision if it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import onnx
import torch
from onnx import numpy_helper

from models.kept.store import KeptStore
from models.manifest import Manifest
from models.personal import mark_of
from models.session import open_session
from tests.own_networks import SIDE, entry_of, kept_picture, network, png
from tests.shapes import SHAPES, shape_images
from tierkit.errors import DataError, SetupError, WeightsError
from tierkit.tensors import Array
from training.improve import personal
from training.improve.personal import FOLDS, ServedNetwork, fold_of, head_config, make_head
from training.improve.successor import answers_of_file

pytestmark = pytest.mark.train


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps as small as these cost more to share than to compute; and the weights are random ones."""
    monkeypatch.setattr(personal, "RATE", 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def served(content: bytes, **changes: Any) -> ServedNetwork:
    entry = entry_of(content, **changes)
    manifest = Manifest(hierarchy=SHAPES.content(), data_source="test", models=(entry,))
    return ServedNetwork(manifest=manifest, entry=entry, content=content, release=7)


def keep(folder: Path, *, sheets: int = 9) -> Path:
    """Keep 36 pictures of each sheet, with right answers from above."""
    store = KeptStore(folder, 10_000_000)
    for sheet in range(sheets):
        images = shape_images(SIDE, sheet)
        assert images.fine is not None
        for number, (pixels, label) in enumerate(zip(images.images, images.fine, strict=True)):
            content = png(pixels)
            store.keep(kept_picture(1 + 36 * sheet + number, int(label), content), content)
    store.close()
    return folder


def answers(content: bytes, images: Array) -> Array:
    labels: Array = open_session(content, "test").run(["logits"], {"images": images})[0].argmax(1)
    return labels


def test_a_better_head_is_written_with_its_record(tmp_path: Path) -> None:
    content = network()
    outcome = make_head(served(content), keep(tmp_path))
    record = outcome.record
    assert outcome.passes, outcome.reason
    assert mark_of(tmp_path, record.base) is not None
    new = (tmp_path / "personal" / f"{record.base}.onnx").read_bytes()
    assert (record.base, record.sha256) == tuple(hashlib.sha256(each).hexdigest() for each in (content, new))
    assert record.pictures == record.figures["held_out_pictures"] == 9 * 36
    assert record.release == 7
    assert record.temperature >= 1.0
    assert json.loads((tmp_path / "personal" / f"{record.base}.json").read_bytes())["sha256"] == record.sha256
    fresh = shape_images(SIDE, 100)
    assert np.mean(answers(new, fresh.images) == fresh.fine) > np.mean(answers(content, fresh.images) == fresh.fine)
    held = {item.name: numpy_helper.to_array(item) for item in onnx.load_from_string(content).graph.initializer}
    stored = onnx.load_from_string(new).graph.initializer
    assert {item.name for item in stored if (numpy_helper.to_array(item) != held[item.name]).any()} == {"last", "shift"}


def test_no_head_is_written_if_it_is_not_better(tmp_path: Path) -> None:
    first = make_head(served(network()), keep(tmp_path / "first"))
    assert first.passes
    good = (tmp_path / "first" / "personal" / f"{first.record.base}.onnx").read_bytes()
    outcome = make_head(served(good), keep(tmp_path / "second"))
    assert not outcome.passes
    assert outcome.reason
    assert not (tmp_path / "second" / "personal").exists()


def test_a_picture_is_judged_by_a_head_that_was_trained_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: dict[bytes, set[str]] = {}
    judged: list[tuple[set[str], set[str]]] = []
    train, answer = personal.trained_head, answers_of_file

    def digests(pictures: Array) -> set[str]:
        return {hashlib.sha256(png(pixels)).hexdigest() for pixels in pictures}

    def noted(content: bytes, own: Any, config: Any, images: Any, stand_back: Any) -> bytes:
        made = train(content, own, config, images, stand_back)
        trained[made] = digests(images.images)
        return made

    def answered(manifest: Any, entry: Any, content: bytes, pictures: Array) -> Any:
        if content in trained:
            judged.append((trained[content], digests(pictures)))
        return answer(manifest, entry, content, pictures)

    monkeypatch.setattr(personal, "trained_head", noted)
    monkeypatch.setattr(personal, "answers_of_file", answered)
    outcome = make_head(served(network()), keep(tmp_path))
    assert len(judged) == FOLDS
    assert not any(seen & asked for seen, asked in judged)
    assert set().union(*(asked for _, asked in judged)) == max(trained.values(), key=len)
    assert sum(len(asked) for _, asked in judged) <= outcome.record.pictures
    assert all(len({fold_of(each) for each in asked}) == 1 for _, asked in judged)


def test_the_newest_pictures_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path)
    monkeypatch.setattr(personal, "MOST_PICTURES", 300)
    outcome = make_head(served(network()), tmp_path)
    assert outcome.passes
    assert outcome.record.pictures == 300


@pytest.mark.parametrize("sheets", [0, 1])
def test_too_few_pictures_are_counted(sheets: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\d+ (of|kept)"):
        make_head(served(network()), keep(tmp_path, sheets=sheets))
    assert not (tmp_path / "personal").exists()


def test_pictures_of_one_part_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture would be left to train on."""
    monkeypatch.setattr(personal, "FOLDS", 1)
    with pytest.raises(DataError, match="alike"):
        make_head(served(network()), keep(tmp_path))
    assert not (tmp_path / "personal").exists()


def test_a_folder_without_kept_pictures_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=tmp_path.name):
        make_head(served(network()), tmp_path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities
def test_a_training_that_diverges_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="finite"):
        make_head(served(network(last=np.full((6, 3), 3e38, np.float32))), keep(tmp_path))
    assert not (tmp_path / "personal").exists()


def test_a_training_stands_back_between_steps(tmp_path: Path) -> None:
    asked: list[bool] = []
    assert make_head(served(network()), keep(tmp_path), lambda: asked.append(True)).passes
    assert len(asked) > (personal.FOLDS + 1) * personal.STEPS


def test_the_recipe_is_bounded() -> None:
    config = head_config(entry_of(network()))
    assert (config.epochs, config.batch_size, config.peak_rate) == (personal.STEPS, personal.BATCH, 1.0)
