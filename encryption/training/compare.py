"""Several learned encoders of one network under the same attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from encryption.audit.rows import Row, Subject, strongest
from encryption.audit.run import Budget, run_audit
from encryption.front import Front, Setting
from encryption.training.record import EncoderRecord
from models.data import ImageSet
from models.dataset import Dataset
from models.held_out import held_out_per_class, hold_out
from models.manifest import EncoderEntry, load_manifest, records_folder
from models.session import load_model
from models.speed import measure_ms_per_image, probe_images
from models.training.record import hardware, read_record
from tierkit.errors import InvalidInput
from tierkit.types import EncoderKind

__all__ = ["compare_encoders"]

_TASK = 50


def compare_encoders(
    places: Sequence[Path],
    network: str,
    dataset: Dataset,
    *,
    images: int,
    queries: int,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> Front:
    """Attack the learned encoder of `network` in each weights folder, in the same way that `terrace privacy audit`
    does, and measure its costs. The attacked images, and the images for the accuracy, were held out from training: this
    comparison chooses a setting, and the test images are only for the chosen one.

    Args:
        places: weights folders that `export_encoder` wrote; all are compared with the networks of the first one.
        images: number of held-out images to attack; all if there are fewer.
        queries: pictures that each attacker shows its decoder.
        say: called with lines about the progress.

    Raises:
        InvalidInput: no folder.
        NotFound: a folder has no such encoder.
        DataError: too few images.
        WeightsError: a file or a training record is missing or damaged.
    """
    if not places:
        raise InvalidInput("name the weights folders whose encoders are to be compared")
    train, held_out = _parted(places, network, dataset)
    budget = Budget.standard(images, queries)
    settings: list[Setting] = []
    for place in places:
        entry = load_manifest(place).encoder(f"{network}.{EncoderKind.BOTTLENECK}")
        worst = _worst(place, network, train, held_out, budget, seed)
        setting = _setting(place, entry, worst)
        say(f"{setting.name}: {setting.attack} gets SSIM {setting.ssim:.3f}, fine {setting.fine_accuracy:.4f}")
        settings.append(setting)
        plain_accuracy = worst.fine_accuracy + worst.accuracy_lost
    manifest = load_manifest(places[0])
    end = manifest.default_for("end")
    model = load_model(end, places[0], labels=manifest.labels(end))
    return Front(
        network=network,
        plain_accuracy=plain_accuracy,
        end_network=end.name,
        end_ms_per_image=measure_ms_per_image(model, probe_images(end.input_shape), (_TASK,))[_TASK],
        attacked_images=images,
        effort=f"the attacks of an audit, decoders trained on {queries:,} queries",
        hardware=hardware("cpu"),
        settings=tuple(settings),
    )


def _parted(places: Sequence[Path], network: str, dataset: Dataset) -> tuple[ImageSet, ImageSet]:
    """The images that the network was trained on, and those that neither its training nor its encoders' have seen."""
    train = dataset.read("train")
    assert train.fine is not None  # a data set for training has labels
    folder = records_folder(places[0])
    split = hold_out(train.fine, held_out_per_class([load_manifest(places[0]).entry(network)], folder))
    return train.take(split.train), train.take(split.held_out)


def _worst(place: Path, network: str, train: ImageSet, attacked: ImageSet, budget: Budget, seed: int) -> Row:
    """The attack that got most out of the learned encoder in a weights folder."""
    manifest = load_manifest(place)
    subject = Subject(kind=EncoderKind.BOTTLENECK, network=manifest.entry(network), form="uint8")
    rows = run_audit((subject,), manifest, place, train, attacked, budget, seed=seed).rows
    return strongest(rows, subject.encoder, network)


def _setting(place: Path, entry: EncoderEntry, worst: Row) -> Setting:
    assert entry.training is not None  # a learned one
    config = read_record(EncoderRecord, records_folder(place), entry.training.record).config
    own_noise = entry.noise == config.encoder.noise
    return Setting(
        name=entry.training.config + ("" if own_noise else f", noise {entry.noise:g}"),
        ssim=worst.ssim,
        attack=worst.attack,
        fine_accuracy=worst.fine_accuracy,
        payload_bytes=worst.payload_bytes,
        device_ms_per_image=worst.device_ms_per_image,
        channels=entry.feature_shape[0],
        levels=entry.levels,
        noise=entry.noise,
        adversary_weight=config.adversary.weight,
        minutes=entry.training.total_minutes,
    )
