"""Programs of ranks, run in one process on virtual time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.data import ImageSet
from models.hierarchy import Hierarchy
from tierkit.errors import InvalidInput

torch = pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from models.training.config import TrainConfig  # noqa: E402
from models.training.data import TrainingData  # noqa: E402
from training.learner import FlatLearner  # noqa: E402
from training.parallel.allreduce import scaled_rate  # noqa: E402
from training.parallel.exchange import Done, Mean, Program, Seat  # noqa: E402
from training.parallel.gossip import gossip, partners  # noqa: E402
from training.parallel.lockstep import Ranks, Stepped, run_ranks  # noqa: E402
from training.parallel.programs import make_program  # noqa: E402
from training.strategies.config import ExchangeConfig, RanksConfig, TournamentConfig  # noqa: E402
from training.units import Flat  # noqa: E402
from training.virtual import Link  # noqa: E402

pytestmark = pytest.mark.train

CLASSES = 10
NUMBERS = Hierarchy.parse(
    {"name": "numbers", "fine": list("0123456789"), "superclasses": {"all": list("0123456789")}}, source="test"
)
CONFIG = TrainConfig.model_validate(
    {
        "name": "tiny",
        "tier": "end",
        "target": "fine",
        "network": {"kind": "mlp", "options": {"inputs": 48, "hidden": [16], "activation": "tanh"}},
        "epochs": 4,
        "batch_size": 10,
        "peak_rate": 0.05,
        "schedule": "constant",
        "crop_padding": 0,
        "mirror": False,
        "held_out_per_class": 10,
        "precision": "fp32",
    }
)


def spots(count: int, seed: int) -> ImageSet:
    """Images of ten classes, each with its own pattern below much noise."""
    fine = np.arange(count) % CLASSES
    patterns = np.random.default_rng(0).integers(90, 150, (CLASSES, 4, 4, 3))
    noise = np.random.default_rng(seed + 1).normal(0, 35, (count, 4, 4, 3))
    return ImageSet(
        images=np.clip(patterns[fine] + noise, 0, 255).astype(np.uint8),
        fine=fine,
        coarse=NUMBERS.coarse_labels(fine),
        names=tuple(map(str, range(count))),
        hierarchy_name="numbers",
    )


IMAGES, TEST = spots(500, 0), spots(1_000, 1)
"""400 of the images are trained on."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learner(config: TrainConfig, choice: RanksConfig | None = None) -> FlatLearner:
    return FlatLearner(config, TrainingData(config, IMAGES, NUMBERS), strategy=choice)


def trained(
    choice: RanksConfig, ranks: int, config: TrainConfig = CONFIG, link: Link | None = None
) -> tuple[Stepped, list[FlatLearner]]:
    learners = [learner(config, choice) for _ in range(ranks)]
    seats = [Seat(rank=rank, ranks=ranks, test=TEST) for rank in range(ranks)]
    programs = [make_program(choice, own, seat) for own, seat in zip(learners, seats, strict=True)]
    return run_ranks(programs, Ranks(step_s=[0.01] * ranks, link=link or Link())), learners


def changed(**changes: Any) -> TrainConfig:
    return CONFIG.model_copy(update=changes)


def test_four_ranks_are_one_process_with_four_times_the_batch() -> None:
    config = changed(epochs=5, batch_size=10, momentum=0.9, weight_decay=1e-3)
    found, ranks = trained(ExchangeConfig(rule="allreduce", scaling="none"), 4, config)
    whole = learner(config.model_copy(update={"batch_size": 40}), ExchangeConfig(rule="allreduce"))
    for step in range(whole.steps):
        whole.walk(step, whole.rate(step))
    assert found.steps == whole.steps == 50
    for each in ranks:
        np.testing.assert_allclose(each.weights(), whole.weights(), atol=1e-5)
        assert each.weights().tobytes() == ranks[0].weights().tobytes()


def test_the_rate_of_many_ranks_rises_to_a_multiple() -> None:
    config = ExchangeConfig(rule="allreduce", warmup=0.1)
    rates = [scaled_rate(config, 0.1, ranks=4, step=step, steps=100) for step in range(100)]
    assert 0.1 < rates[0] < rates[5] < rates[9] < rates[10]
    assert rates[10:] == pytest.approx([0.4] * 90)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_partners_give_and_take_the_same_and_reach_all(ranks: int) -> None:
    rounds = max(1, (ranks - 1).bit_length())
    for first in range(0, 6 * rounds, rounds):
        heard = [{rank} for rank in range(ranks)]
        for turn in range(first, first + rounds):
            pairs = [partners(rank, ranks, turn, seed=3) for rank in range(ranks)]
            assert sorted(to for to, _ in pairs) == list(range(ranks))
            assert all(pairs[to][1] == rank for rank, (to, _) in enumerate(pairs))
            heard = [heard[rank] | heard[source] for rank, (_, source) in enumerate(pairs)]
        assert all(each == set(range(ranks)) for each in heard)


@dataclass
class Still:
    """A learner whose steps change nothing."""

    held: Flat
    steps: int = 60
    config: Any = field(default_factory=lambda: SimpleNamespace(seed=5))
    lengths: tuple[int, int] = (3, 0)

    def rate(self, step: int) -> float:
        return 0.0

    def walk(self, step: int, rate: float) -> float:
        return 0.0

    def joined(self) -> Flat:
        return self.held.copy()

    def load_joined(self, vector: Flat) -> None:
        self.held = vector


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_gossip_keeps_the_mean_and_brings_all_to_it(ranks: int) -> None:
    start = np.random.default_rng(1).normal(size=(ranks, 3)).astype(np.float32)
    stills: list[Any] = [Still(each.copy()) for each in start]
    means: list[Flat] = []
    programs = [gossip(each, ExchangeConfig(rule="gossip"), rank=rank, ranks=ranks) for rank, each in enumerate(stills)]
    found = run_ranks(
        programs,
        Ranks(step_s=[1.0] * ranks),
        lambda step, now: means.append(np.mean([each.held for each in stills], axis=0)),
    )
    for each in means:
        np.testing.assert_allclose(each, start.mean(axis=0), atol=1e-6)
    assert found.figures["spread"] < 1e-3


def test_gossip_sends_as_much_with_more_ranks_and_learns_like_allreduce() -> None:
    link = Link(bytes_per_s=1e6)
    found = {ranks: trained(ExchangeConfig(rule="gossip"), ranks, changed(epochs=8), link) for ranks in (4, 8)}
    size = 4 * len(found[4][1][0].weights())
    each = {}
    for ranks, (run, _) in found.items():
        # Besides the steps: the mean at the end around a ring, and a number from each rank to all.
        extra = 2 * (ranks - 1) * size + 4 * ranks * (ranks - 1)
        each[ranks] = (run.bytes_sent - extra) / run.steps / ranks
    assert each[4] == each[8] == size
    accuracy = right(found[4][1][0])
    _, (together, *_) = trained(ExchangeConfig(rule="allreduce"), 4, changed(epochs=8))
    assert accuracy > right(together) - 0.03
    assert found[4][0].figures["spread"] < 0.2


def right(own: FlatLearner) -> float:
    return own.evaluated(own.weights(), own.buffers(), TEST)[0]


def test_lineages_that_meet_are_better_than_lineages_that_do_not() -> None:
    config = changed(epochs=10, peak_rate=0.02)
    rates = [1e-5, 3.0, 0.02, 0.05]
    met, learners = trained(TournamentConfig(period=10, rates=rates), 4, config)
    apart, _ = trained(TournamentConfig(period=10_000, rates=rates), 4, config)
    assert met.figures["mean"] > apart.figures["mean"] + 0.05
    assert 0.01 < apart.figures["rate"] < 0.1
    assert len({each.joined().tobytes() for each in learners}) == 1


def test_the_loser_continues_at_a_rate_near_the_winners() -> None:
    choice = TournamentConfig(period=20, rates=[1e-6, 0.02])
    rates: dict[int, list[float]] = {0: [], 1: []}

    def noted(rank: int, program: Program) -> Program:
        answer: Any = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as end:
                figures: dict[str, float] = end.value
                return figures
            if isinstance(request, Done):
                rates[rank].append(request.kept["rate"])
            answer = yield request

    learners = [learner(CONFIG, choice) for _ in range(2)]
    seats = [Seat(rank=rank, ranks=2, test=TEST) for rank in range(2)]
    programs = [make_program(choice, own, seat) for own, seat in zip(learners, seats, strict=True)]
    run_ranks([noted(rank, each) for rank, each in enumerate(programs)], Ranks(step_s=[1.0] * 2))
    assert (set(rates[0][:19]), set(rates[1][:39])) == ({1e-6}, {0.02})
    assert rates[0][19] in (pytest.approx(0.016), pytest.approx(0.024))


def test_a_combined_answer_is_better_than_the_best_one_and_better_still_when_optimised() -> None:
    found, learners = trained(ExchangeConfig(rule="ensemble"), 4, changed(epochs=40))
    figures = found.figures
    assert figures["best_local"] < figures["combined"] < figures["accuracy"]
    assert len({each.joined().tobytes() for each in learners}) == 4
    logits = np.mean([each.logits(TEST) for each in learners], axis=0)
    assert np.mean(logits.argmax(1) == TEST.fine) == pytest.approx(figures["accuracy"], abs=0.002)


def test_each_network_gets_its_share_of_the_joint_gradient() -> None:
    choice = ExchangeConfig(rule="ensemble")
    one, other = learner(changed(momentum=0.0), choice), learner(changed(momentum=0.0, seed=1), choice)
    other.load(other.weights() * np.float32(0.5), other.buffers())
    before = one.weights()
    batch = one.data.batches.batch(0)
    network = one._learner.network
    logits = [torch.from_numpy(each.answers(0)).view(10, CLASSES) for each in (one, other)]
    output, _ = network(batch.images)
    joint = (output + logits[1]) / 2
    loss = torch.nn.functional.cross_entropy(joint, one.data.labels.fine[batch.index], label_smoothing=0.1)
    wanted = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(network.parameters()))])
    said = one.walk_together(((logits[0] + logits[1]) / 2).reshape(-1).numpy(), 2, 0.1)
    assert said == pytest.approx(float(loss.detach()))
    decay = np.zeros(len(before))
    start = 0
    for each in network.parameters():
        decay[start : start + each.numel()] = CONFIG.weight_decay if each.ndim > 1 else 0
        start += each.numel()
    np.testing.assert_allclose((before - one.weights()) / 0.1, wanted.numpy() + decay * before, atol=1e-5)


@pytest.mark.parametrize(
    "choice",
    [ExchangeConfig(rule="gossip"), TournamentConfig(period=7), ExchangeConfig(rule="ensemble")],
    ids=["gossip", "tournament", "ensemble"],
)
@pytest.mark.parametrize("stop", [10, 25])
def test_a_run_continues_from_the_middle(choice: RanksConfig, stop: int) -> None:
    _, whole = trained(choice, 3)
    learners, kept = [learner(CONFIG, choice) for _ in range(3)], [dict[str, float]()] * 3

    def part(rank: int, program: Program) -> Program:
        """Ends a program after a step."""
        answer: Any = None
        while True:
            request = program.send(answer)
            if isinstance(request, Done):
                kept[rank] = dict(request.kept)
                if request.step + 1 == stop:
                    yield request
                    return {}
            answer = yield request

    def programs(start: int, figures: list[Mapping[str, float]]) -> list[Program]:
        seats = [Seat(rank=rank, ranks=3, test=TEST, start=start, kept=figures[rank]) for rank in range(3)]
        return [make_program(choice, own, seat) for own, seat in zip(learners, seats, strict=True)]

    run_ranks([part(rank, each) for rank, each in enumerate(programs(0, [{}] * 3))], Ranks(step_s=[1.0] * 3))
    states = [(each.joined(), each.moments) for each in learners]
    learners = [learner(CONFIG, choice) for _ in range(3)]
    for own, (vector, moments) in zip(learners, states, strict=True):
        own.load_joined(vector)
        own.moments = moments
    run_ranks(programs(stop, [*kept]), Ranks(step_s=[1.0] * 3))
    for one, other in zip(whole, learners, strict=True):
        assert one.joined().tobytes() == other.joined().tobytes()


@pytest.mark.parametrize("choice", [TournamentConfig(), ExchangeConfig(rule="ensemble")])
def test_one_rank_is_too_few(choice: RanksConfig) -> None:
    with pytest.raises(InvalidInput, match="2 ranks"):
        trained(choice, 1)


def test_a_slow_rank_holds_up_its_partner_and_all_where_all_wait() -> None:
    def ask(number: int, exchanges: int) -> Program:
        for step in range(exchanges):
            yield Done(step, 0.0)
            yield Mean(np.zeros(250, np.float32))
        return {}

    link = Link(delay_s=0.1, bytes_per_s=1_000.0)
    found = run_ranks([ask(rank, 2) for rank in range(4)], Ranks(step_s=[1.0, 1.0, 1.0, 5.0], link=link))
    # Twice the slowest step, and around the ring 6 times a quarter of 1,000 bytes.
    assert found.virtual_seconds == pytest.approx(2 * (5.0 + 6 * (0.1 + 0.25)))
    assert found.bytes_sent == 2 * 6 * 1_000
