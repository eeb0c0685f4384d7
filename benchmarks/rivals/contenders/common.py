# mypy: ignore-errors
"""The shared parts of the rivals' scripts: their task, Terrace's network, and the measurement of accuracy.

It runs in each rival's own environment, without Terrace; so it imports only numpy and torch, and reads the network from
its file. The task is a folder with two kinds of files. `images.npz` has the training and held-out images,
UINT8 `[n, h, w, 3]`, their labels, and the centre and spread of the pixels. `SEED.npy` has the initial weights of a
seed as one vector.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

BATCH, MOMENTUM, WEIGHT_DECAY, CLASSES = 100, 0.9, 5e-4, 20
"""Values of `wrn-10-1.toml`; momentum is Nesterov's, and biases and normalisation have no decay."""
_NETWORK = Path(__file__).parents[3] / "models" / "training" / "networks" / "wideresnet.py"
_EVALUATED = 250
"""Images together."""


def task(**others: type) -> argparse.Namespace:
    """Read the task from the command line; `others` are further options of a script."""
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


class Pictures:
    """The task's images, on one thread of torch."""

    def __init__(self, asked: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        folder = Path(asked.data)
        with np.load(folder / "images.npz") as file:
            self._mean, self._std = float(file["mean"]), float(file["std"])
            self._images, self._held_out = (torch.from_numpy(file[f"{part}_images"]) for part in ("train", "held_out"))
            self._labels, self._held_out_labels = (
                torch.from_numpy(file[f"{part}_labels"].astype(np.int64)) for part in ("train", "held_out")
            )
        self._initial = torch.from_numpy(np.load(folder / f"{asked.seed}.npy"))

    def network(self) -> nn.Module:
        """Return the network with the initial weights."""
        spec = importlib.util.spec_from_file_location("wideresnet", _NETWORK)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        network = module.WideResNet(CLASSES, depth=10, width=1).to(memory_format=torch.channels_last)
        fill(network, self._initial)
        return network

    def batches(self, seed: int, part: slice = slice(None)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield batches without end: each pass over a part of the images has a new order."""
        chance = torch.Generator().manual_seed(seed)
        chosen = torch.arange(len(self._images))[part]
        while True:
            order = chosen[torch.randperm(len(chosen), generator=chance)]
            for at in range(0, len(order) - BATCH + 1, BATCH):
                index = order[at : at + BATCH]
                yield self._normal(self._images[index]), self._labels[index]

    def _normal(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().sub_(self._mean).div_(self._std).permute(0, 3, 1, 2)

    def accuracy(self, network: nn.Module) -> float:
        """Accuracy on the held-out images."""
        network.eval()
        with torch.inference_mode():
            parts = [network(self._normal(each)).argmax(1) for each in self._held_out.split(_EVALUATED)]
        network.train()
        return float((torch.cat(parts) == self._held_out_labels).float().mean())


def step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One step of training."""
    images, labels = batch
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()


def state(network: nn.Module) -> list[torch.Tensor]:
    """Weights and running statistics: all that is averaged. Counters of batches matter to nothing."""
    buffers = [each for each in network.buffers() if each.is_floating_point()]
    return [*(each.data for each in network.parameters()), *buffers]


def fill(network: nn.Module, values: torch.Tensor) -> None:
    """Set the network's `state`, or only its weights, from one vector."""
    start = 0
    for each in state(network):
        if start == len(values):
            return
        each.copy_(values[start : start + each.numel()].view(each.shape))
        start += each.numel()


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


class Curve:
    """Accuracy over time, measured after each exchange, or after as many steps."""

    def __init__(self, pictures: Pictures, accuracy: float) -> None:
        self._pictures, self._wanted = pictures, accuracy
        self._before = 0.0, 1 / CLASSES
        self._measured_s = 0.0

    def reached(self, network: nn.Module, seconds: float, **counts: int) -> bool:
        """Measure the weights of a time; print the result when they are good enough.

        Between two measurements the accuracy is taken to rise evenly: an exchange lasts seconds.

        Args:
            seconds: since the first step.
            counts: `updates` and `steps` (of one worker) so far.
        """
        began = time.monotonic()
        found, (before_s, before) = self._pictures.accuracy(network), self._before
        self._measured_s += time.monotonic() - began
        print(f"{seconds:.2f} s: {found:.4f}", file=sys.stderr, flush=True)  # noqa: T201
        if found < self._wanted:
            self._before = seconds, found
            return False
        share = (self._wanted - before) / (found - before) if before < self._wanted else 1.0
        tell(
            seconds=before_s + share * (seconds - before_s),
            accuracy=found,
            ended_s=seconds,
            measured_s=self._measured_s,
            **counts,
        )
        return True


def tell(**result: Any) -> None:
    """Print the results."""
    print(json.dumps(result), flush=True)  # noqa: T201
