"""A stage of a pipeline in a process, for tests: the gradients of a step, and those of one process."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import autocast
from models.training.networks import reseed
from tests.shapes import SHAPES, shape_images
from training.learner import FlatLearner
from training.parallel.group import Group
from training.parallel.pipeline import Stage, micro_loss
from training.strategies.config import ExchangeConfig

__all__ = ["STEP", "parts", "run_stage", "whole"]

_BUDGET_S = 30.0
STEP = 1

Case = tuple[TrainConfig, ExchangeConfig]
Gradients = dict[str, Any]


def build(config: TrainConfig, choice: ExchangeConfig) -> FlatLearner:
    return FlatLearner(config, TrainingData(config, shape_images(8), SHAPES), strategy=choice)


def gradients(learner: FlatLearner) -> Gradients:
    """By parameter, as far as there are any."""
    return {name: value.grad.numpy() for name, value in learner.network.named_parameters() if value.grad is not None}


def run_stage(rank: int, ranks: int, meeting: str, cases: Mapping[str, Case], answers: Any) -> None:
    """Loss and gradients of a step, for each case."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_BUDGET_S)
    )
    found = {}
    for name, (config, choice) in cases.items():
        group = Group(rank=rank, ranks=ranks, device=torch.device("cpu"))
        stage = Stage(choice, build(config, choice), rank, ranks)
        loss = stage.step(STEP, group)
        found[name] = {"loss": loss, "gradients": gradients(stage.learner), "bytes": group.bytes_sent}
    answers.put((rank, found))
    dist.destroy_process_group()


def parts(config: TrainConfig, choice: ExchangeConfig) -> tuple[Gradients, float]:
    """Gradients of the same micro-batches in one process, and their loss."""
    learner = build(config, choice)
    if choice.frozen:
        learner.freeze()
    batch, losses = learner.data.batches.batch(STEP), []
    learner.network.train()
    for rows in torch.arange(len(batch.index)).tensor_split(choice.micro_batches):
        reseed(learner.network, config.seed * 2_654_435_761 + STEP)
        with autocast(config, torch.device("cpu")):
            output = learner.network(batch.images[rows])
        loss = micro_loss(output, rows, batch, learner.data.labels, config)
        loss.backward()
        losses.append(float(loss.detach()))
    return {name: each / choice.micro_batches for name, each in gradients(learner).items()}, float(np.mean(losses))


def whole(config: TrainConfig, choice: ExchangeConfig) -> tuple[Gradients, float]:
    """Gradients of the whole batch in one process, and its loss."""
    learner = build(config, choice)
    if choice.frozen:
        learner.freeze()
    loss = learner._learner.backward(STEP)
    return gradients(learner), loss
