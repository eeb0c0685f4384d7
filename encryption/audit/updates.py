"""Attack on training updates: reads a worker's images back from the gradients that it sends. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encryption.audit.gradients import Seen, choose_prior, from_first_layer, invert_gradient, most_alike
from encryption.audit.similarity import mean_ssim
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import NetworkLearner
from models.training.networks import reseed
from tierkit.tensors import Array

__all__ = ["Attack", "Judge", "Mask", "UpdateAudit"]

_DROPOUT_SEED = 0

Mask = Callable[[Array, np.random.Generator], Array]
"""Changes the values of an update before it is sent, for example by clipping and noise."""

Judge = Callable[[Array], Array]
"""Labels of UINT8 images `[n, h, w, c]`, by a network that had no part in the attack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack on the update of one batch. Images are UINT8 `[n, h, w, c]`."""

    name: str
    """`first layer` or `search`."""
    originals: Array
    labels: Array
    found: Array
    """The most similar reconstruction of each original."""

    @property
    def ssim(self) -> float:
        """Mean structural similarity of originals and reconstructions."""
        return mean_ssim(self.originals, self.found)

    def recognised(self, judge: Judge) -> float:
        """Share of the reconstructions that the judge classifies correctly."""
        return float(np.mean(judge(self.found) == self.labels))


class UpdateAudit:
    """Attacks updates of a network with its first weights, whose gradients are long and reveal most.

    The attacker knows the weights, the units that dropout left out and the classes of the images, as the operator of
    the host would.

    Args:
        config: The network; teacher and second classifier are ignored, because the simplest update reveals most.
        images: Labelled images. Half are the worker's; the attacker tunes its search on the other half.
    """

    def __init__(self, config: TrainConfig, images: ImageSet, hierarchy: Hierarchy) -> None:
        torch.set_num_threads(1)  # so few values do not need a second thread
        # Gradients of gradients need fp32.
        plain = {"precision": "fp32", "teacher": None, "auxiliary": 0.0, "held_out_per_class": 1}
        self._config = config.model_copy(update=plain)
        self._hierarchy = hierarchy
        half = len(images) // 2
        self._worker, self._attacker = images.take(np.arange(half)), images.take(np.arange(half, len(images)))
        self._data = TrainingData(self._config, images, hierarchy)
        self._network = NetworkLearner(self._config, self._data).network
        self._parameters = list(self._network.parameters())

    def attack(self, size: int, mask: Mask, *, steps: int, seed: int) -> Iterator[Attack]:
        """Read the first `size` images of the worker back from the gradient of their batch.

        The first layer is attacked directly if it is dense; the search tries all networks.

        Args:
            mask: Applied to the update before the attacker receives it.
            steps: Length of the search.
            seed: Seeds the mask and the search.
        """
        taken, labels = self._batch(self._worker, size)
        seen = self._seen(taken, labels, mask, seed)
        if self._parameters[0].ndim == 2:
            inputs = from_first_layer(seen.values[0], seen.values[1])
            known = self._data.batches.statistics
            pixels = (inputs * known.std + known.mean).round().clamp(0, 255).to(torch.uint8)
            channels_first = (len(pixels), taken.shape[3], *taken.shape[1:3])
            found = np.asarray(pixels.reshape(channels_first).permute(0, 2, 3, 1).numpy())
            yield Attack(name="first layer", originals=taken, labels=labels, found=most_alike(taken, found))
        own, own_labels = self._batch(self._attacker, size)
        known_updates = [(own, self._seen(own, own_labels, mask, seed + 1))]
        prior = choose_prior(known_updates, steps=max(1, steps // 2), seed=seed)
        found = invert_gradient(seen, taken.shape, prior, steps=steps, seed=seed)
        yield Attack(name="search", originals=taken, labels=labels, found=most_alike(taken, found))

    @staticmethod
    def _batch(images: ImageSet, size: int) -> tuple[Array, Array]:
        chosen = images.take(np.arange(size))
        assert chosen.fine is not None  # images to train on have labels
        return chosen.images, chosen.fine

    def _seen(self, pictures: Array, labels: Array, mask: Mask, seed: int) -> Seen:
        """The update that arrives. It reveals the classes of its images (Zhao et al. 2020, arXiv:2001.02610)."""
        known = self._data.batches.statistics
        targets = labels if self._config.target == "fine" else np.asarray(self._hierarchy.parent)[labels]
        classes = torch.from_numpy(targets.astype(np.int64))

        def gradient(images: Tensor) -> tuple[Tensor, ...]:
            inputs = (255 * images - known.mean) / known.std
            self._network.train()
            reseed(self._network, _DROPOUT_SEED)  # every party to a run knows which units a step leaves out
            output, _ = self._network(inputs.permute(0, 3, 1, 2))
            loss = F.cross_entropy(output, classes)
            values: tuple[Tensor, ...] = torch.autograd.grad(loss, self._parameters, create_graph=True)
            return values

        values = gradient(torch.from_numpy(pictures).float() / 255)
        flat = torch.cat([each.detach().reshape(-1) for each in values]).numpy()
        sent = torch.from_numpy(mask(flat, np.random.default_rng(seed)))
        parts = sent.split([each.numel() for each in values])
        return Seen(
            gradient=gradient, values=[part.reshape(each.shape) for part, each in zip(parts, values, strict=True)]
        )
