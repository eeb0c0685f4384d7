"""Pipelines of real processes against one process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import queue
import re
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch
from safetensors.numpy import load_file

from models.dataset import Dataset
from models.training.checkpoint import load_checkpoint
from models.training.config import TrainConfig, find_config
from models.training.data import TrainingData
from models.training.record import FleetFacts
from terrace.cli import run
from tests.integration.training.staged import Limited, parts, run_limited, run_stage, time_rounds, whole
from tests.rank_processes import rank_processes
from tests.shapes import SHAPES, shape_images
from tierkit.errors import InvalidInput, SetupError, UpstreamUnavailable
from tierkit.http.address import free_port
from training.learner import FlatLearner, read_images
from training.parallel.exchange import Seat
from training.parallel.keeping import Checkpoints, Totals
from training.parallel.pipeline import RankStage
from training.parallel.programs import check_rule, make_program
from training.parallel.rank import RankOptions
from training.strategies.config import ExchangeConfig

pytestmark = [pytest.mark.train, pytest.mark.timeout(120)]

_LOOK_S = 1.0


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


_SMALL = {"inputs": 3072, "hidden": [8, 8], "activation": "tanh"}
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


def in_processes(work: Callable[..., None], ranks: int, cases: Any, meeting: Path) -> list[Any]:
    """What each rank has found."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.training.staged", "training.parallel.schedules"])
    answers = context.Queue()
    processes = [
        context.Process(target=work, args=(rank, ranks, str(meeting), cases, answers)) for rank in range(ranks)
    ]
    try:
        for each in processes:
            each.start()
        came: dict[int, Any] = {}
        while len(came) < ranks and not any(each.exitcode for each in processes):
            with contextlib.suppress(queue.Empty):
                came |= [answers.get(timeout=_LOOK_S)]
    finally:
        for each in processes:
            each.join(10)
            each.kill()
    return [came[rank] for rank in range(ranks)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks has found, for each case."""
    return in_processes(run_stage, 3, CASES, tmp_path_factory.mktemp("meet") / "meet")


@pytest.mark.parametrize("name", CASES)
def test_stages_have_the_gradients_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    gradients: dict[str, Any] = {}
    for each in (rank[name] for rank in found):
        assert not gradients.keys() & each["gradients"].keys()
        assert each["gradients"]
        gradients |= each["gradients"]
    same, loss = parts(*CASES[name])
    assert gradients.keys() == same.keys()
    far = max(np.abs(gradients[each] - same[each]).max() for each in same)
    assert far <= 1e-7
    assert found[-1][name]["loss"] == pytest.approx(loss, abs=1e-6)
    if name != "bf16":
        batch, loss = whole(*CASES[name])
        far = max(np.abs(gradients[each] - batch[each]).max() for each in same)
        assert far <= 1e-6
        assert found[-1][name]["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.fixture
def options(shapes: Path, tmp_path: Path) -> RankOptions:
    own = tmp_path / "own.toml"
    own.write_text('family = "exchange"\nrule = "pipeline"\nmicro_batches = 3')
    return RankOptions(network=written(tmp_path, epochs=20), dataset=str(shapes), strategy=str(own), patience_s=30.0)


def written(folder: Path, kind: str = "mlp", options: Mapping[str, Any] = _SMALL, **changes: Any) -> str:
    """A configuration as a file."""
    given = config(kind, {}, **({"held_out_per_class": 4, "mirror": False} | changes)).model_dump(exclude_none=True)
    text = [f"{name} = {json.dumps(value)}" for name, value in given.items() if name != "network"]
    text += ["[network]", f'kind = "{kind}"', "[network.options]"]
    text += [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    path = folder / "tiny.toml"
    path.write_text("\n".join(text))
    return str(path)


def test_a_network_that_does_not_fit_in_one_process_trains_in_two(options: RankOptions, tmp_path: Path) -> None:
    network = written(tmp_path, options={"inputs": 3072, "hidden": [3072] * 4}, epochs=1, peak_rate=1e-3)
    wide = dataclasses.replace(options, network=network, folder=tmp_path / "run")
    size = 4 * 4 * 3072 * 3073
    run = Limited(options=wide, port=free_port(), more_bytes=round(3.6 * size))
    [one] = in_processes(run_limited, 1, run, tmp_path)
    assert "allocate" in one
    less = dataclasses.replace(run, more_bytes=round(1.7 * size))
    for rank, refused in enumerate(in_processes(run_limited, 2, less, tmp_path)):
        assert isinstance(refused, SetupError), refused
        assert f"stage {rank} of 2 needs" in str(refused)
    result, other = in_processes(run_limited, 2, run, tmp_path)
    assert other is None
    assert isinstance(result, dict), result
    assert (result["updates"], result["workers"]) == (2, 2)
    assert (tmp_path / "run" / "checkpoint.pt").stat().st_size > size


def test_a_stage_that_is_killed_ends_the_run_and_the_same_command_continues_it(
    options: RankOptions, tmp_path: Path
) -> None:
    with rank_processes(dataclasses.replace(options, folder=tmp_path / "unbroken"), 3) as ranks:
        unbroken, *others = [each.ended() for each in ranks]
    assert others == [None, None]
    assert isinstance(unbroken, dict), unbroken
    assert (unbroken["updates"], unbroken["accuracy"]) == (40, 1.0)
    broken = dataclasses.replace(options, folder=tmp_path / "broken")
    with rank_processes(broken, 3) as ranks:
        while not ranks[1].progress or ranks[1].progress[-1][1] < 13:
            assert ranks[1].next() is not None
        ranks[1].kill()
        for each in (ranks[0], ranks[2]):
            assert isinstance(each.ended(), UpstreamUnavailable)
    assert not (tmp_path / "broken" / "result.json").exists()
    with rank_processes(broken, 3) as ranks:
        again, *_ = [each.ended() for each in ranks]
    assert isinstance(again, dict), again
    assert (again["updates"], again["accuracy"]) == (40, 1.0)
    for rank in range(3):
        one, other = (load_file(tmp_path / name / f"rank-{rank}-40.safetensors") for name in ("unbroken", "broken"))
        assert one["joined"].tobytes() == other["joined"].tobytes()
        assert one["momentum"].tobytes() == other["momentum"].tobytes()


def test_the_whole_network_is_kept_as_one_process_would_have_trained_it(options: RankOptions, tmp_path: Path) -> None:
    """With images that are smaller in early epochs, and normalisation that keeps its first statistics."""
    own = tmp_path / "own.toml"
    own.write_text('family = "exchange"\nrule = "pipeline"\nmicro_batches = 3\nfrozen = true')
    changes = {"early_side": 16, "peak_rate": 0.01, "epochs": 4}
    network = written(tmp_path, kind="wide-resnet", options={"depth": 10, "width": 1}, **changes)
    given = dataclasses.replace(options, network=network, strategy=str(own), folder=tmp_path / "tiny")
    with rank_processes(given, 2) as ranks:
        result, _ = [each.ended() for each in ranks]
    assert isinstance(result, dict), result
    trained = given.network_config()
    learner = FlatLearner(trained, read_images(trained, Dataset.open(str(given.dataset), None))[0])
    learner.freeze()
    for step in range(learner.steps):
        learner.walk(step, learner.rate(step))
    kept = load_checkpoint(tmp_path / "tiny", learner.data.hierarchy).averaged
    for name, value in learner.network.state_dict().items():
        if value.is_floating_point():
            np.testing.assert_allclose(kept[f"network.{name}"], value, atol=1e-5)
    # At the border: 16 maps of 16 x 16 pixels, later of 32 x 32, there and back; a loss; and the last stage.
    borders = sum(2 * 4 * 16 * side**2 * 12 * learner.steps // 2 for side in (16, 32))
    assert borders < result["bytes_sent"] < borders + 4 * sum(learner.lengths) + 4 * learner.steps
    assert run(["models", "eval", "tiny", "--runs", str(tmp_path), "--dataset", str(options.dataset)]) == 0


@pytest.mark.parametrize(
    ("given", "ranks", "changes", "said"),
    [
        ({}, 1, {}, "for 2 to 4 ranks, and there are 1"),
        ({}, 5, {}, "for 2 to 4 ranks, and there are 5"),
        ({"micro_batches": 5}, 2, {}, "12 images cannot be cut into 5 equal micro_batches"),
        ({"micro_batches": 2}, 3, {}, "1f1b needs 3 micro_batches for 3 ranks, and has 2: set schedule to gpipe"),
        ({}, 2, {"options": MLP | {"dropout": 0.5}}, "has dropout"),
        ({}, 2, {"kind": "wide-resnet", "options": {"depth": 10, "width": 1}}, "has batch normalisation"),
        (
            {},
            2,
            {"kind": "early-exit", "options": {"alpha": 0.25}, "auxiliary": 1.0},
            "its blocks do not follow one another",
        ),
        ({}, 2, {"target": "coarse", "auxiliary": 0.5}, "second classifier: set auxiliary to 0"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(
    given: dict[str, Any], ranks: int, changes: dict[str, Any], said: str
) -> None:
    changed = config(**({"kind": "mlp", "options": MLP} | changes))
    learner = FlatLearner(changed, TrainingData(changed, shape_images(8), SHAPES))
    with pytest.raises(InvalidInput, match=re.escape(said)):
        check_rule(pipeline(**given), learner, ranks)


def test_a_stage_without_room_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    case = config("wide-resnet", {"depth": 10, "width": 1})
    refused = {
        (1, 1_000_000): r"stage 1 of 2 needs .* MB more, .* start more ranks",
        (0, 300_000): r"rank 0 needs .* MB more for the whole network in the end",
        (1, 10_000_000): None,
    }
    for (rank, free), said in refused.items():
        monkeypatch.setattr("training.parallel.pipeline.free_bytes", lambda device, free=free: free)
        learner = FlatLearner(case, TrainingData(case, shape_images(8), SHAPES))
        with pytest.raises(SetupError, match=said) if said else contextlib.nullcontext():
            RankStage(pipeline(frozen=True), learner, rank, 2)
    own = sum(each.nbytes for each in learner.network.parameters())
    assert own == 4 * learner.lengths[0] < 4 * FlatLearner(case, learner.data).lengths[0]


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    tiny = config("mlp", MLP | {"hidden": [400, 400]})
    learner, number = FlatLearner(tiny, TrainingData(tiny, shape_images(8), SHAPES)), resource.RLIMIT_FSIZE
    kept = Checkpoints(tmp_path, 0, {})
    before = resource.getrlimit(number)
    fleet = FleetFacts(strategy="pipeline", workers=2, updates=1)
    final = learner.weights(), learner.buffers()

    def write() -> None:
        kept.save(1, learner, Totals(), {})

    def write_whole() -> None:
        learner.keep(final, tmp_path, dataset="shapes", seconds=1.0, fleet=fleet)

    for each, name in ((write, "rank-0-1.safetensors"), (write_whole, "checkpoint.pt")):
        each()
        content = (tmp_path / name).read_bytes()
        resource.setrlimit(number, (100_000, before[1]))
        try:
            with pytest.raises(SetupError, match=f"cannot write .*{name}.*File too large"):
                each()
        finally:
            resource.setrlimit(number, before)
        assert (tmp_path / name).read_bytes() == content


def test_a_pipeline_has_no_run_on_virtual_time() -> None:
    learner = FlatLearner(tiny := config("mlp", MLP), TrainingData(tiny, shape_images(8), SHAPES))
    with pytest.raises(InvalidInput, match="no run on virtual time"):
        make_program(pipeline(), learner, Seat(rank=0, ranks=2, test=shape_images(8)))


@pytest.mark.benchmark
@pytest.mark.timeout(400)
def test_two_ranks_take_no_longer_than_one_process(tmp_path: Path) -> None:
    """On demand: `pytest -m benchmark -s tests/integration/training/test_pipeline.py`."""
    wide = find_config("wrn-16-4", None).model_copy(update={"held_out_per_class": 2})
    cases = {name: (wide, pipeline(schedule=name, micro_batches=8, frozen=True)) for name in ("1f1b", "gpipe")}
    ranks = in_processes(time_rounds, 2, cases, tmp_path / "meet")
    one, threaded = (statistics.median(ranks[0][0][name]) for name in ("one process", "two threads"))
    ratios = {}
    for name in cases:
        took = statistics.median(ranks[0][0][name])
        ratios[name] = took / one
        busy = [sum(each[1][name].get(part, 0.0) for part in ("forward", "backward")) / 6 for each in ranks]
        sys.stdout.write(
            f"{name}: {took:.3f} s a step, one process {one:.3f}, ratio {took / one:.2f}; with two threads "
            f"{threaded:.3f}, ratio {took / threaded:.2f}; the ranks compute {busy[0]:.3f} and {busy[1]:.3f}\n"
        )
    assert max(ratios.values()) <= 1.25
