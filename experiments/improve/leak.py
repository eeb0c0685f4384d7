"""Kept pictures that an attacker reconstructs from an update of an improvement. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encryption.audit.gradients import Seen, invert_gradient, most_alike
from encryption.audit.similarity import mean_ssim
from experiments.improve.learning import base_of
from experiments.improve.world import LearningWorld, labelled, stand_ins
from models.training.config import TrainConfig
from models.training.onnx_network import OnnxNetwork
from tierkit.tensors import Array
from training.improve.base import FileNetwork, own_learner, own_training_data, read_base
from training.masking import Masking, masked

__all__ = ["CASES", "Attacker", "LeakCase", "leak_line"]

_PRIOR = 1e-2
"""Weight of the total variation, the middle one of `encryption.audit.whitebox.PRIORS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakCase:
    """An update that is attacked."""

    pictures: int
    """Number of kept pictures of the device, which all have a part in each step."""
    steps: int
    layers: int
    """Number of the last layers that are trained; 0 for all."""
    masking: Masking | None = None
    plain: bool = False
    """True if the pictures are learned without shifts and mirror images, at the full rate from the first step on. That
    is best for an attacker."""
    digits: bool = False
    """True for a small dense network for digits, which shows what the same search can find."""

    @property
    def words(self) -> str:
        pictures = "1 picture" if self.pictures == 1 else f"{self.pictures} pictures"
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        layers = f"last {self.layers} layers" if self.layers else "all layers"
        noise = "" if self.masking is None else f", clip {self.masking.clip:g}, noise {self.masking.noise:g}"
        return f"{'digits: ' if self.digits else ''}{pictures}, {steps}, {layers}{noise}"


CASES = (
    LeakCase(pictures=1, steps=1, layers=0, plain=True, digits=True),
    LeakCase(pictures=1, steps=1, layers=0, plain=True, digits=True, masking=Masking(clip=1.0, noise=0.001)),
    LeakCase(pictures=1, steps=1, layers=0, plain=True),
    LeakCase(pictures=1, steps=1, layers=0, plain=True, masking=Masking(clip=1.0, noise=0.001)),
    LeakCase(pictures=1, steps=1, layers=8, plain=True),
    LeakCase(pictures=32, steps=8, layers=0),
    LeakCase(pictures=32, steps=8, layers=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacker:
    """The search for pictures, and the judge of what it finds."""

    steps: int
    """Length of the search."""
    judge: Callable[[Array], Array]
    """Returns superclasses `[n]` of UINT8 images, by a network that had no part in the attack."""


def leak_line(
    world: LearningWorld, config: TrainConfig, case: LeakCase, attacker: Attacker, seed: int
) -> dict[str, Any]:
    """Search for pictures whose gradient points where the update does (Geiping et al. 2020), knowing the classes.

    Args:
        config: of the training.
    """
    draw = np.random.default_rng(seed)
    drawn = draw.permutation(len(world.own.truth))
    originals = world.own.take(drawn[: case.pictures])
    changes: dict[str, Any] = {"batch_size": case.pictures, "seed": seed}
    if case.plain:
        changes |= {"crop_padding": 0, "mirror": False, "contrast": 1.0, "warmup": 0.0}
    config = config.model_copy(update=changes)
    own = base_of(world.entry, world.content, world.hierarchy, case.layers)
    labels = originals.above.argmax(axis=1)
    images = labelled(originals.images, labels, stand_ins(world), world.hierarchy.name)
    data = own_training_data(config, images, own.classes, sha256=own.sha256)
    network = read_base(world.content, own, config)
    learner = own_learner(network, config, data)
    found = learner.compute(range(case.steps), "change")
    sent = masked(found, case.masking, draw)
    seen = _seen(FileNetwork(OnnxNetwork(world.content), case.layers), sent.values, labels)
    read = invert_gradient(seen, originals.images.shape, _PRIOR, steps=attacker.steps, seed=seed)
    read, judge = most_alike(originals.images, read), attacker.judge
    # An attacker without the update has pictures like these as well.
    others = world.own.take(drawn[case.pictures : 2 * case.pictures])
    return {
        "layers": case.layers,
        "pictures": case.pictures,
        "ssim": mean_ssim(originals.images, read),
        "blind_ssim": mean_ssim(originals.images, most_alike(originals.images, others.images)),
        "recognised": float(np.mean(judge(read) == originals.truth)),
        "recognised_originals": float(np.mean(judge(originals.images) == originals.truth)),
        "recognised_blind": float(np.mean(judge(most_alike(originals.images, others.images)) == originals.truth)),
    }


def _seen(network: FileNetwork, values: Array, labels: Array) -> Seen:
    """The update as it arrives, and the gradients of pictures that the attacker tries."""
    parameters = [each for each in network.parameters() if each.requires_grad]
    classes = torch.from_numpy(np.asarray(labels, np.int64))

    def gradient(images: Tensor) -> Sequence[Tensor]:
        loss = F.cross_entropy(network(255 * images.permute(0, 3, 1, 2)), classes)
        found: tuple[Tensor, ...] = torch.autograd.grad(loss, parameters, create_graph=True)
        return found

    parts = torch.from_numpy(np.asarray(values)).split([each.numel() for each in parameters])
    return Seen(
        gradient=gradient, values=[part.reshape(each.shape) for part, each in zip(parts, parameters, strict=True)]
    )
