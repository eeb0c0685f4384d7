"""A part of a network at each rank, and the whole network at rank 0 in the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.training.networks import running_statistics
from training.learner import FlatLearner
from training.parallel.group import Group

__all__ = ["NetworkParts"]


class NetworkParts:
    """Parts of a learner's network. This process keeps one, and releases the memory of the others.

    Args:
        parts: blocks of each rank, which together are the whole network.
        own: number of the part to keep.
    """

    def __init__(self, learner: FlatLearner, parts: Sequence[Sequence[nn.Module]], own: int) -> None:
        self._learner = learner
        self._tensors = [_tensors(each) for each in parts]
        self._forms = [[each.to("meta") for each in part] for part in self._tensors]
        for rank, part in enumerate(self._tensors):
            for each in part:
                if rank != own:
                    each.data = each.data.new_empty(0)
        learner.hold(parts[own])

    def collect(self, group: Group) -> None:
        """Bring all parts to rank 0, whose learner then holds the whole network, without momentum.

        Raises:
            UpstreamUnavailable: another rank is lost.
        """
        self._learner.moments = None
        with group.with_others():
            for rank in range(1, group.ranks):
                for tensor, form in zip(self._tensors[rank], self._forms[rank], strict=True):
                    if group.rank == rank:
                        dist.send(tensor.detach().reshape(-1).to(group.device), 0)
                        group.count(tensor.nbytes, 0)
                    elif group.rank == 0:
                        came = torch.empty(form.numel(), dtype=form.dtype, device=group.device)
                        dist.recv(came, rank)
                        tensor.data = torch.empty_like(form, device=tensor.device).copy_(came.view(form.shape))
                        group.count(0, came.nbytes)
        if group.rank == 0:
            self._learner.hold([self._learner.network])


def _tensors(blocks: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and running statistics."""
    held = nn.ModuleList(blocks)
    return [*held.parameters(), *running_statistics(held)]
