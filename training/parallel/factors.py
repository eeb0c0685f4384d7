"""Factors instead of gradients (Project Adam; Chilimbi et al. 2014): ranks exchange what goes into a dense layer, and
the errors that come back to it, and each computes the layer's gradient itself.

The gradient of a dense layer of `i` inputs and `o` outputs has `i o` values. It is the product of two matrices of `b i`
and `b o` values, with a row for each of the `b` images of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tierkit.errors import InvalidInput
from training.learner import FlatLearner
from training.parallel.allreduce import scaled_rate
from training.parallel.exchange import Done, Gather, Mean, Program, Seat
from training.strategies.config import ExchangeConfig
from training.units import Flat

__all__ = ["check_factors", "factored", "factors"]

_Factors = tuple[Tensor, Tensor]
"""Inputs `[b, i]` and errors `[b, o]` of a layer."""


def factored(learner: FlatLearner, ranks: int) -> list[nn.Linear]:
    """The dense layers whose factors take fewer bytes than their gradient.

    Around a ring, a rank sends `(N - 1) b (i + o)` values of factors and `2 (N - 1) i o / N` of the gradient.
    """
    layers = [each for each in learner.trained_network.modules() if isinstance(each, nn.Linear)]
    return [
        each
        for each in layers
        if ranks * learner.batch_size * (each.in_features + each.out_features)
        < 2 * each.in_features * each.out_features
    ]


def check_factors(learner: FlatLearner, ranks: int) -> None:
    """Raises InvalidInput where factors save no bytes."""
    if ranks < 2:
        raise InvalidInput("factors need at least 2 ranks to exchange them: give more")
    if not factored(learner, ranks):
        raise InvalidInput(
            f"no dense layer of {learner.config.name!r} takes fewer bytes as factors than as a gradient. It needs i "
            f"inputs and o outputs with N b (i + o) / 2 < i o, with N = {ranks} ranks and batches of "
            f"b = {learner.batch_size} images. Use allreduce, or a smaller batch_size"
        )


def factors(learner: FlatLearner, config: ExchangeConfig, seat: Seat) -> Program:
    """One rank's program: the gradients of `allreduce`, in fewer bytes.

    Raises:
        InvalidInput: factors save no bytes.
    """
    check_factors(learner, seat.ranks)
    ranks, layers, steps = seat.ranks, factored(learner, seat.ranks), learner.steps // seat.ranks
    for step in range(seat.start, steps):
        with _captured(layers) as found:
            others, loss = learner.gradient(step * ranks + seat.rank)
        mean = yield Mean(others)
        gathered = yield Gather(np.concatenate([_vector(each) for layer in layers for each in found[layer]]))
        gradients = _products(gathered.reshape(ranks, -1), layers, learner)
        rate = scaled_rate(config, learner.rate(step * ranks), ranks=ranks, step=step, steps=steps)
        learner.apply(_merged(learner, gradients, mean), rate)
        yield Done(step, loss)
    if learner.lengths[1]:
        learner.load(learner.weights(), (yield Mean(learner.buffers())))
    return {}


@contextmanager
def _captured(layers: Sequence[nn.Linear]) -> Iterator[dict[nn.Linear, _Factors]]:
    """Meanwhile a step keeps the factors of these layers, and does not compute the gradients of their weights."""
    found: dict[nn.Linear, _Factors] = {}

    def keep(layer: nn.Module, given: tuple[Tensor, ...], answer: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        inputs = given[0].detach()
        answer.register_hook(lambda errors: found.update({layer: (inputs, errors)}))

    hooks = [each.register_forward_hook(keep) for each in layers]
    try:
        for each in layers:
            each.weight.requires_grad_(False)
        yield found
    finally:
        for each, hook in zip(layers, hooks, strict=True):
            each.weight.requires_grad_(True)
            hook.remove()


def _products(gathered: Flat, layers: Sequence[nn.Linear], learner: FlatLearner) -> dict[nn.Parameter, Flat]:
    """The mean gradients of the layers' weights, with decay.

    Args:
        gathered: the factors of all layers, a row for each rank.
    """
    # All ranks multiply the same numbers. On machines with other processors the products may differ in their last
    # bits, and the weights by the sum of these; it feeds back into nothing, since all use each other's factors.
    ranks, start = len(gathered), 0
    found: dict[nn.Parameter, Flat] = {}
    for layer in layers:
        matrices = []
        for width in (layer.in_features, layer.out_features):
            stop = start + learner.batch_size * width
            part = np.ascontiguousarray(gathered[:, start:stop]).reshape(-1, width)
            matrices.append(torch.from_numpy(part).to(layer.weight.device))
            start = stop
        inputs, errors = matrices
        product = (errors.T @ inputs).div_(ranks).add_(layer.weight.detach(), alpha=learner.config.weight_decay)
        found[layer.weight] = _vector(product)
    return found


def _merged(learner: FlatLearner, gradients: dict[nn.Parameter, Flat], mean: Flat) -> Flat:
    """One vector of all gradients, in the order of the weights."""
    parts, start = [], 0
    for parameter in learner.trained_network.parameters():
        if parameter in gradients:
            parts.append(gradients[parameter])
        else:
            parts.append(mean[start : start + parameter.numel()])
            start += parameter.numel()
    return np.concatenate(parts)


def _vector(tensor: Tensor) -> Flat:
    found: Flat = tensor.reshape(-1).float().cpu().numpy()
    return found
