"""Ranks as processes that exchange by gloo."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch
from safetensors.numpy import load_file

from models.dataset import Dataset
from tests.rank_processes import RankProcess, place_of, rank_processes, start_rank
from tests.shapes import write_shapes
from tierkit.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidInput,
    PortInUse,
    ProviderUnavailable,
    SetupError,
    UpstreamUnavailable,
)
from tierkit.http.address import free_port
from training.host.opening import find_network, open_host
from training.host.settings import HostSettings
from training.learner import FlatLearner, read_images
from training.messages import SPEC
from training.parallel.exchange import Seat
from training.parallel.lockstep import Ranks, run_ranks
from training.parallel.meeting import Meeting, RankPlace
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
peak_rate = 0.05
schedule = "constant"
momentum = 0.9
weight_decay = 1e-3
held_out_per_class = 4
precision = "fp32"
crop_padding = 0
mirror = false

[network]
kind = "mlp"
options = {{ inputs = 3072, hidden = [8], activation = "tanh" }}
"""
"""24 images to train on."""

Network = Callable[..., Path]


@pytest.fixture
def network(tmp_path: Path) -> Network:
    """Writes a configuration."""

    def write(epochs: int = 4, batch: int = 3, folder: str = ".", **changes: str) -> Path:
        path = tmp_path / folder / "net.toml"
        path.parent.mkdir(exist_ok=True)
        text = CONFIG.format(epochs=epochs, batch=batch)
        for name, value in changes.items():
            text = text.replace(name, value)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def options(network: Network, shapes: Path) -> RankOptions:
    return RankOptions(network=str(network()), dataset=str(shapes), patience_s=30.0)


def changed(options: RankOptions, **changes: Any) -> RankOptions:
    return dataclasses.replace(options, **changes)


def strategy(folder: Path, **given: object) -> str:
    path = folder / "own.toml"
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()))
    return str(path)


def vectors(folder: Path, rank: int, step: int) -> dict[str, Any]:
    return load_file(folder / f"rank-{rank}-{step}.safetensors")


def ended(ranks: list[RankProcess]) -> list[Any]:
    return [each.ended() for each in ranks]


def test_four_ranks_are_one_process_with_four_times_the_batch(network: Network, shapes: Path, tmp_path: Path) -> None:
    own = strategy(tmp_path, family="exchange", rule="allreduce", scaling="none")
    given = RankOptions(
        network=str(network(epochs=25)), dataset=str(shapes), strategy=own, folder=tmp_path / "run", seed=3
    )
    with rank_processes(given, 4) as ranks:
        result, *others = ended(ranks)
    assert others == [None] * 3
    assert (result["updates"], result["workers"], result["strategy"]) == (200, 4, "own")

    config = find_network(str(network(epochs=25, batch=12, folder="whole"))).model_copy(update={"seed": 3})
    images, _ = read_images(config, Dataset.open(str(shapes), None))
    whole = FlatLearner(config, images, strategy=ExchangeConfig(rule="allreduce"))
    for step in range(whole.steps):
        whole.walk(step, whole.rate(step))
    assert whole.steps == 50
    found = [vectors(tmp_path / "run", rank, 50) for rank in range(4)]
    np.testing.assert_allclose(found[0]["joined"], whole.joined(), atol=1e-5)
    np.testing.assert_allclose(found[0]["momentum"], whole.momentum(), atol=1e-4)
    for each in found[1:]:
        assert each["joined"].tobytes() == found[0]["joined"].tobytes()


def test_the_mean_of_torch_is_that_of_the_plain_program(network: Network, shapes: Path, tmp_path: Path) -> None:
    """With normalisation, whose running statistics each rank has for itself until the end."""
    convolutions = {
        'kind = "mlp"': 'kind = "wide-resnet"',
        'inputs = 3072, hidden = [8], activation = "tanh"': "depth = 10, width = 1",
    }
    path = network(epochs=2, batch=6, **convolutions)
    with rank_processes(RankOptions(network=str(path), dataset=str(shapes), folder=tmp_path / "run"), 2) as ranks:
        assert isinstance(ranks[0].ended(), dict)
        ranks[1].ended()

    config, choice = find_network(str(path)), ExchangeConfig(rule="allreduce")
    images, test = read_images(config, Dataset.open(str(shapes), None))
    learners = [FlatLearner(config, images, strategy=choice) for _ in range(2)]
    seats = [Seat(rank=rank, ranks=2, test=test) for rank in range(2)]
    programs = [make_program(choice, own, seat) for own, seat in zip(learners, seats, strict=True)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_ranks(programs, Ranks(step_s=[0.01] * 2))
    torch.set_num_threads(threads)
    values, buffers = learners[0].lengths
    assert buffers > 0
    found = [vectors(tmp_path / "run", rank, 4)["joined"] for rank in range(2)]
    for each in found:
        np.testing.assert_allclose(each[:values], learners[0].weights(), atol=1e-4)
    assert np.abs(found[0][values:] - found[1][values:]).max() > 1e-3
    np.testing.assert_allclose(np.mean(found, axis=0)[values:], learners[0].buffers(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", ["allreduce", "gossip", "tournament", "ensemble", "factors"])
def test_a_run_that_was_killed_continues_to_the_same_weights(rule: str, options: RankOptions, tmp_path: Path) -> None:
    given = changed(options, strategy=rule, epochs=6)
    with rank_processes(changed(given, folder=tmp_path / "unbroken"), 2) as ranks:
        unbroken, _ = ended(ranks)
    broken = changed(given, folder=tmp_path / "broken")
    with rank_processes(broken, 2) as ranks:
        while not ranks[1].progress or ranks[1].progress[-1][1] < 13:
            assert ranks[1].next() is not None
        ranks[1].kill()
        lost = ranks[0].ended()
    assert lost is None or isinstance(lost, (UpstreamUnavailable, dict)), lost
    with rank_processes(broken, 2) as ranks:
        result, _ = ended(ranks)
    assert (result["accuracy"], result["updates"]) == (unbroken["accuracy"], 48)
    for rank in range(2):
        one, other = (vectors(tmp_path / name, rank, 24)["joined"] for name in ("unbroken", "broken"))
        assert one.tobytes() == other.tobytes()


def test_a_rank_that_is_killed_ends_the_others(options: RankOptions) -> None:
    with rank_processes(changed(options, epochs=3_000), 3) as ranks:
        while ranks[2].progress == []:
            assert ranks[2].next() is not None
        ranks[2].kill()
        for each in ranks[:2]:
            error = each.ended()
            assert isinstance(error, UpstreamUnavailable)
            assert "lost another one of 3" in str(error)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("network", {"network": {"hidden = [8]": "hidden = [9]"}}),
        ("seed", {"seed": 5}),
        ("epochs", {"epochs": 7}),
        ("strategy", {"strategy": "gossip"}),
        ("data set", {"dataset": "other"}),
    ],
)
def test_ranks_that_disagree_say_who_differs_in_what(
    what: str, changes: dict[str, Any], options: RankOptions, network: Network, tmp_path: Path
) -> None:
    changes = dict(changes)
    if what == "network":
        changes["network"] = str(network(folder="other", **changes["network"]))
    if what == "data set":
        changes["dataset"] = str(write_shapes(tmp_path / "other-shapes", seed=1))
    with rank_processes({0: options, 1: changed(options, **changes), 2: options}, 3) as ranks:
        for error in ended(ranks):
            assert isinstance(error, Conflict)
            assert f"rank 1 has the {what} " in str(error)
            assert "rank 2" not in str(error)


def test_ranks_that_disagree_about_their_number_are_told(options: RankOptions) -> None:
    port = free_port()
    ranks = [start_rank(options, place_of(rank, count, port)) for rank, count in ((0, 2), (1, 3))]
    for error in ended([ranks[0]]):
        assert isinstance(error, Conflict)
        assert "world size" in str(error)
    ranks[1].kill()


def test_a_rank_that_never_comes_ends_the_others_after_the_budget(options: RankOptions) -> None:
    short = changed(options, patience_s=1.0)
    with rank_processes({0: short, 1: short}, 3) as ranks:
        for error in ended(ranks):
            assert isinstance(error, DeadlineExceeded)
            assert "2 of 3 ranks came within 1 s, and not 2" in str(error)
    with rank_processes({1: short}, 2) as ranks:
        [error] = ended(ranks)
        assert isinstance(error, UpstreamUnavailable)
        assert "cannot reach rank 0 at 127.0.0.1" in str(error)


def test_rank_0_waits_until_all_have_heard_that_the_run_is_stopped() -> None:
    port, met = free_port(), threading.Barrier(2)

    def seat(rank: int) -> RankPlace:
        return RankPlace(rank=rank, ranks=2, address="127.0.0.1", port=port, local_rank=rank, attempt="0", hosted=False)

    def keep() -> None:
        with Meeting.met(seat(0), {}, patience_s=30.0) as meeting:
            met.wait()
            meeting.stop()

    keeper = threading.Thread(target=keep)
    keeper.start()
    with Meeting.met(seat(1), {}, patience_s=30.0) as meeting:
        met.wait()
        keeper.join(3.0)  # longer than the farewell of a run that ends by itself
        assert meeting.stopped()
    keeper.join(30.0)
    assert not keeper.is_alive()


def test_a_port_in_use_and_a_rank_that_is_there_twice_are_told(options: RankOptions) -> None:
    short = changed(options, patience_s=2.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = place_of(0, 2, other.getsockname()[1])
        error = start_rank(short, place).ended()
        assert isinstance(error, PortInUse)
        assert str(place["MASTER_PORT"]) in str(error)
    port = free_port()
    same = [start_rank(short, place_of(rank, 3, port)) for rank in (0, 1, 1)]
    said = [str(error) for error in ended(same)]
    assert any("another process is rank 1" in each for each in said[1:])
    assert "2 of 3 ranks came" in said[0]


def test_a_member_with_old_weights_and_a_folder_of_another_run_are_refused(
    options: RankOptions, tmp_path: Path
) -> None:
    kept = changed(options, folder=tmp_path / "run")
    with rank_processes(kept, 2) as ranks:
        ended(ranks)
    with rank_processes(changed(kept, seed=9), 2) as ranks:
        for error in ended(ranks):
            assert isinstance(error, SetupError)
            assert "another value of seed" in str(error)
    (tmp_path / "run" / "rank-0-12.safetensors").unlink()
    (tmp_path / "run" / "rank-1-16.safetensors").unlink()
    with rank_processes(kept, 2) as ranks:
        for error in ended(ranks):
            assert isinstance(error, Conflict)
            assert "rank 0 16, rank 1 12" in str(error)


def test_a_damaged_checkpoint_is_none_and_the_run_continues_from_the_one_before(
    options: RankOptions, tmp_path: Path
) -> None:
    kept = changed(options, strategy="gossip", folder=tmp_path / "run")
    with rank_processes(kept, 2) as ranks:
        first = ended(ranks)[0]
    newest = tmp_path / "run" / "rank-1-16.safetensors"
    content = bytearray(newest.read_bytes())
    content[-200:-100] = b"\x42" * 100
    newest.write_bytes(content)
    weights = vectors(tmp_path / "run", 0, 16)["joined"]
    with rank_processes(kept, 2) as ranks:
        again = ended(ranks)[0]
    assert isinstance(first, dict)
    assert isinstance(again, dict)
    assert again["accuracy"] == first["accuracy"]
    assert (vectors(tmp_path / "run", 1, 16)["joined"] == weights).all()
    (tmp_path / "run" / "rank-1-12.safetensors").unlink()
    newest.write_bytes((tmp_path / "run" / "rank-0-16.safetensors").read_bytes())  # of another rank
    with rank_processes(kept, 2) as ranks:
        assert all(isinstance(error, SetupError) and "rank 1" in str(error) for error in ended(ranks))


def test_a_folder_of_a_host_is_refused_and_one_of_ranks_by_a_host(options: RankOptions, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / SPEC).write_text("{}")
    with rank_processes(changed(options, folder=tmp_path / "host"), 2) as ranks:
        assert all(isinstance(error, SetupError) and "run of a host" in str(error) for error in ended(ranks))
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0-4.safetensors").touch()
    settings = HostSettings(network=options.network, dataset=options.dataset, folder=tmp_path / "ranks")
    with pytest.raises(SetupError, match="run of ranks"):
        open_host(settings)


def test_more_ranks_than_steps_and_a_missing_gpu_are_refused(options: RankOptions) -> None:
    for changes, kind, said in (
        ({"epochs": 1}, InvalidInput, "9 ranks are more than the 8 steps"),
        ({"device": "cuda"}, ProviderUnavailable, "torch finds 0 on this machine"),
        ({"strategy": "sgd"}, InvalidInput, "needs a host"),
    ):
        error = start_rank(changed(options, **changes), place_of(8, 9, 1)).ended()
        assert isinstance(error, kind)
        assert said in str(error)


def test_a_place_that_cannot_be_is_refused(options: RankOptions) -> None:
    with rank_processes(options, 1, {"RANK": "1"}) as ranks:
        [error] = ended(ranks)
    assert isinstance(error, SetupError)
    assert "counted from 0" in str(error)
