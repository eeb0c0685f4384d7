"""Hybrid parallelism with real processes: convolutions by batches, dense layers in parts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch
from safetensors.numpy import load_file

from models.dataset import Dataset
from models.training.checkpoint import load_checkpoint
from tests.rank_processes import rank_processes
from tierkit.errors import InvalidInput, UpstreamUnavailable
from training.host.opening import find_network
from training.learner import FlatLearner, read_images
from training.parallel.exchange import Seat
from training.parallel.lockstep import Ranks, run_ranks
from training.parallel.pairs import check_hybrid, dense_pairs
from training.parallel.programs import make_program
from training.parallel.rank import RankOptions
from training.strategies.config import ExchangeConfig

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

CONFIG = """
name = "net"
tier = "end"
target = "fine"
epochs = {epochs}
batch_size = {batch}
peak_rate = {rate}
schedule = "constant"
momentum = {momentum}
weight_decay = 1e-3
held_out_per_class = 4
precision = "fp32"
crop_padding = 2

[network]
kind = "{kind}"
options = {options}
"""
"""24 images to train on."""
ALEXNET = "{ widths = [8, 16, 16, 16, 16], hidden = [512, 256], dropout = 0.0 }"
"""With 96 % of its parameters in dense layers."""
MLP = "{ inputs = 3072, hidden = [16, 12, 8, 6] }"


def write(folder: Path, **changes: Any) -> str:
    given = {"epochs": 1, "batch": 12, "rate": 0.1, "momentum": 0.0, "kind": "alexnet", "options": ALEXNET} | changes
    path = folder / "net.toml"
    path.write_text(CONFIG.format(**given))
    return str(path)


def learner(network: str, shapes: Path) -> FlatLearner:
    config = find_network(network)
    images, _ = read_images(config, Dataset.open(str(shapes), None))
    return FlatLearner(config, images, strategy=ExchangeConfig(rule="hybrid"))


def by_allreduce(network: str, shapes: Path, ranks: int) -> tuple[np.ndarray, int]:
    """Weights and bytes of the same run."""
    choice, learners = ExchangeConfig(rule="allreduce"), [learner(network, shapes) for _ in range(ranks)]
    test = learners[0].data.held_out
    programs = [make_program(choice, own, Seat(rank=rank, ranks=ranks, test=test)) for rank, own in enumerate(learners)]
    found = run_ranks(programs, Ranks(step_s=[0.01] * ranks))
    return learners[0].weights(), found.bytes_sent


def trained(network: str, shapes: Path, folder: Path) -> np.ndarray:
    """Weights of the network in the folder of a run."""
    config = find_network(network)
    found = load_checkpoint(folder, Dataset.open(str(shapes), None).hierarchy).weights
    own = FlatLearner(config, read_images(config, Dataset.open(str(shapes), None))[0])
    own.trained_network.load_state_dict(found)
    return own.weights()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_gradients_equal_those_of_allreduce_in_an_eighth_of_the_bytes(
    ranks: int, shapes: Path, tmp_path: Path
) -> None:
    network = write(tmp_path, batch=24 // ranks, rate=0.1 / ranks)  # one step, at the rate 0.1
    given = RankOptions(network=network, strategy="hybrid", dataset=str(shapes), folder=tmp_path / "run")
    with rank_processes(given, ranks) as processes:
        result, *others = [each.ended() for each in processes]
    assert isinstance(result, dict), result
    assert (others, result["updates"]) == ([None] * (ranks - 1), ranks)
    torch.set_num_threads(1)
    weights, size = by_allreduce(network, shapes, ranks)
    before = learner(network, shapes).weights()
    assert np.abs(before - weights).max() > 0.01
    # At this rate, 1e-6 of the gradient.
    np.testing.assert_allclose(trained(network, shapes, tmp_path / "run"), weights, rtol=0, atol=1e-7)
    own = learner(network, shapes)
    dense = [own.trained_network.get_submodule(name) for pair in dense_pairs(own.trained_network) for name in pair]
    whole = sum(each.weight.numel() for each in dense) + dense[0].bias.numel()
    shared = sum(each.numel() for each in own.trained_network.parameters()) - whole - 256
    activations = 2 * 24 // ranks * (256 + 256)
    at_the_end = (ranks - 1) * 4 * whole
    counted = 2 * (ranks - 1) * 4 * shared + ranks * (ranks - 1) * 4 * activations
    assert result["bytes_sent"] == pytest.approx(counted + at_the_end, rel=0.001)
    assert counted < size / 8


def test_pairs_of_dense_layers_are_split_and_momentum_is_kept_in_parts(shapes: Path, tmp_path: Path) -> None:
    network = write(tmp_path, kind="mlp", options=MLP, batch=3, epochs=4, rate=0.05, momentum=0.9)
    given = RankOptions(network=network, strategy="hybrid", dataset=str(shapes), folder=tmp_path / "unbroken")
    with rank_processes(given, 2) as ranks:
        unbroken, _ = [each.ended() for each in ranks]
    torch.set_num_threads(1)
    weights, _ = by_allreduce(network, shapes, 2)
    np.testing.assert_allclose(trained(network, shapes, tmp_path / "unbroken"), weights, atol=1e-5)
    part = load_file(tmp_path / "unbroken" / "rank-1-16.safetensors")
    assert len(part["joined"]) == len(part["momentum"])
    assert len(part["joined"]) < 0.51 * len(weights)

    broken = dataclasses.replace(given, folder=tmp_path / "broken")
    with rank_processes(broken, 2) as ranks:
        while not ranks[1].progress or ranks[1].progress[-1][1] < 9:
            assert ranks[1].next() is not None
        ranks[1].kill()
        lost = ranks[0].ended()
    assert isinstance(lost, (UpstreamUnavailable, dict)), lost
    with rank_processes(broken, 2) as ranks:
        result, _ = [each.ended() for each in ranks]
    assert isinstance(result, dict)
    assert isinstance(unbroken, dict)
    assert (result["accuracy"], result["updates"]) == (unbroken["accuracy"], 32)
    for rank in range(2):
        one, other = (
            load_file(tmp_path / name / f"rank-{rank}-16.safetensors")["joined"] for name in ("unbroken", "broken")
        )
        assert one.tobytes() == other.tobytes()


def test_a_rank_that_is_killed_ends_the_other(shapes: Path, tmp_path: Path) -> None:
    network = write(tmp_path, kind="mlp", options=MLP, batch=3, epochs=3_000, rate=0.01)
    with rank_processes(RankOptions(network=network, strategy="hybrid", dataset=str(shapes)), 2) as ranks:
        while not ranks[1].progress:
            assert ranks[1].next() is not None
        ranks[1].kill()
        error = ranks[0].ended()
        assert isinstance(error, UpstreamUnavailable)
        assert "lost another one of 2" in str(error)


def test_what_cannot_be_split_is_refused_before_the_start(shapes: Path, tmp_path: Path) -> None:
    two = learner(write(tmp_path), shapes)
    assert dense_pairs(two.trained_network) == [("network.dense.0", "network.dense.3")]
    with pytest.raises(InvalidInput, match=r"512 units, which cannot be divided among 3 ranks"):
        check_hybrid(two, 3)
    with pytest.raises(InvalidInput, match="at least 2"):
        check_hybrid(two, 1)
    with pytest.raises(InvalidInput, match="no run on virtual time"):
        make_program(ExchangeConfig(rule="hybrid"), two, Seat(rank=0, ranks=2, test=two.data.held_out))
    network = write(tmp_path, kind="wide-resnet", options="{ depth = 10, width = 1 }")
    with rank_processes(RankOptions(network=network, strategy="hybrid", dataset=str(shapes)), 2) as ranks:
        for each in ranks:
            error = each.ended()
            assert isinstance(error, InvalidInput)
            assert "'net' has no two dense layers in a row" in str(error)
