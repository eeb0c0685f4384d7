"""First weights of the tail, and the teacher's answers: both from the networks that ship."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from models.data import ImageSet
from models.evaluate import logits_of
from models.export.dequantize import dequantize_onnx
from models.manifest import load_manifest, weights_folder
from models.session import load_model
from models.training.answers import AnswerFacts, Teacher
from models.training.batches import Statistics, normalise
from models.training.teacher import kept_answers
from tierkit.errors import DataError, WeightsError

__all__ = ["answers_of_networks", "load_shipped", "teacher_answers"]

_FLOATS = "_DequantizeLinear_Output"


def load_shipped(network: nn.Module, name: str, known: Statistics, images: np.ndarray, weights: Path | None) -> None:
    """Fill `network`, whose batch normalisation the shipped file has folded into convolutions, from that file.

    The normalisation is restored from the mean and variance that each convolution's output has over `images`, so that
    the network can be trained at the usual rates. The answers stay the same.

    Args:
        network: a ResNet34 of the same options; left in evaluation mode.
        name: the network in the manifest.
        known: the normalisation of the images.
        images: UINT8 `[n, h, w, 3]` training images, some hundred or more.

    Raises:
        WeightsError: the file is missing or of another architecture.
    """
    folder = weights or weights_folder()
    path = folder / load_manifest(folder).entry(name).file
    model = onnx.load_from_string(dequantize_onnx(path.read_bytes()))
    stored = {item.name.removesuffix(_FLOATS): item for item in model.graph.initializer}

    def fill(into: Tensor, key: str) -> None:
        values = numpy_helper.to_array(stored[key]) if key in stored else None
        if values is None or values.shape != tuple(into.shape):
            raise WeightsError(f"{path} has no {key!r} of shape {list(into.shape)}: it is of another architecture")
        into.copy_(torch.from_numpy(values.copy()))

    pairs = _normalised(network)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(place: str) -> Callable[[nn.Module, Any], None]:
        def keep(_: nn.Module, given: Any) -> None:
            seen[place] = (given[0].mean((0, 2, 3)), given[0].var((0, 2, 3), unbiased=False))

        return keep

    with torch.no_grad():
        for place, (conv, norm) in pairs.items():
            fill(conv.weight, f"network.{place}.weight")
            # Only a convolution that had a bias of its own has one under its own name.
            fill(norm.bias, f"network.{place}.{'weight_bias' if conv.bias is None else 'bias'}")
            if conv.bias is not None:
                conv.bias.zero_()
            norm.weight.fill_(1.0)
            norm.running_mean.zero_()
            norm.running_var.fill_(1.0 - norm.eps)
        fill(network.classifier.weight, "network.classifier.weight")
        fill(network.classifier.bias, "network.classifier.bias")
        handles = [norm.register_forward_pre_hook(watch(place)) for place, (_, norm) in pairs.items()]
        network.eval()
        network(normalise(torch.from_numpy(images), known))
        for handle in handles:
            handle.remove()
        for place, (conv, norm) in pairs.items():
            mean, variance = seen[place]
            spread = (variance + norm.eps).sqrt()
            conv.weight.div_(spread[:, None, None, None])
            norm.weight.copy_(spread)
            norm.bias.add_(mean)
            norm.running_mean.copy_(mean / spread)
            norm.running_var.copy_(variance / spread**2)


def _normalised(network: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Each convolution of a ResNet34 by name, with the normalisation after it."""
    modules: dict[str, Any] = dict(network.named_modules())
    after = {"encoder": "norm", "conv1": "bn1", "conv2": "bn2", "0": "1"}
    pairs = {}
    for name, module in modules.items():
        if isinstance(module, nn.Conv2d):
            stem, _, last = name.rpartition(".")
            pairs[name] = (module, modules[f"{stem}.{after[last]}" if stem else after[last]])
    return pairs


def teacher_answers(names: tuple[str, ...], data: ImageSet, cache: Path, weights: Path | None) -> Tensor:
    """Log probabilities `[N, 2, F]` of shipped networks; see `models.training.teacher.kept_answers`.

    Args:
        names: fine networks of the manifest.

    Raises:
        WeightsError: a network is missing or damaged.
        DataError: a network has no fine answers.
    """
    hierarchy = load_manifest(weights).hierarchy
    facts, teachers = answers_of_networks(names, data, weights)
    return torch.from_numpy(kept_answers(teachers, data, hierarchy, facts, cache).log_probabilities)


def answers_of_networks(
    names: tuple[str, ...], data: ImageSet, weights: Path | None
) -> tuple[AnswerFacts, Iterable[Teacher]]:
    """Facts of the answers of a model set's networks, and the networks, each loaded when it is asked for.

    Args:
        weights: the model set. Default: Terrace's own.

    Raises:
        NotFound: the set has no such network.
        DataError: it gives no fine answers.
    """
    folder = weights or weights_folder()
    manifest = load_manifest(folder)
    entries = [manifest.entry(name) for name in names]
    if coarse := [entry.name for entry in entries if entry.target != "fine"]:
        raise DataError(f"the teacher {coarse[0]!r} answers coarse labels; a teacher needs fine ones")
    facts = AnswerFacts(
        data_sha256=data.digest(),
        hierarchy=manifest.hierarchy.name,
        teachers=names,
        teachers_sha256=hashlib.sha256("".join(entry.sha256 for entry in entries).encode()).hexdigest(),
    )
    models = (load_model(entry, folder, threads=torch.get_num_threads()) for entry in entries)
    return facts, (lambda images, model=model: logits_of(model, images, batch_size=100)[0] for model in models)
