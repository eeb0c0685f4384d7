"""Several learned encoders of one network under the same attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from encryption.audit.decoder import Lessons, reconstruct, train_decoder
from encryption.audit.target import Target
from encryption.front import Front, Setting
from encryption.metrics import ssim
from encryption.training.record import load_record
from models.dataset import Dataset
from models.manifest import EncoderEntry, load_manifest, records_folder
from models.session import load_encoder, load_model
from models.speed import least_ms_per_image, measure_ms_per_image, probe_images
from models.training.record import hardware
from tierkit.errors import DataError, InvalidInput
from tierkit.types import EncoderKind

__all__ = ["compare_encoders"]

_TASK = 50
_ENOUGH = 0.95


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
    """Attack the learned encoder of `network` in each weights folder with a decoder that is trained on queries, and
    measure what it costs. `terrace privacy audit` has the other attacks.

    Args:
        places: weights folders that `export_encoder` wrote; the first one's networks are what all are compared with.
        images: test images that are attacked.
        queries: pictures that each attacker shows its decoder.
        say: told what is going on.

    Raises:
        InvalidInput: no folder.
        NotFound: a folder has no such encoder.
        DataError: too few images.
        WeightsError: a file or a training record is missing or damaged.
    """
    if not places:
        raise InvalidInput("name the weights folders whose encoders are to be compared")
    train, test = dataset.read("train"), dataset.read("test")
    if len(test) < images:
        raise DataError(f"{images} test images are to be attacked, there are {len(test)}")
    attacked = test.images[:images]
    settings: list[Setting] = []
    for place in places:
        manifest = load_manifest(place)
        entry = manifest.encoder(f"{network}.{EncoderKind.BOTTLENECK}")
        labels = manifest.hierarchy.fine
        head = load_encoder(entry, manifest.entry(network), "head", place, labels=labels)
        target = Target(encoder=entry, form="uint8", head=head, head_file=b"", seed=seed)
        sent = target.send(attacked)
        taught = train_decoder(train.images, target.send, Lessons(images=queries, enough=_ENOUGH), seed)
        alike = float(np.mean(ssim(attacked, reconstruct(taught.decoder, sent))))
        tasks = [attacked[start : start + _TASK] for start in range(0, images, _TASK)]
        setting = _setting(place, entry, alike).model_copy(
            update={
                "payload_bytes": sum(len(target.payload(task)) for task in tasks) / images,
                "device_ms_per_image": least_ms_per_image(target.payload, attacked, _TASK),
            }
        )
        say(f"{setting.name}: SSIM {setting.ssim:.3f}, fine {setting.fine_accuracy:.4f}")
        settings.append(setting)
    manifest = load_manifest(places[0])
    end = manifest.default_for("end")
    plain = manifest.entry(network).fine_accuracy
    assert plain is not None  # an encoder belongs to a network of fine answers
    model = load_model(end, places[0], labels=manifest.labels(end))
    return Front(
        network=network,
        plain_accuracy=plain,
        end_network=end.name,
        end_ms_per_image=measure_ms_per_image(model, probe_images(end.input_shape), (_TASK,))[_TASK],
        attacked_images=images,
        effort=f"a decoder trained on {queries:,} queries",
        hardware=hardware("cpu"),
        settings=tuple(settings),
    )


def _setting(place: Path, entry: EncoderEntry, alike: float) -> Setting:
    """What is known of an encoder before its costs are measured."""
    assert entry.training is not None  # a learned one
    config = load_record(records_folder(place), entry.training.record).config
    own_noise = entry.noise == config.encoder.noise
    return Setting(
        name=entry.training.config + ("" if own_noise else f", noise {entry.noise:g}"),
        ssim=alike,
        attack="black-box",
        fine_accuracy=entry.fine_accuracy,
        payload_bytes=0.0,
        device_ms_per_image=0.0,
        channels=entry.feature_shape[0],
        levels=entry.levels,
        noise=entry.noise,
        adversary_weight=config.adversary.weight,
        minutes=entry.training.total_minutes,
    )
