"""Pipelines of real processes against one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch

from models.training.config import TrainConfig
from tests.integration.training.staged import parts, run_stage, whole
from training.strategies.config import ExchangeConfig

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

_BUDGET_S = 20.0


def config(kind: str, options: Mapping[str, Any], **changes: Any) -> TrainConfig:
    given = {
        "name": "tiny",
        "tier": "end",
        "target": "fine",
        "network": {"kind": kind, "options": dict(options)},
        "epochs": 4,
        "batch_size": 12,
        "peak_rate": 0.05,
        "crop_padding": 0,
        "held_out_per_class": 2,
        "precision": "fp32",
    }
    return TrainConfig.model_validate(given | changes)


def pipeline(**given: Any) -> ExchangeConfig:
    return ExchangeConfig(rule="pipeline", **given)


MLP = {"inputs": 192, "hidden": [16, 12, 8], "activation": "tanh"}
CASES = {
    "mlp": (config("mlp", MLP), pipeline(micro_batches=4)),
    "gpipe": (config("mlp", MLP), pipeline(micro_batches=6, schedule="gpipe")),
    "mixup": (config("mlp", MLP, mixup=0.4, cutmix=1.0, label_smoothing=0.1), pipeline(micro_batches=4)),
    "dropout": (config("mlp", MLP | {"dropout": 0.5}), pipeline(micro_batches=1, schedule="gpipe")),
    "frozen": (config("wide-resnet", {"depth": 10, "width": 1}), pipeline(micro_batches=3, frozen=True)),
    "bf16": (
        config("wide-resnet", {"depth": 10, "width": 1}, precision="bf16"),
        pipeline(micro_batches=3, frozen=True),
    ),
    "normalised": (config("mobilenet-v1", {"alpha": 0.125}), pipeline(micro_batches=1, schedule="gpipe")),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of three ranks has found, for each case."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.training.staged"])
    answers, folder = context.Queue(), tmp_path_factory.mktemp("meet")
    processes = [
        context.Process(target=run_stage, args=(rank, 3, str(folder / "meet"), CASES, answers)) for rank in range(3)
    ]
    try:
        for each in processes:
            each.start()
        came = dict(answers.get(timeout=_BUDGET_S) for _ in processes)
    finally:
        for each in processes:
            each.join(10)
            each.kill()
    return {name: [came[rank][name] for rank in range(3)] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_gradients_of_one_process(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    gradients: dict[str, Any] = {}
    for each in found[name]:
        assert not gradients.keys() & each["gradients"].keys()
        assert each["gradients"]
        gradients |= each["gradients"]
    same, loss = parts(*CASES[name])
    assert gradients.keys() == same.keys()
    far = max(np.abs(gradients[each] - same[each]).max() for each in same)
    assert far <= 1e-7
    assert found[name][-1]["loss"] == pytest.approx(loss, abs=1e-6)
    if name != "bf16":
        batch, loss = whole(*CASES[name])
        far = max(np.abs(gradients[each] - batch[each]).max() for each in same)
        assert far <= 1e-6
        assert found[name][-1]["loss"] == pytest.approx(loss, abs=1e-6)
