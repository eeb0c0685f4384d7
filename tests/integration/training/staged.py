"""A stage of a pipeline in a process, for tests: the gradients of a step, and those of one process."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from models.dataset import Dataset
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import autocast
from models.training.networks import reseed
from tests.rank_processes import place_of
from tests.shapes import SHAPES, shape_images
from tierkit.errors import TerraceError
from training.learner import FlatLearner, read_images
from training.parallel.group import Group
from training.parallel.pipeline import RankStage, micro_loss
from training.parallel.rank import RankOptions
from training.parallel.running import run_rank
from training.strategies.config import ExchangeConfig

__all__ = ["STEP", "Limited", "parts", "run_limited", "run_stage", "time_rounds", "whole"]

_BUDGET_S = 30.0
STEP = 1
_ROUNDS, _RATE = 5, 1e-4

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
        stage = RankStage(choice, build(config, choice), rank, ranks)
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


def time_rounds(rank: int, ranks: int, meeting: str, cases: Mapping[str, Case], answers: Any) -> None:
    """Seconds of a step in one process, and of a pipeline for each case, in alternation. Images are repeated."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    few = shape_images(32)
    images = few.take(np.resize(np.arange(len(few.images)), 8 * len(few.images)))
    group = Group(rank=rank, ranks=ranks, device=torch.device("cpu"))

    def learner(case: Case) -> FlatLearner:
        return FlatLearner(case[0], TrainingData(case[0], images, SHAPES), strategy=case[1])

    one = learner(next(iter(cases.values())))
    one.freeze()
    stages = {name: RankStage(case[1], learner(case), rank, ranks) for name, case in cases.items()}
    found: dict[str, list[float]] = {name: [] for name in ("one process", "two threads", *stages)}
    for number in range(_ROUNDS + 1):
        for name in found:
            dist.barrier()
            began = time.perf_counter()
            if name in stages:
                stages[name].step(number, group)
                stages[name].learner.descend(_RATE)
                dist.barrier()
            elif rank == 0:
                torch.set_num_threads(2 if name == "two threads" else 1)
                one.walk(number, _RATE)
                torch.set_num_threads(1)
            if number:  # the first warms up
                found[name].append(time.perf_counter() - began)
    times = {name: each.learner.take_times() for name, each in stages.items()}
    answers.put((rank, (found, times)))
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """A run of ranks with little memory."""

    options: RankOptions
    port: int
    more_bytes: int
    """That each process may take, in addition to what it has at first."""


def run_limited(rank: int, ranks: int, _meeting: str, run: Limited, answers: Any) -> None:
    """Result or error of a rank; of a single one, of two steps without any ranks."""
    torch.set_num_threads(1)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = 1024 * int(status["VmData"].split()[0]) + run.more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.environ.update(place_of(rank, ranks, run.port))
    try:
        found: Any = run_rank(run.options) if ranks > 1 else _walked(run.options)
    except Exception as error:
        found = error if isinstance(error, TerraceError) else str(error)
    answers.put((rank, found))


def _walked(options: RankOptions) -> float:
    network = options.network_config()
    learner = FlatLearner(network, read_images(network, Dataset.open(str(options.dataset), None))[0])
    return [learner.walk(step, learner.rate(step)) for step in range(2)][1]
