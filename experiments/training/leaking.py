"""Pictures read back from updates, and what masking costs, for `terrace experiment update-leakage`. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encryption.audit.gradients import Seen, choose_prior, from_first_layer, invert_gradient, most_alike
from encryption.audit.rows import interval_of
from encryption.training.similarity import mean_ssim
from models.data import ImageSet
from models.dataset import Dataset
from models.evaluate import logits_of
from models.manifest import load_manifest
from models.session import load_model
from models.training.config import TrainConfig, find_config
from models.training.data import TrainingData
from models.training.learner import NetworkLearner, predict
from models.training.networks import reseed
from tierkit.inference.model import Array
from training.masking import Masking, masked
from training.simulation import Machines, run_simulation
from training.strategies.config import ServerConfig
from training.units import Computed

__all__ = ["Victim", "accuracy_with"]

_JUDGE = "mnist-100"
_JUDGE_EPOCHS = 2
_WORKERS = 4
_DROPOUT_SEED = 0


class Victim:
    """A worker whose pictures are read from the gradients that it sends, and the network that they are of: with the
    first weights of a run, whose gradients are long and say most.

    Raises:
        DataError: the images are missing.
    """

    def __init__(self, network: str, data: Path | None, seed: int, images: int) -> None:
        torch.set_num_threads(1)  # so few values are not worth a second thread
        # Gradients of gradients are taken in fp32; an update without teacher and second classifier is the simplest.
        plain = {"seed": seed, "precision": "fp32", "teacher": None, "auxiliary": 0.0, "held_out_per_class": 1}
        self.config = find_config(network, None).model_copy(update=plain)
        self._dataset = Dataset.open(self.config.dataset, data)
        train = self._dataset.read("train")
        train = train.take(np.random.default_rng(seed).permutation(len(train))[:images])
        half = len(train) // 2
        self._pictures, self._own = train.take(np.arange(half)), train.take(np.arange(half, len(train)))
        self._data = TrainingData(self.config, train, self._dataset.hierarchy)
        self._network = NetworkLearner(self.config, self._data).network
        self._parameters = list(self._network.parameters())
        self._judge: Callable[[Array], Array] | None = None
        self._priors: dict[tuple[int, Masking | None], float] = {}

    @property
    def has_dense_start(self) -> bool:
        """Whether the first layer sees all pixels at once."""
        return bool(self._parameters[0].ndim == 2)

    def attack(
        self, size: int, number: int, masking: Masking | None, *, steps: int, own: int, seed: int
    ) -> Iterator[tuple[str, Array, Array, Array]]:
        """Read `size` pictures back from the gradient of their batch, in each way that there is. Gives the name of the
        attack, the pictures, UINT8 `[n, h, w, c]`, what came back for each, and their labels.

        Args:
            number: which batch.
            steps: of the search.
            own: batches of the attacker's own, by which it chooses the prior.
        """
        taken, labels = self._batch(self._pictures, size, number)
        seen = self._seen(taken, labels, masking, seed)
        if self.has_dense_start:
            inputs = from_first_layer(seen.values[0], seen.values[1])
            known = self._data.batches.statistics
            pixels = (inputs * known.std + known.mean).round().clamp(0, 255).to(torch.uint8)
            channels_first = (len(pixels), taken.shape[3], *taken.shape[1:3])
            found = np.asarray(pixels.reshape(channels_first).permute(0, 2, 3, 1).numpy())
            yield "first layer", taken, most_alike(taken, found), labels
        prior = self._prior(size, masking, steps=steps // 2, own=own, seed=seed)
        found = invert_gradient(seen, taken.shape, prior, steps=steps, seed=seed)
        yield "search", taken, most_alike(taken, found), labels

    def measured(self, taken: Array, found: Array, labels: Array) -> dict[str, Any]:
        """How much of the pictures came back."""
        judge = self._judged_by()
        recognised = float(np.mean(judge(found) == labels))
        low, high = interval_of(recognised, len(labels))
        return {
            "images": len(taken),
            "ssim": mean_ssim(taken, found),
            "recognised": recognised,
            "recognised_low": low,
            "recognised_high": high,
            "recognised_originals": float(np.mean(judge(taken) == labels)),
        }

    def _prior(self, size: int, masking: Masking | None, *, steps: int, own: int, seed: int) -> float:
        if (size, masking) not in self._priors:
            given = []
            for each in range(own):
                pictures, labels = self._batch(self._own, size, each)
                given.append((pictures, self._seen(pictures, labels, masking, seed + 1 + each)))
            self._priors[size, masking] = choose_prior(given, steps=steps, seed=seed)
        return self._priors[size, masking]

    @staticmethod
    def _batch(images: ImageSet, size: int, number: int) -> tuple[Array, Array]:
        chosen = images.take(np.arange(number * size, (number + 1) * size))
        assert chosen.fine is not None  # what is trained on has labels
        return chosen.images, chosen.fine

    def _seen(self, pictures: Array, labels: Array, masking: Masking | None, seed: int) -> Seen:
        """What arrives for these pictures. Whoever sees it knows their classes, which the gradient tells (Zhao et al.
        2020, arXiv:2001.02610)."""
        known = self._data.batches.statistics
        of_target = labels if self.config.target == "fine" else np.asarray(self._dataset.hierarchy.parent)[labels]
        classes = torch.from_numpy(of_target.astype(np.int64))

        def gradient(images: Tensor) -> tuple[Tensor, ...]:
            inputs = (255 * images - known.mean) / known.std
            self._network.train()
            reseed(self._network, _DROPOUT_SEED)  # which units a step leaves out, every party to a run knows
            output, _ = self._network(inputs.permute(0, 3, 1, 2))
            loss = F.cross_entropy(output, classes)
            values: tuple[Tensor, ...] = torch.autograd.grad(loss, self._parameters, create_graph=True)
            return values

        values = gradient(torch.from_numpy(pictures).float() / 255)
        flat = torch.cat([each.detach().reshape(-1) for each in values]).numpy()
        sent = masked(Computed(values=flat, buffers=flat[:0], loss=0.0), masking, np.random.default_rng(seed)).values
        parts = torch.from_numpy(sent).split([each.numel() for each in values])
        return Seen(
            gradient=gradient, values=[part.reshape(each.shape) for part, each in zip(parts, values, strict=True)]
        )

    def _judged_by(self) -> Callable[[Array], Array]:
        """A network that had no part in it: images to their labels."""
        if self._judge is None:
            self._judge = self._of_the_set() if self.config.dataset != "mnist" else self._trained()
        return self._judge

    def _of_the_set(self) -> Callable[[Array], Array]:
        manifest = load_manifest()
        fine = [entry for entry in manifest.models if entry.fine_accuracy is not None]
        model = load_model(max(fine, key=lambda entry: entry.fine_accuracy or 0.0))
        return lambda images: logits_of(model, images)[0].argmax(axis=1)

    def _trained(self) -> Callable[[Array], Array]:
        changes = {"epochs": _JUDGE_EPOCHS, "seed": self.config.seed + 1, "held_out_per_class": 1}
        config = find_config(_JUDGE, None).model_copy(update=changes)
        data = TrainingData(config, self._own, self._dataset.hierarchy)
        learner = NetworkLearner(config, data)
        for step in range(_JUDGE_EPOCHS * data.batches.steps_per_epoch):
            learner.learn(step)
        network = learner.served()
        return lambda images: predict(network, images, data.batches.statistics, config, data.device).argmax(axis=1)


def accuracy_with(masking: Masking | None, data: Path | None, *, seed: int, epochs: int, images: int) -> float:
    """Test accuracy of `mnist-64-64` after a run of four workers with `sgd` on virtual time.

    Raises:
        DataError: MNIST is missing.
    """
    config: TrainConfig = find_config("mnist-64-64", None).model_copy(update={"seed": seed, "epochs": epochs})
    dataset = Dataset.open("mnist", data)
    held_out = min(config.held_out_per_class, images // 120)
    config = config.model_copy(update={"held_out_per_class": held_out})
    drawn = TrainingData(config, dataset.read("train").take(np.arange(images)), dataset.hierarchy)
    machines = Machines(workers=_WORKERS, step_s=0.001, serve_s=0.0001)
    strategy = ServerConfig(rule="sgd", momentum=0.0, masking=masking)
    return float(run_simulation(config, strategy, drawn, dataset.read("test"), machines)["accuracy"])
