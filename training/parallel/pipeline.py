"""Pipeline: each rank holds some blocks of the network, and micro-batches pass through the ranks one after the other
(GPipe: Huang et al. 2019, arXiv:1811.06965; 1F1B: Narayanan et al. 2019), by torch.distributed.pipelining."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.training.batches import Batch
from models.training.config import TrainConfig
from models.training.learner import autocast
from models.training.loss import Labels, training_loss
from models.training.networks import leaves_out, reseed
from tierkit.errors import InvalidInput, SetupError
from training.learner import FlatLearner
from training.measuring import free_bytes
from training.parallel.cut import BlockCost, balanced, chain_of, measure
from training.parallel.exchange import Broadcast, Done, Program
from training.parallel.group import Group
from training.parallel.parts import NetworkParts
from training.strategies.config import ExchangeConfig

__all__ = ["RankStage", "check_pipeline", "micro_loss", "pipeline"]


def check_pipeline(config: ExchangeConfig, learner: FlatLearner, ranks: int) -> None:
    """Check that the network can be trained by a pipeline as by one process.

    Raises:
        InvalidInput: it cannot, and why.
    """
    network, micro, name = learner.network, config.micro_batches, learner.config.name
    blocks, batch = chain_of(network, name), _batch_size(learner)
    if learner.config.target == "coarse" and learner.config.auxiliary:
        raise InvalidInput(f"a pipeline cannot train {name!r} with its second classifier: set auxiliary to 0")
    if not 2 <= ranks <= len(blocks):
        most = "has one block and cannot be cut" if len(blocks) < 2 else f"can be cut for 2 to {len(blocks)} ranks"
        raise InvalidInput(f"{name!r} {most}, and there are {ranks}: use another number of ranks, or another strategy")
    if batch % micro:
        raise InvalidInput(
            f"a batch of {batch:,} images cannot be cut into {micro:,} equal micro_batches: give a number that divides "
            "it, or change batch_size"
        )
    if config.schedule == "1f1b" and micro < ranks:
        raise InvalidInput(
            f"1f1b needs {ranks} micro_batches for {ranks} ranks, and has {micro}: set schedule to gpipe"
        )
    one = "set micro_batches to 1 and schedule to gpipe"
    if micro > 1 and leaves_out(network):
        raise InvalidInput(f"{name!r} has dropout, which must be the same for a whole batch: {one}")
    normalised = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in network.modules())
    if micro > 1 and normalised and not config.frozen:
        raise InvalidInput(
            f"{name!r} has batch normalisation, with statistics of a whole batch: set frozen to true, or {one}"
        )


class RankStage:
    """The blocks of one rank; memory of all other blocks is released. `check_pipeline` comes first.

    Raises:
        SetupError: the stage does not fit in the memory that is free.
    """

    def __init__(self, config: ExchangeConfig, learner: FlatLearner, rank: int, ranks: int) -> None:
        from training.parallel import schedules  # takes a second, which other rules do not need

        if config.frozen:
            learner.freeze()
        self.learner, self._config, self._rank, self._ranks = learner, config, rank, ranks
        chain = chain_of(learner.network, learner.config.name)
        height, width, colours = learner.data.held_out.images.shape[1:]
        side = learner.config.early_side
        sizes = {(height, width), *([] if side is None else [(side, side)])}
        device = learner.data.device
        with autocast(learner.config, device):
            measured = {size: measure(chain, torch.zeros(1, colours, *size, device=device)) for size in sizes}
        cuts = balanced([each.work for each in measured[height, width]], ranks)
        self._borders = {size: [found[cut.stop - 1].output for cut in cuts] for size, found in measured.items()}
        """Output of each stage, by the size of the images."""
        whole_bytes = 4 * learner.lengths[0]
        self._parts = NetworkParts(learner, [[chain[place] for place in cut] for cut in cuts], rank)
        own = [chain[place] for place in cuts[rank]]
        self._blocks = _Blocks(own, learner.config, first=rank == 0, last=rank == ranks - 1)
        self._torch = schedules
        self._schedule: tuple[tuple[int, ...], Any] | None = None
        self._batch: Batch | None = None
        learner.network.train()
        costs, borders = measured[height, width], self._borders[height, width]
        # Each micro-batch has its places for what comes, with its gradient, and for the gradient of what goes.
        passing = (2 * borders[rank - 1].nbytes if rank else 0) + borders[rank].nbytes
        self._check_memory([costs[place] for place in cuts[rank]], passing, whole_bytes)

    def step(self, number: int, group: Group) -> float:
        """Compute the gradients of a step; its loss, at the last rank.

        Raises:
            UpstreamUnavailable: another rank is lost.
        """
        learner, first, last = self.learner, self._rank == 0, self._rank == self._ranks - 1
        began = time.perf_counter()
        batch = self._batch = learner.data.batches.batch(number)
        # Dropout is the same as in one process.
        reseed(learner.network, learner.config.seed * 2_654_435_761 + number)
        learner.spend("load", time.perf_counter() - began)
        losses: list[Tensor] = []
        rows = torch.arange(len(batch.index), device=learner.data.device)
        given = {"target": rows, "losses": losses} if last else {}
        schedule = self._scheduled(batch.images)
        began, busy_s = time.perf_counter(), schedule._stage.busy_s
        with group.with_others():
            schedule.step(*([batch.images] if first else []), return_outputs=False, **given)
        group.waited_s += time.perf_counter() - began - (schedule._stage.busy_s - busy_s)
        borders = self._borders[batch.images.shape[2], batch.images.shape[3]]
        before = 0 if first else borders[self._rank - 1].nbytes * len(rows)
        after = 0 if last else borders[self._rank].nbytes * len(rows)
        group.count(before + after, before + after)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def collect(self, group: Group) -> None:
        """Bring all stages to rank 0, whose learner then holds the whole network."""
        self._schedule = self._batch = None
        self._parts.collect(group)

    def _scheduled(self, images: Tensor) -> Any:
        """The schedule for images of this size; early epochs may have smaller ones."""
        if self._schedule is None or self._schedule[0] != images.shape:
            config, rank, ranks = self._config, self._rank, self._ranks
            borders, micro = self._borders[images.shape[2], images.shape[3]], config.micro_batches
            count = len(images) // micro
            came = torch.empty(count, *images.shape[1:], device="meta") if not rank else _sent(borders[rank - 1], count)
            stage = self._torch.TimedStage(self._blocks, rank, ranks, images.device, came, _sent(borders[rank], count))
            stage.learner = self.learner
            schedule = self._torch.SCHEDULES[config.schedule](stage, micro, loss_fn=self._loss)
            self._schedule = tuple(images.shape), schedule
        return self._schedule[1]

    def _loss(self, output: Tensor, rows: Tensor) -> Tensor:
        assert self._batch is not None
        return micro_loss(output, rows, self._batch, self.learner.data.labels, self.learner.config)

    def _check_memory(self, blocks: list[BlockCost], passing: int, whole_bytes: int) -> None:
        learner, config = self.learner, self._config
        batch, micro, own_bytes = _batch_size(learner), config.micro_batches, 4 * learner.lengths[0]
        together = micro if config.schedule == "gpipe" else min(micro, self._ranks - self._rank)
        kept = sum(each.kept_bytes for each in blocks) * together * batch // micro + passing * batch
        # Gradient, gradient with weight decay, momentum, and copies for a checkpoint; a step of the largest tensor.
        largest = max((each.nbytes for each in learner.network.parameters()), default=0)
        needed, free = kept + 4 * own_bytes + largest, free_bytes(str(learner.data.device))
        if free is None:
            return
        if needed > free:
            raise SetupError(
                f"stage {self._rank} of {self._ranks} needs {_said(needed)} more, {_said(kept)} of them for "
                f"activations, and {_said(free)} are free: start more ranks, or lower batch_size"
            )
        if not self._rank and 2 * whole_bytes - own_bytes > free:
            raise SetupError(
                f"rank 0 needs {_said(2 * whole_bytes - own_bytes)} more for the whole network in the end, and "
                f"{_said(free)} are free: start rank 0 where there is more memory"
            )


def micro_loss(output: Tensor, rows: Tensor, batch: Batch, labels: Labels, config: TrainConfig) -> Tensor:
    """Mean loss of some images of a batch.

    Args:
        output: their logits `[n, classes]`.
        rows: int64 `[n]`, their places in the batch.
    """

    def towards(index: Tensor) -> Tensor:
        part = Batch(
            images=batch.images[:0],
            index=index,
            flipped=batch.flipped[rows],
            partner=torch.arange(len(rows), device=rows.device),
            share=torch.ones_like(batch.share),
        )
        return training_loss(output, None, part, labels, config)

    own = towards(batch.index[rows])
    if not (config.mixup or config.cutmix):
        return own
    # The partner of an image may be in another micro-batch.
    return batch.share * own + (1 - batch.share) * towards(batch.index[batch.partner[rows]])


def pipeline(stage: RankStage, group: Group, *, start: int) -> Program:
    """One rank's program. At the end rank 0 holds the whole network.

    Args:
        start: step to continue with.
    """
    learner = stage.learner
    for step in range(start, learner.steps):
        loss = stage.step(step, group)
        began = time.perf_counter()
        learner.descend(learner.rate(step))
        learner.spend("step", time.perf_counter() - began)
        [known] = yield Broadcast(np.array([loss], np.float32), group.ranks - 1)
        yield Done(step, float(known))
    stage.collect(group)
    return {}


class _Blocks(nn.Module):
    """The blocks of a stage. Feature maps travel in their order in memory, `[n, h, w, c]`: a stage reads and writes the
    same layout as the whole network."""

    def __init__(self, blocks: list[nn.Module], config: TrainConfig, *, first: bool, last: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self._config, self._first, self._last = config, first, last

    def forward(self, given: Tensor) -> Tensor:
        value = given if self._first or given.ndim < 4 else given.permute(0, 3, 1, 2)
        with autocast(self._config, given.device):
            value = self.blocks(value)
        return value if self._last or value.ndim < 4 else value.permute(0, 2, 3, 1).contiguous()


def _batch_size(learner: FlatLearner) -> int:
    return min(learner.config.batch_size, learner.data.train_images)


def _sent(border: Tensor, count: int) -> Tensor:
    """Form of what a stage sends of some images."""
    form = border.permute(0, 2, 3, 1) if border.ndim == 4 else border
    return torch.empty(count, *form.shape[1:], dtype=border.dtype, device="meta", requires_grad=True)


def _said(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
