"""Class names: where they are read from, and what contradicts them."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.importing.labels import agreed, names_in, names_in_config, names_in_metadata, numbered, read_labels
from tierkit.errors import DataError, InvalidInput

THREE = ("bolt", "nut", "washer")


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (["bolt", "nut", "washer"], THREE),
        ({"id2label": {"0": "bolt", "1": "nut", "2": "washer"}, "image_size": 24}, THREE),
        ({"id2label": {"2": "washer", "0": "bolt", "1": "nut"}}, THREE),
        ({"id2label": {str(n): f"c{n}" for n in range(12)}}, tuple(f"c{n}" for n in range(12))),
        ({"0": ["n1", "bolt"], "1": ["n2", "nut"], "2": ["n3", "washer"]}, THREE),
        ({"bolt": 0, "washer": 2, "nut": 1}, THREE),
        ({0: "bolt", 1: "nut", 2: "washer"}, THREE),
        ({"class_to_idx": {"bolt": 0, "washer": 2, "nut": 1}, "epochs": 3}, THREE),
        ({"idx_to_class": {"0": "bolt", "1": "nut", "2": "washer"}, "epochs": 3}, THREE),
        ({"class_mapping": {"bolt": "0", "nut": "1", "washer": "2"}, "epochs": 3}, THREE),
        ({"idx2label": list(THREE), "epochs": 3}, THREE),
        ({"architecture": "x", "label_names": list(THREE)}, THREE),
        ({"pretrained_cfg": {"label_names": list(THREE)}}, THREE),
        ({"id2label": {"0": "bolt", "2": "washer"}}, None),
        ({"id2label": {"1": "bolt", "2": "nut"}}, None),
        ({"image_size": 24}, None),
        ({}, None),
        ([1, 2], None),
        ("bolt", None),
    ],
)
def test_names_in_json(tmp_path: Path, content: Any, names: tuple[str, ...] | None) -> None:
    assert names_in(content) == names
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(content))
    if names is not None and isinstance(content, dict):
        assert read_labels(path) == names
    elif names is None:
        with pytest.raises(DataError):
            read_labels(path)


def test_a_configuration_has_names_only_where_it_says_so() -> None:
    assert names_in_config({"id2label": {"0": "bolt", "1": "nut"}, "port": 0}) == ("bolt", "nut")
    assert names_in_config({"label2id": {"bolt": 0, "nut": 1}}) == ("bolt", "nut")
    assert names_in_config({"port": 0, "debug": 1}) is None


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        ({"names": "{0: 'bolt', 1: 'nut', 2: 'washer'}"}, THREE),
        ({"names": "['bolt', 'nut', 'washer']"}, THREE),
        ({"Labels": '["bolt", "nut", "washer"]'}, THREE),
        ({"id2label": '{"0": "bolt", "1": "nut", "2": "washer"}'}, THREE),
        ({"class_to_idx": "{'bolt': 0, 'nut': 1, 'washer': 2}"}, THREE),
        ({"idxToClass": '{"0": "bolt", "1": "nut", "2": "washer"}'}, THREE),
        ({"classes": "bolt,nut, washer"}, THREE),
        ({"labels": "bolt\nnut\nwasher\n"}, THREE),
        ({"model_info labels": "bolt nut washer"}, THREE),
        ({"license": "MIT"}, None),
        ({"names": ""}, None),
    ],
)
def test_names_in_metadata(metadata: dict[str, str], names: tuple[str, ...] | None) -> None:
    told: list[str] = []
    assert names_in_metadata(metadata, told.append) == names
    assert told == []


@pytest.mark.parametrize("text", ["{0: 'bolt', 1: nut}", "__import__('os')", "{" * 100_000, "{0: 'bolt', 7: 'nut'}"])
def test_names_that_cannot_be_read_are_told(text: str) -> None:
    told: list[str] = []
    assert names_in_metadata({"names": text}, told.append) is None
    assert "names" in told[0]


def test_numbers_are_no_names() -> None:
    assert numbered(("LABEL_0", "LABEL_1"))
    assert numbered(("0", "1", "2"))
    assert not numbered(("4", "5 euros"))


FILE = "the metadata of the file"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (THREE, THREE),
        (THREE, None),
        (None, THREE),
        (THREE, ("Bolt", "NUT", "washer ")),
        (THREE, ("LABEL_0", "LABEL_1", "LABEL_2")),
        (("bolt", "nut", "washer"), ("bolt, screw", "nut", "washer, ring")),
        (("fire_engine", "nut", "bolt"), ("fire engine", "nut", "bolt")),
    ],
)
def test_names_that_agree(given: tuple[str, ...] | None, found: tuple[str, ...] | None) -> None:
    told: list[str] = []
    assert agreed(given, {FILE: found}, told.append) == (given or found)
    assert told == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (THREE, ("nut", "bolt", "washer")),
        (THREE, ("nut", "washer", "bolt")),
        (THREE, ("bolt", "nut", "screw")),
        (THREE, ("bolt", "nut")),
        (("car, red", "car, blue"), ("car, blue", "car, red")),
        (None, None),
        (None, ("LABEL_0", "LABEL_1")),
    ],
)
def test_names_that_contradict_each_other_or_are_missing(given: Any, found: Any) -> None:
    with pytest.raises(InvalidInput):
        agreed(given, {FILE: found}, lambda _: None)


def test_two_files_must_agree() -> None:
    with pytest.raises(InvalidInput, match=r"config\.json"):
        agreed(None, {FILE: THREE, "config.json": ("nut", "bolt", "washer")}, lambda _: None)


def test_other_words_for_all_classes_are_told() -> None:
    told: list[str] = []
    german = ("Schraube", "Mutter", "Scheibe")
    assert agreed(german, {FILE: THREE}, told.append) == german
    assert "Schraube" in told[0]


def test_names_of_a_file_that_are_used_must_differ() -> None:
    twice = ("crane", "crane", "bolt")
    with pytest.raises(DataError, match="twice"):
        agreed(None, {FILE: twice}, lambda _: None)
    assert agreed(("crane bird", "crane lift", "bolt"), {FILE: ("x", "x", "y")}, lambda _: None)[0] == "crane bird"
