# mypy: ignore-errors
"""What the rivals' scripts share: their task, the network as Terrace has it, and how accuracy is measured.

It runs in each rival's own environment, without Terrace; so it imports numpy and torch alone. The task's file is an
npz: UINT8 images [n, 784] and labels of the training images and of those held out, the centre and spread of the pixels,
and the initial weights as one vector.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

BATCH, MOMENTUM, WEIGHT_DECAY, DROPOUT = 100, 0.9, 1e-4, 0.1
HIDDEN, CLASSES = (64, 64), 10
"""As in the configuration `mnist-64-64`; momentum is Nesterov's, and biases have no decay."""
EVALUATION_SHARE = 0.05
"""Of the time, that a model which trains on meanwhile is measured; as at Terrace's host."""


def task(**others: type) -> argparse.Namespace:
    """What is to be done; `others` are further options of a script's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--period", type=int, required=True, help="steps of a worker between two exchanges")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--accuracy", type=float, required=True, help="at which the run ends")
    for name, kind in others.items():
        parser.add_argument(f"--{name}", type=kind)
    return parser.parse_args()


def tell(**result: Any) -> None:
    """Print what came of it: `seconds`, `accuracy` and `updates`."""
    print(json.dumps(result), flush=True)  # noqa: T201


class Digits:
    """The task's images, normalised."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        with np.load(path) as file:
            mean, std = float(file["mean"]), float(file["std"])
            self.images, self.held_out = (
                torch.from_numpy((file[f"{part}_images"].astype(np.float32) - mean) / std)
                for part in ("train", "held_out")
            )
            self.labels, self.held_out_labels = (
                torch.from_numpy(file[f"{part}_labels"].astype(np.int64)) for part in ("train", "held_out")
            )
            self._initial = torch.from_numpy(file["initial"])

    def network(self) -> nn.Module:
        """With the initial weights."""
        widths = (self.images.shape[1], *HIDDEN)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.Tanh(), nn.Dropout(DROPOUT)]
        network = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))
        nn.utils.vector_to_parameters(self._initial.clone(), network.parameters())
        return network

    def batches(self, seed: int, part: slice = slice(None)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Without end: each pass over a part of the images in a new order."""
        chance = torch.Generator().manual_seed(seed)
        chosen = torch.arange(len(self.images))[part]
        while True:
            order = chosen[torch.randperm(len(chosen), generator=chance)]
            for at in range(0, len(order) - BATCH + 1, BATCH):
                index = order[at : at + BATCH]
                yield self.images[index], self.labels[index]

    def accuracy(self, network: nn.Module) -> float:
        """On the images held out."""
        network.eval()
        with torch.inference_mode():
            right = (network(self.held_out).argmax(1) == self.held_out_labels).float().mean()
        network.train()
        return float(right)


def sgd(parameters: list[nn.Parameter], rate: float) -> torch.optim.SGD:
    """The optimiser of a worker."""
    return torch.optim.SGD(
        [
            {"params": [each for each in parameters if each.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=rate,
        momentum=MOMENTUM,
        nesterov=True,
    )


class Measuring:
    """Measures a model that trains on, as often as its share of the time allows."""

    def __init__(self, digits: Digits) -> None:
        self._digits, self._next_at = digits, 0.0

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return time.monotonic() >= self._next_at

    def __call__(self, network: nn.Module) -> float:
        """The accuracy now."""
        began = time.monotonic()
        found = self._digits.accuracy(network)
        ended = time.monotonic()
        self._next_at = ended + (ended - began) / EVALUATION_SHARE
        return found
