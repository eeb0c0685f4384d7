"""Models at an emulated speed: the right answers, after exactly the right time."""

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from experiments.emulation.compute import LATE, Answers, EmulatedModel, emulate
from tierkit.errors import SetupError
from tierkit.inference.model import Model
from tierkit.tensors import Array, TensorSpec
from tierkit.testing import FakeClock, MadeModel


class SumModel(MadeModel):
    """The sum of an image, at a cost of `cost_s` per image on a fake clock."""

    name = "sum"
    inputs = (TensorSpec(name="images", datatype="UINT8", shape=(-1, 2, 2, 3)),)
    outputs = (TensorSpec(name="sum", datatype="INT64", shape=(-1, 1)),)
    parameters: Mapping[str, str | int | float | bool] = {"precision": "exact"}

    def __init__(self, clock: FakeClock | None = None, cost_s: float = 0.0) -> None:
        self.clock = clock
        self.cost_s = cost_s
        self.runs = 0

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        self.runs += 1
        if self.clock is not None:
            self.clock.advance(self.cost_s * len(inputs["images"]))
        return {"sum": inputs["images"].sum(axis=(1, 2, 3), dtype=np.int64)[:, None]}


IMAGES = np.arange(10 * 12, dtype=np.uint8).reshape(10, 2, 2, 3)


def run(model: Model, images: Array) -> Array:
    return model.run({"images": images}, ["sum"])["sum"]


def test_it_takes_the_emulated_time_and_gives_the_real_answers() -> None:
    clock = FakeClock()
    model = EmulatedModel(SumModel(clock, 0.002), 7.41, clock=clock, sleep=clock.advance)
    started = clock()
    assert (run(model, IMAGES) == run(SumModel(), IMAGES)).all()
    assert clock() - started == pytest.approx(0.0741)


def test_the_real_clock_is_kept_to_a_millisecond() -> None:
    model = EmulatedModel(SumModel(), 2.0)
    spent = []
    for _ in range(10):
        started = time.perf_counter()
        run(model, IMAGES)
        spent.append(time.perf_counter() - started)
    assert min(spent) >= 0.02
    assert sorted(spent)[0] < 0.021  # the best of ten: the others may have met a busy machine


@pytest.mark.parametrize(
    ("cost_s", "batches"),
    [
        (0.021, 3),  # 135.9 ms too long each time, of which 50 ms count
        (0.010, 5),  # 25.9 ms each time, of which 2.2 ms are 3 %
        (0.0078, 60),  # 3.9 ms each time: 1.7 ms beyond 3 %
    ],
)
def test_a_model_that_is_slower_than_emulated_is_an_error(cost_s: float, batches: int) -> None:
    clock = FakeClock()
    model = EmulatedModel(SumModel(clock, cost_s), 7.41, clock=clock, sleep=clock.advance)
    for _ in range(batches - 1):
        run(model, IMAGES)
    took = re.escape(f"took {cost_s * 10_000:.1f} ms for 10 images, which is longer than the emulated 74.1 ms")
    with pytest.raises(SetupError, match=took):
        run(model, IMAGES)


def test_a_little_late_is_forgiven() -> None:
    clock = FakeClock()
    model = EmulatedModel(SumModel(clock, 0.0075), 7.41, clock=clock, sleep=clock.advance)
    for _ in range(1000):
        run(model, IMAGES)


def test_a_moment_in_which_the_machine_does_something_else_is_forgiven_but_not_again_and_again() -> None:
    clock = FakeClock()
    real = SumModel(clock, 0.002)
    model = EmulatedModel(real, 7.41, clock=clock, sleep=clock.advance)
    for _ in range(2):
        real.cost_s = 0.012  # 45.9 ms too long
        run(model, IMAGES)
        real.cost_s = 0.002
        run(model, IMAGES)
    real.cost_s = 0.012
    with pytest.raises(SetupError, match="free the machine"):
        run(model, IMAGES)


def test_the_first_batch_that_is_late_is_told_of_once_also_where_it_is_forgiven(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    real = SumModel(clock, 0.002)
    model = EmulatedModel(real, 7.41, clock=clock, sleep=clock.advance)
    run(model, IMAGES)
    assert caplog.records == []
    real.cost_s = 0.0075
    for _ in range(3):
        run(model, IMAGES)
    (told,) = caplog.records
    assert (told.levelname, told.getMessage()) == ("WARNING", LATE)
    said = vars(told)
    assert (said["model"], said["real_ms"], said["emulated_ms"]) == ("sum", 75.0, 74.1)


def test_a_process_that_was_stopped_amid_a_run_goes_on_as_before() -> None:
    clock = FakeClock()
    real = SumModel(clock, 1.0)
    model = EmulatedModel(real, 7.41, clock=clock, sleep=clock.advance)
    for _ in range(2):
        real.cost_s = 1.0
        run(model, IMAGES)
        real.cost_s = 0.002
        started = clock()
        run(model, IMAGES)
        assert clock() - started == pytest.approx(0.0741)
    for _ in range(20):
        real.cost_s = 0.012
        with pytest.raises(SetupError):
            run(model, IMAGES)
        real.cost_s = 0.002
        run(model, IMAGES)  # what is in time is no fault, whatever was before


def test_answers_computed_beforehand_are_the_real_ones(tmp_path: Path) -> None:
    Answers.compute(SumModel(), IMAGES, batch=3).save(tmp_path / "answers.npz")
    clock = FakeClock()
    slow = SumModel(clock, 1.0)
    model = EmulatedModel(slow, 7.41, Answers.load(tmp_path / "answers.npz", [slow]), clock=clock, sleep=clock.advance)
    started = clock()
    shuffled = IMAGES[[3, 3, 9, 0]]
    assert (run(model, shuffled) == run(SumModel(), shuffled)).all()
    assert run(model, np.zeros_like(IMAGES)).sum() == 0  # what a node warms up with
    assert slow.runs == 0
    assert clock() - started == pytest.approx(14 * 0.00741)


def test_an_image_without_an_answer_is_really_run() -> None:
    quick = SumModel()
    model = EmulatedModel(quick, 0.5, Answers.compute(SumModel(), IMAGES[:5]))
    assert (run(model, IMAGES) == run(SumModel(), IMAGES)).all()
    assert quick.runs == 1


def test_answers_to_other_inputs_of_the_same_model_may_join_them(tmp_path: Path) -> None:
    Answers.compute(SumModel(), IMAGES[:5]).joined(Answers.compute(SumModel(), IMAGES[4:])).save(tmp_path / "both.npz")
    asked = SumModel()
    (model,) = emulate([asked], 0.5, Answers.load(tmp_path / "both.npz", [asked]))
    assert (run(model, IMAGES) == run(SumModel(), IMAGES)).all()
    assert asked.runs == 0


def test_clients_can_tell() -> None:
    model = EmulatedModel(SumModel(), 7.41)
    assert isinstance(model, Model)
    assert model.parameters == {"precision": "exact", "emulated_ms_per_image": 7.41}
    assert (model.name, model.sha256, model.inputs) == ("sum", SumModel.sha256, SumModel.inputs)


def test_the_log_says_so_aloud(caplog: pytest.LogCaptureFixture) -> None:
    (model,) = emulate([SumModel()], 7.41, None)
    assert model.parameters["emulated_ms_per_image"] == 7.41
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "EMULATED COMPUTE" in caplog.text


def test_answers_of_another_model_are_refused(tmp_path: Path) -> None:
    other = SumModel()
    other.sha256 = "6" * 64
    Answers.compute(other, IMAGES).save(tmp_path / "answers.npz")
    with pytest.raises(SetupError, match="holds the answers of another model than sum"):
        Answers.load(tmp_path / "answers.npz", [SumModel()])


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 no zip", b"\x93NUMPY"])
def test_a_file_that_holds_no_answers(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "answers.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SetupError, match="cannot use the file of answers"):
        Answers.load(path, [SumModel()])
