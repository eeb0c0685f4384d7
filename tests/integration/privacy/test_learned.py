"""A learned encoder from its training to the answers of a node that is not trusted, and to the audit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from encryption.audit.rows import Subject
from models.data import ImageSet, Split, read_sample
from models.dataset import Dataset
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest, save_manifest, weights_folder
from models.session import load_encoder
from tests.integration.privacy.test_capture import NETWORK, holds_pixels, noise, running, unpacked
from tierkit.errors import WeightsError
from tierkit.types import EncoderKind

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from encryption.audit.decoder import Lessons
from encryption.audit.run import Budget, run_audit
from encryption.audit.whitebox import Search
from encryption.training.config import BottleneckConfig
from encryption.training.export import export_encoder
from encryption.training.run import train_encoder
from models.training.config import TeacherConfig, TrainConfig
from models.training.run import RunOptions, train_run

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

CONFIG = BottleneckConfig.model_validate(
    {
        "name": "tiny",
        "tier": "cloud",
        "target": "fine",
        "upper": NETWORK,
        "start": "random",
        "network": {"kind": "wide-resnet", "options": {"depth": 16, "width": 2}},
        "epochs": 1,
        "batch_size": 8,
        "held_out_per_class": 1,
        "precision": "fp32",
        "encoder": {"widths": [8, 16], "strides": [2, 2], "channels": 12, "levels": 8, "noise": 0.1, "cut": 4},
        "adversary": {"weight": 0.5, "width": 8},
    }
)


class Few(Dataset):
    """Some of the bundled pictures."""

    def read(self, split: Split) -> ImageSet:
        return read_sample().take(np.arange(300) if split == "train" else np.arange(300, 400))


FEW = Few(name="few", hierarchy=bundled_hierarchy(), source="the bundled sample", folder=None, size=(32, 32))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights folder with an encoder that has learned next to nothing."""
    folder, bundled = tmp_path_factory.mktemp("weights"), load_manifest()
    kept = [entry for entry in bundled.models if entry.tier == "end" or entry.name == NETWORK]
    encoders = [entry for entry in bundled.encoders if entry.network == NETWORK and entry.kind is EncoderKind.CONV1]
    for file in (*(entry.file for entry in kept), *(entry.head.file for entry in encoders)):
        (folder / file).symlink_to(weights_folder() / file)
    save_manifest(bundled.model_copy(update={"models": tuple(kept), "encoders": tuple(encoders)}), folder)
    runs = tmp_path_factory.mktemp("runs")
    record = train_encoder(CONFIG, FEW, runs, RunOptions(threads=1, steps=2), upper_runs=runs)
    assert record.steps == 2
    other = shutil.copytree(runs / CONFIG.name, runs / "other")
    with pytest.raises(WeightsError, match=f"holds a run of '{CONFIG.name}'"):
        export_encoder(other, FEW, folder)
    said: list[str] = []
    export_encoder(runs / CONFIG.name, FEW, folder, say=said.append)
    assert said[0].startswith(f"{CONFIG.name} is not finished: it has done 2 of ")
    return folder


def test_a_run_to_start_from_that_is_missing_is_told_before_a_teacher_is_asked(tmp_path: Path):
    said: list[str] = []
    teacher = TeacherConfig(runs=(NETWORK,))
    config = CONFIG.model_copy(update={"start": "run", "teacher": teacher})
    with pytest.raises(WeightsError, match=f"terrace models train {CONFIG.upper}"):
        train_encoder(config, FEW, tmp_path, RunOptions(say=said.append), upper_runs=tmp_path)
    assert said == ["reading the training images"]


def test_a_body_of_another_network_is_refused_before_anything_is_trained(tmp_path: Path):
    with pytest.raises(WeightsError, match="terrace models train missing"):
        train_encoder(_with_body("missing"), FEW, tmp_path, RunOptions(), upper_runs=tmp_path)
    fields = CONFIG.model_dump(include={"tier", "target", "network", "epochs", "batch_size", "held_out_per_class"})
    train_run(TrainConfig(name="other", **fields), FEW, tmp_path, RunOptions(threads=1, steps=1))
    with pytest.raises(WeightsError, match="holds another network"):
        train_encoder(_with_body("other"), FEW, tmp_path, RunOptions(), upper_runs=tmp_path)


def _with_body(run: str) -> BottleneckConfig:
    body = {"run": run, "network": {"kind": "mobilenet-v1", "options": {"alpha": 0.25}}}
    encoder = {"keep": [0, 1], "body": body, "channels": 12, "levels": 8, "noise": 0.1, "cut": 4}
    return BottleneckConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | {"encoder": encoder})


async def test_what_was_exported_is_what_devices_send_and_the_cloud_answers(weights: Path, tmp_path: Path):
    images = noise(4, 7)
    async with running(tmp_path, ("end",), weights, ends=1, clouds=("cloud-0",)) as fleet:
        job = await fleet.run(images, scheme="end-cloud", batch_size=4)
        assert (job.answered_fine, job.fallback, set(job.sent)) == (4, 0, {"bottleneck"}), job.reason
        assert job.sent["bottleneck"].upload_bytes < 4 * 1024
        results = [result async for result in fleet.client.results(job)]
        captured = fleet.captured("cloud-0")
    assert not holds_pixels(captured, images)
    manifest = load_manifest(weights)
    encoder = manifest.encoder(f"{NETWORK}.bottleneck")
    assert (encoder.levels, encoder.noise, encoder.feature_shape) == (8, 0.1, (12, 8, 8))
    (content,) = unpacked(captured)
    packed = np.frombuffer(content, np.uint8)[-4 * 768 :].reshape(4, *encoder.feature_shape)
    # What arrived is the head's output but for noise and rounding, and the answer is the tail's to it.
    network = manifest.entry(NETWORK)
    head, tail = (load_encoder(encoder, network, side, weights) for side in ("head", "tail"))
    arrived = packed.astype(np.float32) * np.float32(encoder.scale)
    plain = head.run({"images": images}, ["features"])["features"]
    assert 0.02 < np.abs(arrived - plain.clip(0, 1)).mean() < 0.2
    fine = tail.run({"features": arrived}, ["probabilities"])["probabilities"]
    names = manifest.hierarchy.fine
    assert [result.label for result in results] == [names[best] for best in fine.argmax(1)]


def test_the_audit_attacks_it_as_the_first_convolution(weights: Path):
    manifest = load_manifest(weights)
    tiny = Budget(
        images=8,
        searched_images=2,
        equations=2,
        search=Search(steps=2, own_images=2),
        lessons=Lessons(images=256, enough=1.0),
        imitation_steps=2,
        overheard=20,
        test_images=50,
    )
    subject = Subject(kind=EncoderKind.BOTTLENECK, network=manifest.entry(NETWORK), form="uint8")
    found = run_audit([subject], manifest, weights, FEW.read("train"), FEW.read("test"), tiny, seed=0)
    # Its head is not linear: there is nothing for least squares.
    assert [row.attack for row in found.rows] == ["black-box", "optimisation", "query-free"]
    assert all(0 < row.payload_bytes <= 768 and not row.counts for row in found.rows)
