"""Hybrid parallelism (Krizhevsky 2014, arXiv:1404.5997, scheme a): each rank computes the convolutions for one
batch, and a part of the dense layers for the batches of all ranks.

torch's DTensor splits two dense layers in a row: the first by its outputs, the second by its inputs, so nothing travels
between them. Before the first one, ranks gather the activations of all batches. After the second one, each gets the
sums for its own batch. Errors take the same way back. Other layers, such as the classifier, work as in all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from training.learner import FlatLearner
from training.parallel.allreduce import scaled_rate
from training.parallel.exchange import Done, Mean, Program
from training.parallel.group import Group
from training.parallel.pairs import dense_layer, dense_pairs
from training.strategies.config import ExchangeConfig

__all__ = ["hybrid", "split_dense"]


def split_dense(learner: FlatLearner, group: Group) -> None:
    """Leave this rank its part of the dense layers. The learner's vectors then begin with the values that all ranks
    have, and end with its parts."""
    network, plan = learner.trained_network, dict[str, ParallelStyle]()
    for first, second in dense_pairs(network):
        plan |= {first: ColwiseParallel(input_layouts=Shard(0)), second: RowwiseParallel(output_layouts=Shard(0))}
        dense_layer(network, first).register_forward_pre_hook(_counting(group))
    mesh = init_device_mesh(group.device.type, (group.ranks,))
    # All ranks have drawn the same weights, so none sends its own.
    parallelize_module(network, mesh, plan, src_data_rank=None)
    for _, second in dense_pairs(network):
        dense_layer(network, second).register_forward_hook(_counting(group))
    parameters = list(network.parameters())
    learner.hold_tensors(
        [
            *(each for each in parameters if not isinstance(each, DTensor)),
            *(_own_part(each, group.ranks) for each in parameters if isinstance(each, DTensor)),
        ]
    )


def hybrid(learner: FlatLearner, config: ExchangeConfig, group: Group, *, start: int = 0) -> Program:
    """One rank's program: the gradients of `allreduce`. At the end all ranks have the whole network.

    Args:
        learner: learner whose dense layers have been split.
    """
    ranks, steps = group.ranks, learner.steps // group.ranks
    shared = sum(each.numel() for each in learner.trained_network.parameters() if not isinstance(each, DTensor))
    for step in range(start, steps):
        with group.with_others():
            gradient, loss = learner.gradient(step * ranks + group.rank)
        gradient[:shared] = yield Mean(gradient[:shared])
        learner.apply(gradient, scaled_rate(config, learner.rate(step * ranks), ranks=ranks, step=step, steps=steps))
        yield Done(step, loss)
    if learner.lengths[1]:
        learner.load(learner.weights(), (yield Mean(learner.buffers())))
    with group.with_others():
        _join_dense(learner, group)
    return {}


def _join_dense(learner: FlatLearner, group: Group) -> None:
    """Give all ranks the whole dense layers."""
    network = learner.trained_network
    for name in [name for pair in dense_pairs(network) for name in pair]:
        part = dense_layer(network, name)
        whole = nn.utils.skip_init(nn.Linear, part.in_features, part.out_features, device=group.device)
        for own, value in zip(part.parameters(), whole.parameters(), strict=True):
            assert isinstance(own, DTensor)
            value.data.copy_(own.detach().full_tensor())
            if own.placements[0].is_shard():
                size = value.nbytes // group.ranks * (group.ranks - 1)
                group.count(size, size)
        network.set_submodule(name, whole)
    learner.hold_tensors(list(network.parameters()))


def _own_part(parameter: DTensor, ranks: int) -> Tensor:
    """This rank's part of a parameter, in the same memory. A backward pass leaves it its gradient: the mean over the
    ranks, since each has added the errors of all."""
    own = parameter.detach().to_local()

    def take(parameter: Any) -> None:
        own.grad = parameter.grad.to_local().div(ranks)

    parameter.register_post_accumulate_grad_hook(take)
    return own


def _counting(group: Group) -> Callable[..., None]:
    """A hook that counts the bytes of activations on their way to the others, and of the errors on their way back."""

    def count(_layer: nn.Module, given: tuple[Tensor, ...], answer: Tensor | None = None) -> None:
        tensor = given[0] if answer is None else answer
        if torch.is_grad_enabled():
            size = (group.ranks - 1) * tensor.nbytes * (2 if tensor.requires_grad else 1)
            group.count(size, size)

    return count
