"""The networks' learner with flat weights: units that can be repeated, and one worker that is sequential training."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.shapes import SHAPES, shape_images
from tierkit.errors import WeightsError

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.config import CONFIGS, TrainConfig, find_config  # noqa: E402
from models.training.data import TrainingData  # noqa: E402
from models.training.learner import NetworkLearner, groups_of, set_rate  # noqa: E402
from training.learner import ADAMW_DECAY, FlatLearner  # noqa: E402
from training.strategies.build import build_strategy  # noqa: E402
from training.strategies.config import HostedConfig, OuterConfig, ServerConfig  # noqa: E402
from training.strategies.finding import HOSTED  # noqa: E402
from training.strategies.protocol import Strategy  # noqa: E402
from training.trust.config import TrustConfig  # noqa: E402
from training.virtual import Conditions, SimulatedWorker, simulate  # noqa: E402

pytestmark = pytest.mark.train

CONFIG = TrainConfig.model_validate(
    {
        "name": "tiny",
        "tier": "end",
        "target": "fine",
        "network": {"kind": "wide-resnet", "options": {"depth": 10, "width": 1}},
        "epochs": 4,
        "batch_size": 8,
        "crop_padding": 1,
        "momentum": 0.0,
        "held_out_per_class": 2,
        "precision": "fp32",
    }
)
DATA = shape_images(8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps as small as these cost more to share than to compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner(config: TrainConfig = CONFIG) -> FlatLearner:
    return FlatLearner(config, TrainingData(config, DATA, SHAPES))


def trained(name: str | HostedConfig, config: TrainConfig = CONFIG, workers: int = 1) -> tuple[Strategy, FlatLearner]:
    chosen = HOSTED[name] if isinstance(name, str) else name
    own = FlatLearner(config, TrainingData(config, DATA, SHAPES), strategy=chosen)
    strategy = build_strategy(chosen, (own.weights(), own.buffers()), own, workers=workers, lease_s=60.0)
    crew = [SimulatedWorker(name=f"w{number}", step_s=1.0) for number in range(workers)]
    simulate(strategy, own, crew, Conditions(serve_s=0.01))
    return strategy, own


def sequential(config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Weights and running statistics that the trainer of one machine ends with."""
    own = NetworkLearner(config, TrainingData(config, DATA, SHAPES))
    for step in range(config.epochs * own.data.batches.steps_per_epoch):
        own.learn(step)
    weights = [value.detach().reshape(-1).numpy() for value in own.network.parameters()]
    buffers = [value.reshape(-1).numpy() for value in own.network.buffers() if value.is_floating_point()]
    return np.concatenate(weights), np.concatenate(buffers)


def test_a_unit_is_the_same_when_it_is_repeated_whatever_came_between() -> None:
    own = learner()
    weights, buffers = own.weights(), own.buffers()
    first = own.compute(range(3, 5), "gradient")
    own.compute(range(7, 9), "change")
    own.load(weights, buffers)
    again = own.compute(range(3, 5), "gradient")
    other = learner()
    other.load(weights, buffers)
    for found in (again, other.compute(range(3, 5), "gradient")):
        assert found.values.tobytes() == first.values.tobytes()
        assert found.buffers.tobytes() == first.buffers.tobytes()
        assert found.loss == first.loss


@pytest.mark.parametrize("name", ["sgd", "dc-constant", "dc-adaptive"])
def test_one_worker_is_sequential_training_to_the_bit(name: str) -> None:
    strategy, own = trained(HOSTED[name].model_copy(update={"delay_compensation": 0.0}))
    again = learner()
    weights, buffers = again.weights(), again.buffers()
    for step in range(own.steps):
        again.load(weights, buffers)
        found = again.compute(range(step, step + 1), "gradient")
        weights, buffers = weights - np.float32(own.rate(step)) * found.values, found.buffers
    assert strategy.weights.tobytes() == weights.tobytes()
    # The optimiser of torch multiplies and adds in one rounding, numpy in two.
    np.testing.assert_allclose(strategy.weights, sequential(CONFIG)[0], rtol=1e-3, atol=1e-4)


def test_one_worker_of_sgd_has_the_momentum_of_its_network() -> None:
    config = CONFIG.model_copy(update={"momentum": 0.9})
    strategy, _ = trained("sgd", config)
    np.testing.assert_allclose(strategy.weights, sequential(config)[0], rtol=1e-3, atol=1e-3)
    plain, _ = trained(ServerConfig(rule="sgd", momentum=0.0), config)
    assert np.abs(strategy.weights - plain.weights).max() > 0.01


@pytest.mark.parametrize(
    ("config", "peak"),
    [
        (ServerConfig(rule="average", period=3, rate=0.01), 0.01),
        (ServerConfig(rule="sgd", period=3, rate=0.01), 0.01),
        (OuterConfig(period=3, inner_rate=0.01), 0.01),
        (OuterConfig(period=3), CONFIG.peak_rate),
    ],
    ids=lambda each: getattr(each, "family", str(each)),
)
def test_workers_step_at_the_rate_of_their_strategy(config: HostedConfig, peak: float) -> None:
    own = learner()
    weights, buffers = own.weights(), own.buffers()
    strategy = build_strategy(config, (weights, buffers), own, workers=1, lease_s=60.0)
    lease = strategy.grant("w", 0.0)
    assert lease is not None
    own.load(weights, buffers)
    found = own.compute(lease.unit.span, config.sends, lease.unit.rate).values
    here, total = weights, np.zeros_like(weights)
    for step in lease.unit.span:
        own.load(here, own.buffers())
        gradient = own.compute(range(step, step + 1), "gradient").values
        total, here = total + gradient, here - np.float32(own.rate(step) * peak / CONFIG.peak_rate) * gradient
    expected = total if config.sends == "gradient" else weights - here
    # As a whole: where an activation is close to 0, the rounding of a processor decides on a few values.
    assert np.linalg.norm(found - expected) <= 1e-2 * np.linalg.norm(expected)


def test_adamw_stays_with_its_worker_between_rounds() -> None:
    chosen = OuterConfig(period=3, inner="adamw", inner_rate=0.01)
    strategy, own = trained(chosen)
    network = NetworkLearner(CONFIG, TrainingData(CONFIG, DATA, SHAPES))
    decayed = CONFIG.model_copy(update={"weight_decay": ADAMW_DECAY})
    adamw = torch.optim.AdamW(groups_of(network.network, decayed), lr=0.01)
    for step in range(own.steps):
        set_rate(adamw, own.rate(step) * 0.01 / CONFIG.peak_rate)
        network.backward(step)
        adamw.step()
        adamw.zero_grad()
    weights = np.concatenate([value.detach().reshape(-1).numpy() for value in network.network.parameters()])
    np.testing.assert_allclose(strategy.weights, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_of_an_outer_rule_that_does_nothing_is_sequential_training(momentum: float) -> None:
    config = CONFIG.model_copy(update={"momentum": momentum})
    weights, buffers = sequential(config)
    strategy, _ = trained(OuterConfig(period=3), config)
    np.testing.assert_allclose(strategy.weights, weights, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(strategy.buffers, buffers, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("trust", [None, TrustConfig()])
def test_momentum_stays_with_a_worker_unless_its_updates_are_judged(trust: TrustConfig | None) -> None:
    config = CONFIG.model_copy(update={"momentum": 0.9})
    own, other = (
        FlatLearner(config, TrainingData(config, DATA, SHAPES), strategy=OuterConfig(trust=trust)) for _ in range(2)
    )
    own.compute(range(0, 3), "change")
    weights, buffers = own.weights(), own.buffers()
    found = []
    for each in (own, other):
        each.load(weights, buffers)
        found.append(each.compute(range(3, 6), "change").values.tobytes())
    assert (found[0] == found[1]) == (trust is not None)


def test_one_worker_of_a_stream_with_label_noise_is_sequential_training() -> None:
    config = CONFIG.model_copy(update={"epochs": 3, "stream": True, "label_noise": 0.2})
    strategy, own = trained("sgd", config)
    assert own.steps == 3
    np.testing.assert_allclose(strategy.weights, sequential(config)[0], rtol=1e-3, atol=1e-4)
    plain, _ = trained("sgd", config.model_copy(update={"label_noise": 0.0}))
    assert strategy.weights.tobytes() != plain.weights.tobytes()


@pytest.mark.parametrize("name", HOSTED)
def test_several_workers_learn_with_every_strategy(name: str) -> None:
    strategy, own = trained(name, CONFIG.model_copy(update={"epochs": 20, "peak_rate": 0.1}), workers=3)
    assert own.evaluated(strategy.weights, strategy.buffers, DATA)[0] > 0.9


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml") if "mnist" not in path.stem))
def test_the_networks_of_all_tiers_learn_on_the_fleet(name: str) -> None:
    bundled = find_config(name, None)
    options = dict(bundled.network.options)
    if "width" in options:
        options["width"] = 1  # or a step of the widest takes seconds
    if bundled.network.kind == "alexnet":
        options |= {"hidden": (64, 64)}
    # What they need of other runs, a fleet does not know; all else is as they have it.
    config = bundled.model_copy(
        update={
            "teacher": None,
            "initial": None,
            "network": bundled.network.model_copy(update={"options": options}),
            "epochs": 1,
            "batch_size": 6,
            "held_out_per_class": 2,
        }
    )
    images = shape_images(32).take(np.arange(18))
    own = FlatLearner(config, TrainingData(config, images, SHAPES))
    chosen = OuterConfig(period=1)
    strategy = build_strategy(chosen, (own.weights(), own.buffers()), own, workers=2, lease_s=60.0)
    before = strategy.weights.copy()
    crew = [SimulatedWorker(name=f"w{number}", step_s=1.0) for number in range(2)]
    found = simulate(strategy, own, crew)
    assert (found.updates, found.missing) == (2, 0)
    assert np.isfinite(strategy.weights).all()
    assert np.count_nonzero(strategy.weights != before) > 0.5 * len(before)
    assert 0 <= own.evaluated(strategy.weights, strategy.buffers, images)[0] <= 1


def test_values_of_another_network_are_refused() -> None:
    own = learner()
    with pytest.raises(WeightsError):
        own.load(own.weights()[1:], own.buffers())
    with pytest.raises(WeightsError):
        own.load(own.weights(), own.buffers()[1:])


def test_statistics_of_nothing_are_measured_again_before_weights_are_judged() -> None:
    strategy, own = trained("sgd", CONFIG.model_copy(update={"epochs": 20, "peak_rate": 0.1}))
    damaged = np.full_like(strategy.buffers, 1e3)
    of_damaged, of_own = (own.evaluated(strategy.weights, each, DATA)[0] for each in (damaged, strategy.buffers))
    assert of_damaged == of_own


def test_a_machine_that_trains_with_others_needs_no_torchvision() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torchvision', 'matplotlib', 'onnx', 'onnxscript'])\n"
        "import experiments.training.simulation, training.worker.node, training.host.app, training.host.chief\n"
        "from models.training.networks import build_network\n"
        "build_network('mlp', 10, {}), build_network('wide-resnet', 10, {'depth': 10, 'width': 1})\n"
        "build_network('resnet-34', 10, {})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "MissingExtra: the network resnet-34 needs the extra 'train'" in ended.stderr


def test_portions_add_up_to_the_gradient_of_the_whole_pass_and_change_nothing() -> None:
    own = learner(CONFIG.model_copy(update={"epochs": 3, "weight_decay": 0.3}))
    batches, start = own.data.batches.steps_per_epoch, (own.weights(), own.buffers())
    assert batches > 1
    parts = [own.compute(range(first, first + 1), "portion") for first in range(batches)]
    whole = own.compute(range(batches), "portion")
    assert own.weights().tobytes() == start[0].tobytes()
    np.testing.assert_allclose(sum(each.values for each in parts), whole.values, rtol=1e-4, atol=1e-6)
    assert whole.loss == pytest.approx(sum(each.loss for each in parts) / batches)
    again = own.compute(range(2 * batches, 3 * batches), "portion")  # of the third pass
    assert (again.values.tobytes(), again.loss) == (whole.values.tobytes(), whole.loss)
    # Along the gradient, the loss with its weight decay falls as the gradient says.
    slope = whole.values.astype(np.float64) / batches
    away = 1e-3 / np.linalg.norm(slope)
    losses = []
    for sign in (1, -1):
        own.load((start[0] + sign * away * slope).astype(np.float32), start[1])
        losses.append(own.compute(range(batches), "portion").loss)
    assert (losses[0] - losses[1]) / (2 * away) == pytest.approx(float(slope @ slope), rel=0.02)


def test_a_portion_that_is_given_up_leaves_no_gradient_behind() -> None:
    own = learner(CONFIG.model_copy(update={"epochs": 3}))
    expected = own.compute(range(1), "portion")

    def lost(step: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        own.compute(range(2), "portion", watch=lost)
    assert own.compute(range(1), "portion").values.tobytes() == expected.values.tobytes()
