"""The label hierarchy: reading it, refusing wrong ones, summing probabilities."""

import json
from pathlib import Path

import numpy as np
import pytest

from models.hierarchy import Hierarchy, bundled_hierarchy
from tierkit.errors import DataError

SHAPES = {
    "name": "shapes",
    "fine": ["circle", "square", "ellipse"],
    "superclasses": {"round": ["ellipse", "circle"], "angular": ["square"]},
}


def changed(**fields: object) -> dict[str, object]:
    return {**SHAPES, **fields}


def test_labels_follow_the_order_of_the_lists():
    hierarchy = Hierarchy.parse(SHAPES, source="test")
    assert hierarchy.fine == ("circle", "square", "ellipse")
    assert hierarchy.coarse == ("round", "angular")
    assert hierarchy.parent == (0, 1, 0)
    assert hierarchy.coarse_labels(np.array([2, 1])).tolist() == [0, 1]


def test_toml_and_json_say_the_same(tmp_path: Path):
    toml = tmp_path / "shapes.toml"
    toml.write_text(
        'name = "shapes"\nfine = ["circle", "square", "ellipse"]\n'
        '[superclasses]\nround = ["ellipse", "circle"]\nangular = ["square"]\n'
    )
    other = tmp_path / "shapes.json"
    other.write_text(json.dumps(SHAPES))
    assert Hierarchy.load(toml) == Hierarchy.load(other)


def test_content_is_the_inverse_of_parse():
    hierarchy = bundled_hierarchy()
    assert Hierarchy.parse(hierarchy.content(), source="test") == hierarchy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(fine=["circle", "square", "ellipse", "star"]), "'star' stands in no superclass"),
        (changed(fine=["circle", "square", "ellipse", "circle"]), "names 'circle' twice"),
        (
            changed(superclasses={"round": ["circle", "ellipse"], "angular": ["square", "circle"]}),
            "'circle' stands in more than one superclass",
        ),
        (
            changed(superclasses={"round": ["circle", "ellipse"], "angular": ["square", "star"]}),
            "'star' stands in a superclass but not in `fine`",
        ),
        (changed(fine=["circle", "square", "ellipse", *"abcdefg"]), "'a', 'b', 'c', 'd', 'e' and 2 more stand"),
        (changed(superclasses={}), "`superclasses` must map"),
        (changed(superclasses={"round": "circle"}), "`superclasses` must map"),
        (changed(fine=[]), "`fine` must be a list"),
        (changed(fine=["circle", 3]), "`fine` must be a list"),
        (changed(name=""), "needs a `name`"),
        (changed(colour="red"), "unknown field 'colour'"),
        (["circle"], "a hierarchy is a table"),
    ],
)
def test_a_wrong_hierarchy_is_refused_with_the_name_at_fault(content, message: str):
    with pytest.raises(DataError, match=message):
        Hierarchy.parse(content, source="test")


@pytest.mark.parametrize("name", ["broken.toml", "broken.json"])
def test_a_file_that_is_not_valid_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_text("= {")
    with pytest.raises(DataError, match=name):
        Hierarchy.load(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"absent\.toml"):
        Hierarchy.load(tmp_path / "absent.toml")


def test_coarse_probabilities_are_sums_per_superclass():
    hierarchy = Hierarchy.parse(SHAPES, source="test")
    fine = np.array([[0.5, 0.2, 0.3], [0.0, 1.0, 0.0]], dtype=np.float32)
    coarse = hierarchy.coarse_probabilities(fine)
    np.testing.assert_allclose(coarse, [[0.8, 0.2], [0.0, 1.0]], rtol=1e-6)
    assert coarse.dtype == np.float32


def test_probabilities_of_another_number_of_classes_are_refused():
    with pytest.raises(DataError, match="has 3 classes"):
        Hierarchy.parse(SHAPES, source="test").coarse_probabilities(np.ones((1, 100)))


def test_cifar_100_has_five_classes_in_each_of_twenty_superclasses():
    hierarchy = bundled_hierarchy()
    assert (len(hierarchy.fine), len(hierarchy.coarse)) == (100, 20)
    assert np.bincount(hierarchy.parent).tolist() == [5] * 20
    assert hierarchy.fine[0] == "apple"
    assert hierarchy.coarse[hierarchy.parent[0]] == "fruit_and_vegetables"


def test_an_unknown_bundled_hierarchy_is_refused_with_those_there_are():
    with pytest.raises(DataError, match="there is: cifar-100"):
        bundled_hierarchy("imagenet")
