"""Factors instead of gradients, on virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import ImageSet
from models.hierarchy import Hierarchy
from tierkit.errors import InvalidInput, SetupError

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.config import TrainConfig  # noqa: E402
from models.training.data import TrainingData  # noqa: E402
from training.learner import FlatLearner  # noqa: E402
from training.parallel.exchange import Seat  # noqa: E402
from training.parallel.factors import factored  # noqa: E402
from training.parallel.lockstep import Ranks, Stepped, run_ranks  # noqa: E402
from training.parallel.programs import check_rule, make_program  # noqa: E402
from training.strategies.config import ExchangeConfig  # noqa: E402
from training.strategies.finding import find_hosted, find_strategy  # noqa: E402

pytestmark = pytest.mark.train

NUMBERS = Hierarchy.parse(
    {"name": "numbers", "fine": list("0123456789"), "superclasses": {"all": list("0123456789")}}, source="test"
)
FINE = np.arange(160) % 10
IMAGES = ImageSet(
    images=np.random.default_rng(0).integers(0, 255, (160, 28, 28, 1)).astype(np.uint8),
    fine=FINE,
    coarse=NUMBERS.coarse_labels(FINE),
    names=tuple(map(str, range(160))),
    hierarchy_name="numbers",
)
FACTORS = ExchangeConfig(rule="factors", scaling="none")


def config(hidden: tuple[int, ...] = (1024, 1024), **changes: Any) -> TrainConfig:
    """784-1024-1024-10 with batches of 32."""
    return TrainConfig.model_validate(
        {
            "name": "dense",
            "tier": "end",
            "target": "fine",
            "network": {"kind": "mlp", "options": {"inputs": 784, "hidden": hidden, "activation": "relu"}},
            "epochs": 1,
            "batch_size": 32,
            "peak_rate": 0.1,
            "schedule": "constant",
            "weight_decay": 1e-3,
            "crop_padding": 0,
            "mirror": False,
            "held_out_per_class": 3,
            "precision": "fp32",
        }
        | changes
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner(own: TrainConfig) -> FlatLearner:
    return FlatLearner(own, TrainingData(own, IMAGES, NUMBERS), strategy=FACTORS)


def trained(rule: str, ranks: int, own: TrainConfig) -> tuple[Stepped, list[FlatLearner]]:
    choice = ExchangeConfig.model_validate({"rule": rule, "scaling": "none"})
    learners = [learner(own) for _ in range(ranks)]
    programs = [
        make_program(choice, each, Seat(rank=rank, ranks=ranks, test=IMAGES)) for rank, each in enumerate(learners)
    ]
    return run_ranks(programs, Ranks(step_s=[0.01] * ranks)), learners


@pytest.mark.parametrize(("ranks", "less"), [(2, 12), (4, 7)])
def test_the_gradients_equal_those_of_allreduce_in_fewer_bytes(ranks: int, less: int) -> None:
    own = config(momentum=0.0)
    before = learner(own).weights()
    gradients, steps = {}, {}
    for rule in ("allreduce", "factors"):
        steps[rule], learners = trained(rule, ranks, own)
        assert len({each.weights().tobytes() for each in learners}) == 1
        gradients[rule] = (before - learners[0].weights()) / own.peak_rate
    assert steps["factors"].steps == 4 // ranks
    np.testing.assert_allclose(gradients["factors"], gradients["allreduce"], atol=1e-6)
    assert np.abs(gradients["factors"]).max() > 0.01
    assert less < steps["allreduce"].bytes_sent / steps["factors"].bytes_sent < less + 2


def test_momentum_dropout_and_mixed_images_give_the_same_weights() -> None:
    """Dropout is drawn the same, and so are mixed images."""
    own = config(hidden=(256, 128), epochs=3, batch_size=8, label_smoothing=0.1, mixup=0.3)
    own.network.options["dropout"] = 0.3
    (_, one), (_, other) = (trained(rule, 2, own) for rule in ("allreduce", "factors"))
    for each in other:
        np.testing.assert_allclose(each.weights(), one[0].weights(), atol=1e-5)
        np.testing.assert_allclose(each.momentum(), one[0].momentum(), atol=1e-4)


def test_a_layer_whose_factors_take_more_bytes_sends_its_gradient() -> None:
    own = learner(config())
    widths = [[(each.in_features, each.out_features) for each in factored(own, ranks)] for ranks in (2, 27, 28, 33)]
    # 784 x 1024 / (32 x 1808 / 2) = 27.8 ranks, and 1024 x 1024 / (32 x 2048 / 2) = 32.
    assert widths == [[(784, 1024), (1024, 1024)], [(784, 1024), (1024, 1024)], [(1024, 1024)], []]


def test_what_saves_no_bytes_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"no dense layer of 'dense' .* N = 33 ranks and batches of b = 32"):
        check_rule(FACTORS, learner(config()), 33)
    with pytest.raises(InvalidInput, match="fewer bytes"):
        trained("factors", 2, config(hidden=(32,)))
    with pytest.raises(InvalidInput, match="2 ranks"):
        trained("factors", 1, config())


def test_factors_are_neither_masked_nor_for_a_host(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('family = "exchange"\nrule = "factors"\n[masking]\n')
    with pytest.raises(SetupError, match="factors of the first layer are the images"):
        find_strategy(str(path))
    with pytest.raises(InvalidInput, match="for ranks"):
        find_hosted("factors")
