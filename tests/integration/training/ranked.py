"""A rank in a process, for tests: a tiny network on tiny images, and gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from models.training.config import TrainConfig
from models.training.data import TrainingData
from tests.shapes import SHAPES, shape_images
from training.learner import FlatLearner
from training.parallel.exchange import Done, Seat
from training.parallel.group import Group, run_program
from training.parallel.programs import make_program
from training.strategies.config import RanksConfig

__all__ = ["build", "run_one"]

_BUDGET_S = 30.0
_CONFIG = TrainConfig.model_validate(
    {
        "name": "tiny",
        "tier": "end",
        "target": "fine",
        "network": {"kind": "mlp", "options": {"inputs": 192, "hidden": [64], "activation": "tanh"}},
        "epochs": 8,
        "batch_size": 6,
        "peak_rate": 0.05,
        "crop_padding": 0,
        "held_out_per_class": 2,
        "precision": "fp32",
    }
)


def build(choice: RanksConfig, rank: int, ranks: int) -> tuple[FlatLearner, Seat]:
    """A learner, and its place."""
    images = shape_images(8)
    learner = FlatLearner(_CONFIG, TrainingData(_CONFIG, images, SHAPES), strategy=choice)
    return learner, Seat(rank=rank, ranks=ranks, test=images)


def run_one(rank: int, ranks: int, meeting: str, choices: list[RanksConfig], answers: Any) -> None:
    """Run the program of a rank for each strategy."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_BUDGET_S)
    )
    found = []
    for choice in choices:
        learner, seat = build(choice, rank, ranks)
        group, steps = Group(rank=rank, ranks=ranks, device=torch.device("cpu")), [0, 0.0]

        def done(done: Done, group: Group = group, steps: list[Any] = steps) -> None:
            steps[:] = done.step + 1, group.bytes_sent / (done.step + 1)

        figures = run_program(make_program(choice, learner, seat), group.answer, done)
        found.append(
            {
                "figures": figures,
                "joined": learner.joined(),
                "bytes_sent": group.bytes_sent,
                "steps": steps[0],
                "step_bytes": steps[1],
            }
        )
    answers.put((rank, found))
    dist.destroy_process_group()
