"""Whether a network gives scores, probabilities or independent labels: by its graph, by its values, and when served."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from models.importing import run
from models.importing.outputs import Ending, Form, Kind, form, own_answers
from models.importing.run import Wish, import_network
from models.manifest import load_manifest
from models.session import load_model, softmax
from tests.unit.models.importing.conftest import COLOURS, Make, picture
from tierkit.errors import TerraceError
from tierkit.types import Tier

SOFT = softmax(np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0], [9.0, 1.0, 1.0]], np.float32))
LOW = np.array([[0.1, 0.3, 0.9], [0.5, 0.2, 0.1]], np.float32)
WIDE = np.array([[-3.0, 2.0, 7.0], [0.5, 20.0, 0.1]], np.float32)
ROUNDED = np.round(SOFT * 256) / 256


@pytest.mark.parametrize(
    ("kind", "before", "values", "expected"),
    [
        ("unbounded", False, WIDE, "scores"),
        ("unbounded", False, LOW, "scores"),  # by chance between 0 and 1
        ("unbounded", False, SOFT, "probabilities"),  # probabilities put into another order by a matrix
        ("unknown", False, WIDE, "scores"),
        ("unknown", False, SOFT, "probabilities"),
        ("unknown", False, LOW, None),
        ("unknown", False, 100 * SOFT, None),
        ("unknown", False, -np.log(SOFT), None),
        ("softmax", True, SOFT, "softmax"),
        ("softmax", True, ROUNDED, "softmax"),
        ("softmax", False, SOFT, "probabilities"),
        ("softmax", False, SOFT / 2, None),
        ("log", False, np.log(SOFT), "scores"),
        ("log", False, np.zeros_like(SOFT), None),
        ("sigmoid", True, LOW, None),
        ("sigmoid", False, SOFT, "probabilities"),  # of two sigmoids, one of the opposite of the other
        ("tanh", False, LOW, None),
        ("tanh", False, -LOW, None),
        ("unknown", False, -SOFT, None),
        ("unbounded", False, -SOFT, None),
        ("unbounded", False, -LOW, "scores"),
        ("turned", False, -LOW, None),
        ("power", False, SOFT, "probabilities"),
        ("power", False, LOW, None),
        ("power", False, np.exp(WIDE), None),
    ],
)
def test_values_of_several_classes(kind: Kind, before: bool, values: Any, expected: Form | None) -> None:
    end = Ending(kind=kind, before=("x",) if before else ())
    if expected is None:
        with pytest.raises(TerraceError):
            form(end, values, 3)
    else:
        assert form(end, values, 3) == expected


@pytest.mark.parametrize(
    ("kind", "before", "values", "expected"),
    [
        ("sigmoid", True, [0.2, 0.9], "sigmoid"),
        ("sigmoid", False, [0.2, 0.9], "probabilities"),
        ("unknown", False, [0.2, 0.9], "probabilities"),
        ("unbounded", False, [-7.0, 2.0], "scores"),
        ("unbounded", False, [0.2, 0.9], "scores"),
        ("unknown", False, [-7.0, 2.0], None),
        ("tanh", False, [-0.7, 0.2], None),
        ("softmax", True, [1.0, 1.0], None),
        ("power", False, [0.2, 0.9], None),
        ("turned", False, [-0.2, -0.9], None),
    ],
)
def test_one_value_for_two_classes(kind: Kind, before: bool, values: Any, expected: Form | None) -> None:
    end, given = Ending(kind=kind, before=("x",) if before else ()), np.array(values, np.float32)[:, None]
    if expected is None:
        with pytest.raises(TerraceError):
            form(end, given, 2)
    else:
        assert form(end, given, 2) == expected


def test_one_output_becomes_two_answers() -> None:
    one = np.array([[0.25]], np.float32)
    assert own_answers(one, "sigmoid").tolist() == [[0.75, 0.25]]
    assert own_answers(one, "scores").tolist() == [[0.0, 0.25]]


# --- imported and served ----------------------------------------------------------------------------------------------


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Imports a network, and returns the probabilities that it gives when it is served."""
    monkeypatch.setattr(run, "least_ms_per_image", lambda *_: 1.0)

    def enter(file: Path, names: tuple[str, ...] = COLOURS) -> Any:
        labels = tmp_path / "names.txt"
        labels.write_text("\n".join(names) + "\n")
        preprocess = tmp_path / "preprocess.toml"
        preprocess.write_text("size = [6, 8]")
        models = tmp_path / "set"
        import_network(Wish(file=file, models=models, tier=Tier.END, labels=labels, preprocess=preprocess))
        entry = load_manifest(models).models[0]
        return load_model(entry, models).run({"images": PICTURES}, ["probabilities"])["probabilities"]

    return enter


PICTURES = np.stack([picture(colour) for colour in COLOURS])


def own(file: Path, output: str) -> Any:
    """What the network itself gives for these pictures."""
    given = PICTURES.transpose(0, 3, 1, 2).astype(np.float32) / 255
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return np.asarray(session.run([output], {"input": given})[0], np.float32)


@pytest.mark.parametrize(
    ("tail", "within"),
    [
        ("softmax", 1e-6),
        ("softmax by hand", 1e-6),
        ("softmax in another shape", 1e-6),
        ("softmax of all pictures in one row", 1e-6),
        ("softmax in half", 1e-3),
        ("softmax in 8 bits", 1 / 256),
        ("quantised softmax", 1 / 128),
    ],
)
def test_confidences_are_those_of_the_network(make: Make, imported: Any, tail: str, within: float) -> None:
    file = make(tail=tail)
    assert np.abs(imported(file) - own(file, "output").reshape(3, 3)).max() <= within


def test_a_logarithm_of_a_softmax_is_as_good_as_scores(make: Make, imported: Any) -> None:
    file = make(tail="log softmax")
    assert imported(file) == pytest.approx(np.exp(own(file, "output")), abs=1e-6)


def test_a_softmax_of_bytes_is_read_before_it_is_rounded(make: Make, imported: Any) -> None:
    file = make(tail="softmax as bytes")
    assert imported(file) == pytest.approx(own(file, "output") / 256, abs=1 / 256)


def test_fp16_throughout(make: Make, imported: Any) -> None:
    probabilities = imported(make(tail="softmax", element=TensorProto.FLOAT16))
    assert probabilities == pytest.approx(imported(make(tail="softmax")), abs=2e-3)


def test_a_thousand_classes_in_8_bits(make: Make, imported: Any) -> None:
    """Small probabilities become 0, and those that are left do not add up to 1."""
    file = make(tail="softmax in 8 bits", classes=1000, factor=12.0)
    given = own(file, "output")
    assert (given.sum(axis=1) < 0.95).all()
    served = imported(file, tuple(f"class {number}" for number in range(1000)))
    assert served.max(axis=1) == pytest.approx(given.max(axis=1), abs=1 / 256)


@pytest.mark.parametrize("tail", ["one sigmoid", "one clipped sigmoid"])
def test_one_sigmoid_is_the_probability_of_the_second_class(make: Make, imported: Any, tail: str) -> None:
    file = make(tail=tail)
    second = own(file, "output")[:, 0]
    assert imported(file, ("ok", "defect")) == pytest.approx(np.stack([1 - second, second], 1), abs=1e-5)


def test_one_sigmoid_follows_the_order_of_the_set(make: Make, imported: Any) -> None:
    imported(make(tail="one sigmoid"), ("ok", "defect"))
    file = make(tail="one sigmoid")
    assert imported(file, ("defect", "ok"))[:, 0] == pytest.approx(own(file, "output")[:, 0], abs=1e-5)


def test_one_score_is_that_of_the_second_class(make: Make, imported: Any) -> None:
    file = make(tail="one score")
    second = 1 / (1 + np.exp(-own(file, "output")[:, 0]))
    assert imported(file, ("ok", "defect"))[:, 1] == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("sigmoid", "sigmoid"),
        ("sigmoid in 8 bits", "sigmoid"),
        ("clipped sigmoid", "sigmoid"),
        ("tanh", "neither"),
        ("softmax in percent", "add up to 100"),
        ("cut softmax", "neither"),
        ("softmax over pictures", "add up to 3"),
        ("negative logarithms", "negative logarithms"),
        ("logarithm of a sigmoid", "sigmoid"),
        ("decision", "no confidence"),
        ("sorted", "TopK"),
        ("distance", "distances"),
        ("chance", "another answer each time"),
    ],
)
def test_outputs_that_are_no_exclusive_classes_are_refused(make: Make, imported: Any, tail: str, words: str) -> None:
    with pytest.raises(TerraceError, match=words):
        imported(make(tail=tail))


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["Softmax", "Neg"], "negated"),
        (["Softmax", "Neg", "Identity"], "negated"),
        (["Softmax", "Reciprocal"], "inverted"),
        (["LogSoftmax", "Reciprocal"], "inverted"),
        (["Sigmoid", "Neg"], "negated"),
        (["Exp"], "Exp"),
        (["Exp", "Identity"], "Exp"),
        (["Exp", "Neg"], "negated"),
    ],
)
def test_what_turns_or_stretches_the_answers_is_refused(
    make: Make, imported: Any, kinds: list[str], words: str
) -> None:
    with pytest.raises(TerraceError, match=words):
        imported(ending_with(make(), *kinds))


@pytest.mark.parametrize("kinds", [["LogSoftmax", "Exp"], ["Neg", "Neg", "LogSoftmax", "Exp"]])
def test_an_exponential_of_logarithms_gives_probabilities(make: Make, imported: Any, kinds: list[str]) -> None:
    file = ending_with(make(), *kinds)
    assert imported(file) == pytest.approx(own(file, "output"), abs=1e-6)


def ending_with(file: Path, *kinds: str) -> Path:
    """The network with some operators behind it."""
    model = onnx.load(file)
    names = ["scores", *(f"end-{number}" for number in range(1, len(kinds))), "output"]
    model.graph.node.extend(
        onnx.helper.make_node(kind, [taken], [given])
        for kind, taken, given in zip(kinds, names[:-1], names[1:], strict=True)
    )
    model.graph.output[0].name = "output"
    file.write_bytes(model.SerializeToString())
    return file


def test_one_tanh_is_refused(make: Make, imported: Any) -> None:
    with pytest.raises(TerraceError, match="one output"):
        imported(make(tail="one tanh"), ("ok", "defect"))
