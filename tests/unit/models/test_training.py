"""Training: batches, loss, schedule, configuration, checkpoints, and runs that are killed and resumed."""

import copy
import dataclasses
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import ImageSet
from models.held_out import hold_out
from models.hierarchy import Hierarchy
from tests.shapes import SHAPES, shape_images
from tierkit.errors import DataError, InvalidInput, SetupError, WeightsError
from tierkit.extensions import BUILT_IN
from tierkit.tensors import Array

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.dataset import Dataset  # noqa: E402
from models.training.batches import BatchSource, normalise, statistics  # noqa: E402
from models.training.checkpoint import Checkpoint, load_checkpoint, read_checkpoint, save_checkpoint  # noqa: E402
from models.training.config import CONFIGS, TrainConfig, find_config  # noqa: E402
from models.training.data import TrainingData  # noqa: E402
from models.training.learner import NetworkLearner, averaged_network, served_weights  # noqa: E402
from models.training.loss import Labels, training_loss  # noqa: E402
from models.training.record import TrainingRecord, read_record  # noqa: E402
from models.training.run import RunOptions, train_run  # noqa: E402
from models.training.schedule import learning_rate  # noqa: E402
from models.training.teacher import teacher_probabilities  # noqa: E402
from models.training.trainer import Trainer, TrainerProgress, resume  # noqa: E402

pytestmark = pytest.mark.train


def make_config(**changes) -> TrainConfig:
    fields = {
        "name": "tiny",
        "tier": "end",
        "target": "coarse",
        "auxiliary": 0.5,
        "network": {"kind": "wide-resnet", "options": {"depth": 10, "width": 1}},
        "epochs": 3,
        "batch_size": 8,
        "crop_padding": 1,
        "held_out_per_class": 2,
        "precision": "fp32",
    }
    return TrainConfig.model_validate({**fields, **changes})


@pytest.fixture
def data() -> ImageSet:
    return shape_images(8)


def fine_of(data: ImageSet) -> Array:
    assert data.fine is not None
    return data.fine


def coarse_of(data: ImageSet) -> Array:
    assert data.coarse is not None
    return data.coarse


def source(data: ImageSet, **changes) -> BatchSource:
    config = make_config(**changes)
    split = hold_out(fine_of(data), config.held_out_per_class)
    return BatchSource(data, split.train, config, torch.device("cpu"))


def test_normalised_images_have_no_mean_and_unit_variance(data: ImageSet):
    values = normalise(torch.from_numpy(data.images), statistics(data.images))
    assert abs(float(values.mean())) < 0.01
    assert float(values.std()) == pytest.approx(1, abs=0.01)


def test_an_epoch_sees_each_training_image_once_and_no_held_out_one(data: ImageSet):
    batches = source(data, batch_size=10)
    assert batches.steps_per_epoch == 3
    for epoch in range(2):
        seen = torch.cat([batches.batch(3 * epoch + step).index for step in range(3)])
        assert sorted(seen.tolist()) == list(range(30))


def test_a_stream_shows_each_image_once_over_all_its_parts(data: ImageSet):
    batches = source(data, batch_size=5, stream=True)
    assert batches.steps_per_epoch == 2
    seen = torch.cat([batches.batch(step).index for step in range(6)])
    assert sorted(seen.tolist()) == list(range(30))
    other = source(data, batch_size=5, stream=True, seed=1)
    assert not torch.equal(other.batch(0).index, seen[:5])
    # In whatever order the batches are asked for.
    assert torch.equal(batches.batch(0).index, seen[:5])


def test_a_stream_that_is_too_short_for_its_parts_is_refused(data: ImageSet):
    assert source(data, batch_size=10, stream=True).steps_per_epoch == 1
    with pytest.raises(DataError, match=r"2 batches of 15.* 3 parts"):
        source(data, batch_size=15, stream=True)


def test_label_noise_replaces_a_share_of_the_labels_that_are_trained_on(data: ImageSet):
    true, split = fine_of(data), hold_out(fine_of(data), 2)

    def noisy(**changes) -> tuple[TrainingData, Array]:
        images = TrainingData(make_config(label_noise=0.4, **changes), data, SHAPES)
        return images, images.labels.fine.numpy()

    images, fine = noisy()
    wrong = np.flatnonzero(fine != true)
    assert len(wrong) == round(0.4 * len(split.train))
    assert set(wrong) <= set(split.train)
    assert set(np.unique(fine)) == {0, 1, 2}
    assert images.labels.coarse.tolist() == SHAPES.coarse_labels(fine).tolist()
    assert fine_of(images.held_out).tolist() == true[split.held_out].tolist()
    assert np.array_equal(noisy()[1], fine)
    assert not np.array_equal(noisy(seed=1)[1], fine)
    plain = TrainingData(make_config(), data, SHAPES)
    assert np.array_equal(plain.labels.fine.numpy(), true)
    # Whoever joins a run compares the images, which are the same.
    assert plain.sha256 == images.sha256


@pytest.mark.parametrize("share", [-0.1, 1.0, "some"])
def test_a_share_of_wrong_labels_is_less_than_all(share: object):
    with pytest.raises(ValueError, match="label_noise"):
        make_config(label_noise=share)


def test_a_batch_depends_on_its_number_and_the_seed_alone(data: ImageSet):
    for changes in ({}, {"mixup": 0.4, "cutmix": 1.0}):
        first, again = source(data, **changes).batch(5), source(data, **changes).batch(5)
        assert torch.equal(first.images, again.images)
        assert not torch.equal(first.images, source(data, seed=1, **changes).batch(5).images)


def test_without_padding_a_crop_is_the_image_or_its_mirror_image(data: ImageSet):
    batches = source(data, crop_padding=0)
    batch = batches.batch(0)
    whole = normalise(torch.from_numpy(data.images), batches.statistics)[batch.index]
    mirrored = batch.flipped == 1
    assert 0 < int(mirrored.sum()) < len(mirrored)
    expected = torch.where(mirrored[:, None, None, None], whole.flip(3), whole)
    torch.testing.assert_close(batch.images, expected)


def test_digits_are_neither_mirrored_nor_coloured(data: ImageSet):
    grey = dataclasses.replace(data, images=data.images[..., :1])
    batches = source(grey, crop_padding=0, mirror=False)
    batch = batches.batch(0)
    assert int(batch.flipped.sum()) == 0
    whole = normalise(torch.from_numpy(grey.images), batches.statistics)[batch.index]
    assert whole.shape[1] == 1
    torch.testing.assert_close(batch.images, whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {"kind": "mlp", "options": {"inputs": 784}}},
        {"network": {"kind": "mlp", "options": {"inputs": 192}}, "early_side": 6},
        {"network": {"kind": "mobilenet-v1"}},
    ],
    ids=["size", "early size", "colours"],
)
def test_a_network_that_does_not_take_the_images_is_told_before_the_first_step(data: ImageSet, changes):
    if changes["network"]["kind"] == "mobilenet-v1":
        data = dataclasses.replace(data, images=data.images[..., :1])
    config = make_config(**changes)
    with pytest.raises(DataError, match=r"takes no images of . x . pixels with . colours?: .*--dataset") as caught:
        NetworkLearner(config, TrainingData(config, data, SHAPES))
    assert "\n" not in str(caught.value)


def test_early_epochs_have_small_images(data: ImageSet):
    batches = source(data, early_side=5, early_share=0.34)
    sides = [batches.batch(epoch * batches.steps_per_epoch).images.shape[2] for epoch in range(3)]
    assert sides == [5, 8, 8]


def test_a_cut_mixed_batch_tells_the_share_of_its_own_pixels(data: ImageSet):
    batches, plain = source(data, cutmix=1.0, crop_padding=0), source(data, crop_padding=0)
    for step in range(6):
        mixed, own = batches.batch(step), plain.batch(step).images
        kept = (mixed.images == own).all(dim=1).float().mean(dim=(1, 2))
        others = mixed.partner != torch.arange(len(mixed.partner))
        assert kept[others].min() == pytest.approx(float(mixed.share), abs=0.02)


@pytest.mark.parametrize("schedule", ["one-cycle", "cosine"])
def test_the_rate_rises_to_its_peak_and_falls_to_zero(schedule: str):
    config = make_config(schedule=schedule, warmup=0.2, peak_rate=0.5)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.5 / 20)
    assert max(rates) == rates[19] == pytest.approx(0.5)
    assert rates[:20] == sorted(rates[:20])
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] < 0.01


def test_a_second_classifier_needs_a_network_with_embed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    example = "tests.extension_package.terrace_example.networks:Linear"
    monkeypatch.setitem(BUILT_IN["terrace.networks"], "linear", example)
    config = make_config(network={"kind": "linear", "options": {}}, target="coarse", auxiliary=0.5)
    with pytest.raises(InvalidInput, match=r"network 'linear' has no embed, .* set auxiliary to 0"):
        started(config, shape_images(8), SHAPES, tmp_path)


def test_a_constant_rate_is_the_same_at_each_step():
    config = make_config(schedule="constant", peak_rate=0.5)
    assert {learning_rate(step, 100, config) for step in range(100)} == {0.5}


def test_a_student_that_agrees_with_its_teacher_has_no_distance(data: ImageSet):
    config = make_config(
        target="fine", auxiliary=0, label_smoothing=0, teacher={"runs": ["big"], "weight": 1, "temperature": 3}
    )
    batch = source(data).batch(0)
    teacher = torch.randn(36, 2, 3).log_softmax(2)
    labels = Labels(
        fine=torch.from_numpy(fine_of(data)),
        coarse=torch.from_numpy(coarse_of(data)),
        membership=torch.eye(3),
        teacher=teacher,
    )
    same = teacher[batch.index, batch.flipped]
    assert float(training_loss(same, None, batch, labels, config)) == pytest.approx(0, abs=1e-6)
    other = float(training_loss(same.flip(1), None, batch, labels, config))
    soft, student = (same / 3).softmax(1), (same.flip(1) / 3).log_softmax(1)
    assert other == pytest.approx(9 * float((soft * (soft.log() - student)).sum(1).mean()), rel=1e-4)


def test_both_exits_of_a_network_in_two_parts_learn(data: ImageSet, tmp_path: Path):
    network = {"kind": "early-exit", "options": {"alpha": 0.25, "stem_stride": 2, "width": 1, "blocks": 1}}

    def learnt(weight: float) -> list[bool]:
        config = make_config(target="fine", auxiliary=weight, network=network)
        learner = NetworkLearner(config, TrainingData(config, data, SHAPES))
        learner.backward(0)
        exits = learner.network.network.classifier, learner.network.network.device.classifier
        return [bool(each.weight.grad.abs().sum() > 0) for each in exits]

    assert learnt(1.0) == [True, True]
    assert learnt(0.0) == [True, False]


def test_a_run_learns_and_reports_each_epoch(data: ImageSet, tmp_path: Path):
    trainer = started(make_config(epochs=8, target="fine", auxiliary=0), data, SHAPES, tmp_path)
    seen: list[TrainerProgress] = []
    assert trainer.run(seen.append)
    assert seen[-1].step == trainer.steps
    assert [row["epoch"] for row in trainer.rows] == list(range(1, 9))
    assert trainer.rows[-1]["loss"] < trainer.rows[0]["loss"]
    assert trainer.rows[-1]["held_out_fine"] == 1.0


def test_a_run_on_a_stream_with_label_noise_measures_each_part(data: ImageSet, tmp_path: Path):
    config = make_config(epochs=3, batch_size=5, stream=True, label_noise=0.2, target="fine", auxiliary=0)
    whole = started(config, data, SHAPES, tmp_path / "whole")
    assert whole.run()
    assert (whole.steps, [row["epoch"] for row in whole.rows]) == (6, [1, 2, 3])
    started(config, data, SHAPES, tmp_path / "broken").run(last=3)
    resumed = started(config, data, SHAPES, tmp_path / "broken")
    assert resumed.run()
    assert all(torch.equal(resumed.averaged[name], value) for name, value in whole.averaged.items())


def started(config: TrainConfig, data: ImageSet, hierarchy: Hierarchy, folder: Path) -> Trainer:
    return resume(NetworkLearner(config, TrainingData(config, data, hierarchy)), folder)


def stored(folder: Path) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    assert checkpoint is not None
    return checkpoint


def unbroken(data: ImageSet, folder: Path, config: TrainConfig) -> dict[str, Any]:
    trainer = started(config, data, SHAPES, folder)
    trainer.run()
    return trainer.averaged


def reached(trainer: Trainer, step: int) -> bool:
    return trainer.step >= step


DROPOUT = {"network": {"kind": "mlp", "options": {"inputs": 192, "hidden": [16, 16], "dropout": 0.5}}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bf16", "mixup": 0.2, "cutmix": 1.0, "early_side": 6}, DROPOUT],
    ids=["plain", "mixed", "dropout"],
)
def test_a_stopped_run_goes_on_to_the_same_weights(data: ImageSet, tmp_path: Path, changes):
    config = make_config(**changes)
    expected = unbroken(data, tmp_path / "whole", config)
    for _ in range(3):
        trainer = started(config, data, SHAPES, tmp_path / "parts")
        trainer.run(stop=partial(reached, trainer, trainer.step + 4))
    assert trainer.step == trainer.steps
    assert len(trainer.rows) == config.epochs
    for name, value in trainer.averaged.items():
        assert torch.equal(value, expected[name]), name


def test_a_step_with_dropout_can_be_done_again(data: ImageSet):
    config = make_config(**DROPOUT)
    learner = NetworkLearner(config, TrainingData(config, data, SHAPES))
    learner.learn(0)
    before = copy.deepcopy(learner.state())
    losses, after = [], []
    for _ in range(2):
        learner.restore(*copy.deepcopy(before))
        losses.append(learner.learn(1))
        after.append(copy.deepcopy(learner.state()[0]))
    assert losses[0] == losses[1]
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import torch
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import NetworkLearner
from models.training.trainer import resume

torch.set_num_threads(int(sys.argv[5]))  # sums over another number of threads round otherwise
stored = np.load(sys.argv[1])
hierarchy = Hierarchy.load(Path(sys.argv[2]))
config = TrainConfig.model_validate_json(Path(sys.argv[3]).read_text())
names = tuple(map(str, range(len(stored["fine"]))))
data = ImageSet(**stored, names=names, hierarchy_name="shapes")

def die(progress):
    if progress.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

learner = NetworkLearner(config, TrainingData(config, data, hierarchy))
resume(learner, Path(sys.argv[4]), checkpoint_every_s=0).run(die)
"""


def test_a_killed_run_goes_on_to_the_same_weights(data: ImageSet, tmp_path: Path):
    config = make_config()
    expected = unbroken(data, tmp_path / "whole", config)
    np.savez(tmp_path / "data.npz", images=data.images, fine=fine_of(data), coarse=coarse_of(data))
    (tmp_path / "shapes.toml").write_text(
        'name = "shapes"\nfine = ["circle", "ellipse", "square"]\n'
        '[superclasses]\nround = ["circle", "ellipse"]\nangular = ["square"]\n'
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    files = [str(tmp_path / name) for name in ("data.npz", "shapes.toml", "config.json", "killed")]
    files.append(str(torch.get_num_threads()))
    done = subprocess.run([sys.executable, "-c", KILLED, *files], timeout=50, check=False, env={**os.environ})
    assert done.returncode == -signal.SIGKILL
    checkpoint = stored(tmp_path / "killed")
    assert 0 < checkpoint.step <= 5
    for name, value in unbroken(data, tmp_path / "killed", config).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(("every_s", "steps"), [(0.0, list(range(1, 10))), (3600.0, [9])])
def test_checkpoints_come_after_a_time_and_at_the_end(
    data: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, steps: list[int]
):
    """Writing one can take as long as half an epoch, so the end of an epoch is no reason to write one."""
    saved: list[int] = []
    monkeypatch.setattr("models.training.trainer.save_checkpoint", lambda _, checkpoint: saved.append(checkpoint.step))
    learner = NetworkLearner(make_config(), TrainingData(make_config(), data, SHAPES))
    told: list[int] = []
    assert resume(learner, tmp_path, checkpoint_every_s=every_s).run(lambda at: told.extend([at.step] * at.saved))
    assert saved == told == steps


def test_a_record_tells_no_more_than_the_checkpoint_beside_it(data: ImageSet, tmp_path: Path, monkeypatch):
    dataset = Dataset(name="shapes", hierarchy=SHAPES, source="test", folder=tmp_path, size=(8, 8))
    monkeypatch.setattr(Dataset, "read", lambda *_: data)
    train_run(make_config(), dataset, tmp_path, RunOptions(steps=1))

    def interrupt(progress: TrainerProgress) -> None:
        if progress.row is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_run(make_config(), dataset, tmp_path, RunOptions(report=interrupt))
    folder = tmp_path / "tiny"
    assert (folder / "log.txt").read_text().count("epoch 1/3") == 1
    assert (stored(folder).step, read_record(TrainingRecord, folder).steps) == (1, 1)


def test_a_run_without_matplotlib_is_told_so_first_and_kept(data: ImageSet, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    dataset = Dataset(name="shapes", hierarchy=SHAPES, source="test", folder=tmp_path, size=(8, 8))
    monkeypatch.setattr(Dataset, "read", lambda *_: data)
    said: list[str] = []
    record = train_run(make_config(), dataset, tmp_path, RunOptions(say=said.append))
    assert record.steps == record.planned_steps == stored(tmp_path / "tiny").step
    assert "[plots]" in said[0]
    assert not (tmp_path / "tiny" / "curves.png").exists()


def test_a_truncated_checkpoint_is_named(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(stop=lambda: True)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(WeightsError, match=r"checkpoint\.pt is truncated"):
        started(make_config(), data, SHAPES, tmp_path)


def test_a_checkpoint_whose_weights_are_no_numbers_is_named(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    checkpoint = stored(tmp_path)
    next(iter(checkpoint.averaged.values())).fill_(torch.nan)
    save_checkpoint(tmp_path, checkpoint)
    with pytest.raises(WeightsError, match="diverged"):
        read_checkpoint(tmp_path)


def test_a_run_that_diverges_ends_and_leaves_the_checkpoint_before(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    trainer = started(make_config(), data, SHAPES, tmp_path)
    for value in trainer.learner.network.parameters():
        value.detach().fill_(torch.nan)
    with pytest.raises(InvalidInput, match="diverges, the loss of step 2 is nan"):
        trainer.run()
    assert stored(tmp_path).step == 1


def test_a_run_folder_of_another_configuration_is_refused(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(stop=lambda: True)
    with pytest.raises(WeightsError, match=r"another configuration \(other: batch_size, seed\)"):
        started(make_config(seed=1, batch_size=7), data, SHAPES, tmp_path)


# The same classes with the superclasses in another order: only the coarse labels differ.
TURNED = Hierarchy.parse(
    {**SHAPES.content(), "superclasses": dict(reversed(SHAPES.content()["superclasses"].items()))}, source="test"
)
MORE = Hierarchy.parse(
    {
        "name": "more",
        "fine": [*SHAPES.fine, "star"],
        "superclasses": {"round": ["circle", "ellipse"], "angular": ["square", "star"]},
    },
    source="test",
)


def test_a_checkpoint_of_the_first_format_goes_on(data: ImageSet, tmp_path: Path):
    """Field by field, as runs have written it from the start: long ones wait to go on, or to be exported."""
    config = make_config()
    learner = NetworkLearner(config, TrainingData(config, data, SHAPES))
    learner.learn(0)
    weights, optimizer = learner.state()
    row = {
        "epoch": 1,
        "loss": 1.5,
        "held_out_coarse": 0.5,
        "held_out_fine": None,
        "rate": 0.1,
        "seconds": 2.0,
    }
    content: dict[str, Any] = {
        "step": 5,
        "config": {
            name: value for name, value in config.model_dump(mode="json").items() if name not in {"dataset", "mirror"}
        },
        "hierarchy": {
            "name": "shapes",
            "fine": ["circle", "ellipse", "square"],
            "superclasses": {"round": ["circle", "ellipse"], "angular": ["square"]},
        },
        "data_sha256": data.digest(),
        "statistics": {"mean": 79, "std": 72.5},
        "weights": weights,
        "averaged": {name: value + 1 if value.is_floating_point() else value for name, value in weights.items()},
        "optimizer": optimizer,
        "epochs": [row],
        "loss_sum": 3.0,
        "epoch_seconds": 1.0,
        "seconds": 3.0,
    }
    torch.save(content, tmp_path / "checkpoint.pt")
    trainer = started(config, data, SHAPES, tmp_path)
    assert (trainer.step, trainer.rows, trainer.seconds) == (5, [row], 3.0)
    bias = "network.classifier.bias"
    assert torch.equal(trainer.averaged[bias], content["averaged"][bias])
    network, _, known = averaged_network(load_checkpoint(tmp_path, SHAPES))
    assert torch.equal(network.classifier.bias, content["averaged"][bias])
    assert (known.mean, known.std) == (79, 72.5)
    assert trainer.run()
    assert list(torch.load(tmp_path / "checkpoint.pt", weights_only=True)) == list(content)


def test_a_run_starts_from_the_averaged_weights_of_another(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=2)
    initial = served_weights(stored(tmp_path))
    config = make_config(seed=1)
    later = Trainer(NetworkLearner(config, TrainingData(config, data, SHAPES), initial), tmp_path)
    assert all(torch.equal(later.averaged[f"network.{name}"], value) for name, value in initial.items())


@pytest.mark.parametrize("hierarchy", [TURNED, MORE], ids=["order", "count"])
def test_a_run_for_another_hierarchy_is_refused(data: ImageSet, tmp_path: Path, hierarchy: Hierarchy):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    with pytest.raises(WeightsError, match="belongs to a run for another hierarchy"):
        started(make_config(), data, hierarchy, tmp_path)
    with pytest.raises(WeightsError, match=r"hierarchy 'shapes' \(3 classes in 2 superclasses\)") as caught:
        load_checkpoint(tmp_path, hierarchy)
    assert "\n" not in str(caught.value)


def test_a_run_on_other_images_is_refused(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    fewer, relabelled = data.take(np.arange(33)), dataclasses.replace(data, fine=(fine_of(data) + 1) % 3)
    for other in (fewer, relabelled):
        with pytest.raises(WeightsError, match="on other training images"):
            started(make_config(), other, SHAPES, tmp_path)


def test_a_checkpoint_of_an_older_network_is_refused_in_one_line(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    checkpoint = stored(tmp_path)
    gone = next(iter(checkpoint.weights))
    for weights in (checkpoint.weights, checkpoint.averaged):
        weights["old"] = weights.pop(gone)
    save_checkpoint(tmp_path, checkpoint)
    for use in (lambda: started(make_config(), data, SHAPES, tmp_path), lambda: averaged_network(checkpoint)):
        with pytest.raises(WeightsError, match="does not fit the network") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_run_stops_after_the_steps_asked_for(data: ImageSet, tmp_path: Path):
    for last, reached in ((5, 5), (3, 5), (7, 7)):
        trainer = started(make_config(), data, SHAPES, tmp_path)
        assert not trainer.run(last=last)
        checkpoint = stored(tmp_path)
        assert checkpoint.step == trainer.step == reached
    assert started(make_config(), data, SHAPES, tmp_path).run(last=10_000)


def test_the_answers_of_a_teacher_to_other_images_are_not_used(data: ImageSet, tmp_path: Path):
    config = make_config(name="big", target="fine", auxiliary=0)
    started(config, data, SHAPES, tmp_path / "big").run(last=2)

    def answers(images: ImageSet) -> Any:
        return teacher_probabilities([tmp_path / "big"], images, SHAPES, cache=tmp_path / "answers.safetensors")

    first = answers(data)
    assert torch.equal(answers(data), first)
    turned = data.take(np.arange(36)[::-1].copy())
    assert torch.allclose(answers(turned).exp(), first.flip(0).exp(), atol=1e-2)
    assert not torch.equal(answers(turned), first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "coarse"}, "network and target of the two differ"),
        ({"network": {"kind": "wide-resnet", "options": {"depth": 10, "width": 2}}}, "network and target"),
    ],
    ids=["target", "network"],
)
def test_a_run_cannot_start_from_another_network(tmp_path: Path, data: ImageSet, monkeypatch, changes, message: str):
    dataset = Dataset(name="shapes", hierarchy=SHAPES, source="test", folder=tmp_path, size=(8, 8))
    monkeypatch.setattr(Dataset, "read", lambda *_: data)
    train_run(make_config(name="first", target="fine", auxiliary=0), dataset, tmp_path, RunOptions(steps=1))
    second = make_config(**{"name": "second", "target": "fine", "auxiliary": 0, "initial": "first", **changes})
    with pytest.raises(WeightsError, match=message):
        train_run(second, dataset, tmp_path, RunOptions())
    with pytest.raises(WeightsError, match="trained for hierarchy 'shapes'"):
        train_run(second, dataclasses.replace(dataset, hierarchy=TURNED), tmp_path, RunOptions())


def test_the_summary_of_a_run_counts_those_before_it():
    def record(epochs: int, seconds: float) -> TrainingRecord:
        return TrainingRecord(
            config=make_config(),
            data="shapes",
            train_images=30,
            held_out_images=6,
            steps=9,
            planned_steps=9,
            minutes=seconds / 60,
            hardware="a core",
            environment={},
            commit=None,
            epochs=({},) * epochs,
            source_sha256="",
        )

    facts = record(1, 90).facts([record(2, 60)])
    assert (facts.epochs, facts.minutes) == (1, 1.5)
    assert (facts.total_epochs, facts.total_minutes) == (3, 2.5)


def test_a_full_disk_leaves_the_old_checkpoint_whole(data: ImageSet, tmp_path: Path, monkeypatch):
    started(make_config(), data, SHAPES, tmp_path).run(stop=lambda: True)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SetupError, match="No space left"):
        started(make_config(), data, SHAPES, tmp_path).run()
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_checkpoint_with_an_unknown_field_is_of_another_configuration(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    checkpoint = stored(tmp_path)
    checkpoint.config["colour"] = 1
    save_checkpoint(tmp_path, checkpoint)
    with pytest.raises(WeightsError, match=r"another configuration \(other: colour\)"):
        started(make_config(), data, SHAPES, tmp_path)
    with pytest.raises(WeightsError, match="colour is unknown"):
        averaged_network(load_checkpoint(tmp_path, SHAPES))


@pytest.mark.parametrize("step", [-1, 10_000])
def test_a_checkpoint_of_a_step_that_there_is_not_is_damaged(data: ImageSet, tmp_path: Path, step: int):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    save_checkpoint(tmp_path, dataclasses.replace(stored(tmp_path), step=step))
    with pytest.raises(WeightsError, match=r"checkpoint\.pt is damaged"):
        started(make_config(), data, SHAPES, tmp_path)


def test_a_checkpoint_without_state_of_the_optimiser_does_not_go_on(data: ImageSet, tmp_path: Path):
    started(make_config(), data, SHAPES, tmp_path).run(last=1)
    save_checkpoint(tmp_path, dataclasses.replace(stored(tmp_path), optimizer={}))
    with pytest.raises(WeightsError, match="no state to continue from"):
        started(make_config(), data, SHAPES, tmp_path)


def test_labels_outside_the_hierarchy_are_refused(data: ImageSet, tmp_path: Path):
    with pytest.raises(DataError, match="label 9 is outside"):
        started(make_config(), dataclasses.replace(data, fine=fine_of(data) + 7), SHAPES, tmp_path)


def test_every_bundled_configuration_is_valid_and_named_as_its_file():
    names = {path.stem for path in CONFIGS.glob("*.toml")}
    assert {"mobilenet-v1-0.5", "resnet-34", "wrn-16-4", "wrn-28-10", "mnist-100", "mnist-64-64"} <= names
    for name in names:
        assert find_config(name, None).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 'many'", "epochs"),
        ("colour = 1", "colour is unknown"),
        ("name = ", "not valid TOML"),
        ("name = '../x'", "name is '../x'"),
        ("initial = '../x'", "initial is '../x'"),
        ("peak_rate = inf", "peak_rate is inf"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(tmp_path: Path, text: str, message: str):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(SetupError, match=message):
        find_config("bad", tmp_path / "bad.toml")


def test_a_configuration_that_is_not_there(tmp_path: Path):
    with pytest.raises(InvalidInput, match="no bundled configuration 'vgg'; there is: "):
        find_config("vgg", None)
    with pytest.raises(SetupError, match="cannot read"):
        find_config("vgg", tmp_path / "absent.toml")


def test_a_configuration_of_another_name_is_refused():
    file = CONFIGS / "wrn-16-4.toml"
    assert find_config("wrn-16-4", file) == find_config("wrn-16-4", None)
    with pytest.raises(InvalidInput, match="is called 'wrn-16-4', not 'mine'"):
        find_config("mine", file)
