"""Sandblaster L-BFGS as a value: directions, the line search, portions and their copies, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.training.config import NetworkConfig, TrainConfig
from tests.schedules import constant
from tierkit.errors import InvalidAnswer, InvalidInput, SetupError
from training.messages import GrantedLease, RunSpec
from training.strategies.build import build_strategy
from training.strategies.config import BatchConfig
from training.strategies.finding import find_hosted
from training.strategies.lbfgs import BatchRules, Coordinator, Shard, check_lbfgs, two_loops
from training.strategies.leases import Leases
from training.units import Computed, Flat, UnitLease, Update

NONE = np.zeros(0, np.float32)
VALUES, BATCHES, PERIOD = 7, 10, 3
GOALS = np.random.default_rng(3).standard_normal((BATCHES, VALUES)).astype(np.float32)
BENDS = np.logspace(-2, 1, VALUES, dtype=np.float32)
"""Of the loss of each batch, `sum(bends (w - goal)^2) / 2`: the passes of gradient descent need hundreds."""


def start(
    passes: int = 20, *, config: BatchConfig | None = None, rate: float = 0.1, lease_s: float = 10.0
) -> BatchRules:
    config = config or BatchConfig(period=PERIOD, history=4)
    learner = constant(rate, steps=passes * BATCHES, epochs=passes)
    found = build_strategy(config, (np.ones(VALUES, np.float32), NONE), learner, workers=4, lease_s=lease_s)
    assert isinstance(found, BatchRules)
    return found


def granted(strategy: BatchRules, worker: str = "a", now: float = 0.0) -> UnitLease:
    lease = strategy.grant(worker, now)
    assert lease is not None
    return lease


def computed(weights: Flat, span: range) -> Computed:
    """Sum of the gradients of these batches, and their mean loss."""
    total, loss = np.zeros(VALUES, np.float32), 0.0
    for step in span:
        away = weights - GOALS[step % BATCHES]
        total += BENDS * away
        loss += float((BENDS * away * away).sum()) / 2
    return Computed(values=total, buffers=NONE, loss=loss / len(span))


def update(strategy: BatchRules, lease: UnitLease) -> Update:
    found = computed(strategy.start_of(lease)[0], lease.unit.span)
    return Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=found)


def one_pass(strategy: BatchRules, **changed: Any) -> None:
    """The rest of a pass, by one worker."""
    version = strategy.version
    while strategy.version == version and not strategy.finished:
        lease = granted(strategy)
        found = computed(strategy.start_of(lease)[0], lease.unit.span)
        values = {"values": found.values, "buffers": NONE, "loss": found.loss, **changed}
        brought = Update(lease=lease.number, worker="a", steps=lease.unit.span, computed=Computed(**values))
        assert strategy.take(brought, 0.0) == "taken"


def to_the_end(strategy: BatchRules) -> BatchRules:
    while not strategy.finished:
        one_pass(strategy)
    return strategy


def objective(weights: Flat) -> float:
    away = weights.astype(np.float64) - GOALS
    return float((BENDS * away * away).sum()) / 2 / BATCHES


LEAST = objective(GOALS.mean(axis=0))


# --- directions and steps ---


@given(seed=st.integers(0, 2**32 - 1), pairs=st.integers(0, 5), turned=st.integers(0, 4))
def test_the_direction_is_that_of_the_recursion_on_vectors(seed: int, pairs: int, turned: int) -> None:
    draw, history, size = np.random.default_rng(seed), 5, 12
    changes = draw.standard_normal((2 * history + 1, size))
    bend = draw.standard_normal((size, size))
    changes[history:-1] = changes[:history] @ (bend @ bend.T + np.eye(size))  # of a convex function
    order = [(turned + number) % history for number in range(pairs)]
    # Nocedal 1980, with the vectors themselves.
    direction, shares = -changes[-1].copy(), {}
    for pair in reversed(order):
        s, y = changes[pair], changes[history + pair]
        shares[pair] = (s @ direction) / (s @ y)
        direction -= shares[pair] * y
    if order:
        s, y = changes[order[-1]], changes[history + order[-1]]
        direction *= (s @ y) / (y @ y)
    for pair in order:
        s, y = changes[pair], changes[history + pair]
        direction += (shares[pair] - (y @ direction) / (s @ y)) * s
    found = np.array(two_loops(changes @ changes.T, order)) @ changes
    scale = np.abs(changes).max() * max(1.0, np.abs(direction).max())
    np.testing.assert_allclose(found, direction, atol=1e-5 * scale, rtol=1e-4)


def test_the_shards_together_hold_the_whole_and_each_writes_its_own_slice() -> None:
    one = to_the_end(start(config=BatchConfig(period=PERIOD, shards=1)))
    three = to_the_end(start(config=BatchConfig(period=PERIOD, shards=3)))
    more_than_values = to_the_end(start(config=BatchConfig(period=PERIOD, shards=64)))
    for other in (three, more_than_values):
        np.testing.assert_allclose(other.weights, one.weights, atol=1e-3)
        assert other.results()["objective"] == pytest.approx(LEAST, rel=1e-3)
    vectors = {name: np.zeros((5, 6) if name == "changes" else 6, np.float32) for name in ("weights", "changes")}
    vectors |= {name: np.ones(6, np.float32) for name in ("trial", "direction", "gradient")}
    shard = Shard(vectors | {"portions": np.zeros((2, 6), np.float32)}, slice(2, 4))
    assert shard.do({"do": "accept", "pair": 1}) == [0, 2, 0, 2, 2, 0, 2, 0, 2, 2, 0, 2, 0, 2, 2]
    assert vectors["weights"].tolist() == [0, 0, 1, 1, 0, 0]
    assert vectors["changes"][:, 4:].tolist() == [[0, 0]] * 5


def test_it_comes_much_closer_than_gradient_descent() -> None:
    strategy = to_the_end(start(20))
    assert strategy.results()["objective"] == pytest.approx(objective(strategy.weights), rel=1e-5)
    best = math.inf
    for rate in np.logspace(-2, 0, 20):
        weights = np.ones(VALUES)
        for _ in range(20):
            weights = weights - rate * BENDS * (weights - GOALS.mean(axis=0))
        best = min(best, objective(weights.astype(np.float32)))
    assert strategy.results()["objective"] - LEAST < (best - LEAST) / 10


@pytest.mark.parametrize("rate", [1e-4, 0.1, 100.0])
def test_the_loss_of_the_weights_never_rises_whatever_the_first_rate(rate: float) -> None:
    strategy, values = start(40, rate=rate), []
    while not strategy.finished:
        one_pass(strategy)
        values.append(objective(strategy.weights))
        assert strategy.results()["objective"] == pytest.approx(values[-1], rel=1e-5)
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(values))
    assert values[-1] == pytest.approx(LEAST, rel=0.01)


def test_a_function_without_a_slope_goes_nowhere() -> None:
    strategy = start(12)
    while not strategy.finished:
        one_pass(strategy, values=np.zeros(VALUES, np.float32), loss=1.0)
    assert strategy.weights.tolist() == [1.0] * VALUES
    assert strategy.results()["objective"] == 1.0


class Function:
    """One shard of vectors of one value, and a coordinator."""

    def __init__(self, history: int = 3) -> None:
        names = ("weights", "trial", "direction", "gradient")
        self.vectors = {name: np.ones(1, np.float32) for name in names}
        self.vectors |= {"changes": np.zeros((2 * history + 1, 1), np.float32), "portions": np.ones((1, 1), np.float32)}
        self.shard, self.commands = Shard(self.vectors, slice(0, 1)), []  # type: ignore[var-annotated]
        self.coordinator = Coordinator(history, 1.0, self.ask)

    def ask(self, command: Any) -> list[float]:
        self.commands.append(json.loads(json.dumps(command)))
        return self.shard.do(command)

    def passed(self, value: float, gradient: float) -> float:
        """The next point."""
        self.vectors["portions"][:] = gradient
        self.coordinator.passed(value, 1)
        return float(self.vectors["trial"][0])


def test_a_step_that_is_too_long_is_shortened_by_the_parabola_within_bounds() -> None:
    function = Function()
    assert function.passed(10.0, 4.0) == -3.0  # 1 - 1.0 * 4
    # Slope -16 at the start: the parabola through 10 at 0 and 34 at 1 has its minimum at 0.2.
    assert function.passed(34.0, 0.0) == pytest.approx(1 - 0.2 * 4)
    assert function.passed(math.inf, 0.0) == pytest.approx(1 - 0.02 * 4)  # a tenth
    assert function.passed(10.0, 0.0) == pytest.approx(1 - 0.01 * 4)  # half of it at the most
    assert [each["do"] for each in function.commands] == ["gradient", "start", "go", *["gradient", "go"] * 3]


def test_a_line_without_a_lower_point_ends_the_history() -> None:
    function = Function()
    point = function.passed(10.0, 4.0)
    point = function.passed(2.0, 1.0)
    assert point == pytest.approx(-3.0 - 1.0 * 4 / 3)  # by the pair: 4 of the weights for 3 of the gradient
    before = function.coordinator.state()
    assert before["pairs"] == [0]
    for _ in range(8):
        point = function.passed(math.nan, 1.0)
    assert function.coordinator.state()["pairs"] == []
    assert point == pytest.approx(-3.0 - 1.0)  # along the gradient at the weights
    function.passed(1.0, 0.5)
    assert function.coordinator.accepted == 3


def test_a_pair_without_curvature_is_not_remembered() -> None:
    function = Function()
    function.passed(10.0, 4.0)
    function.passed(2.0, 4.0)  # the slope has not changed
    assert function.coordinator.state()["pairs"] == []
    function.passed(-14.0, 6.0)  # and has become steeper
    assert function.coordinator.state()["pairs"] == []


def test_the_oldest_pair_makes_room() -> None:
    strategy, seen = start(9, config=BatchConfig(period=PERIOD, history=3)), []
    while not strategy.finished:
        one_pass(strategy)
        seen.append(strategy.state()[1]["coordinator"]["pairs"])
    assert seen[:6] == [[], [0], [0, 1], [0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_commands_are_short_whatever_the_size_of_the_network() -> None:
    strategy = to_the_end(start(40, config=BatchConfig(period=PERIOD)))
    found = strategy.results()
    assert 0 < found["command_bytes"] <= 50_000
    assert found["answer_bytes"] > 0


# --- portions ---


def test_a_pass_has_each_batch_once_and_ends_before_the_next_one_begins() -> None:
    strategy = start(2)
    first = [granted(strategy, name) for name in "abcd"]
    assert [(each.unit.first, each.unit.steps, each.unit.version) for each in first] == [
        (0, 3, 0),
        (3, 3, 0),
        (6, 3, 0),
        (9, 1, 0),
    ]
    for lease in first[:3]:
        strategy.take(update(strategy, lease), 0.0)
    assert granted(strategy, "a").unit == first[3].unit  # a copy
    strategy.take(update(strategy, first[3]), 0.0)
    assert (strategy.version, granted(strategy, "a").unit.span) == (1, range(10, 13))


def test_an_idle_worker_gets_a_copy_of_the_portion_that_is_out_for_longest_and_the_first_answer_counts() -> None:
    strategy = start()
    leases = [granted(strategy, name, now) for now, name in enumerate("abcd")]
    for lease in leases[2:]:
        strategy.take(update(strategy, lease), 4.0)
    # The others took 1 s and 2 s.
    late_at = 1.25 * 1.5
    assert strategy.grant("c", 1.8) is None
    assert strategy.leases.next_change(1.8) == late_at
    copies = [granted(strategy, name, 5.0) for name in "cd"]
    assert [each.unit.first for each in copies] == [0, 3]
    assert strategy.grant("e", 6.8) is None
    copies += [granted(strategy, name, 7.0) for name in "ef"]
    assert [each.unit.first for each in copies] == [0, 3, 0, 3]
    assert strategy.grant("g", 9.5) is None  # three of each are enough
    late = update(strategy, copies[0])
    assert strategy.take(update(strategy, copies[2]), 9.5) == "taken"
    assert strategy.take(late, 9.5) == "late"
    assert strategy.take(update(strategy, leases[0]), 9.5) == "late"
    assert not strategy.leases.renew(leases[0].number, "a", 1, 9.5)  # its worker stops
    assert strategy.leases.done == 3 * PERIOD - 2
    assert {lease.unit.first for lease in strategy.leases} == {3}


def test_a_worker_that_waits_is_called_when_a_copy_is_due() -> None:
    leases = Leases(steps=8, period=4, lease_s=10.0)
    leases.most_copies = 2
    for first, worker, now in ((0, "quick", 0.1), (4, "slow", 0.0)):
        lease = leases.grant(worker, 0, 0.0)
        assert lease is not None
        assert lease.unit.first == first
        if now:
            leases.fulfil(lease, now)
    assert leases.next_change(0.1) == 0.125
    assert leases.grant_copy("quick", 0.12) is None
    assert leases.grant_copy("quick", 0.125) is not None
    assert (leases.next_change(0.125) or 0.0) > 0.9  # both are out


def test_a_portion_outlives_its_worker_and_is_handed_out_once() -> None:
    strategy = start(lease_s=10.0)
    dead, other = granted(strategy, "dead"), granted(strategy, "b", 1.0)
    for name in "cd":
        strategy.take(update(strategy, granted(strategy, name, 1.0)), 1.0)
    copy = granted(strategy, "c", 2.0)
    assert copy.unit == dead.unit
    assert strategy.expire(10.5) == 1  # the dead worker's; its portion is with c
    assert granted(strategy, "d", 10.5).unit == other.unit
    strategy.leave("c")
    assert granted(strategy, "c", 10.6).unit == dead.unit
    assert strategy.grant("e", 10.7) is not None  # a copy
    assert {lease.unit.first for lease in strategy.leases} == {0, 3}


EVENTS = st.lists(st.tuples(st.sampled_from(["grant", "bring", "twice", "drop", "wait", "again"]), st.integers(0, 4)))


@settings(max_examples=25)
@given(events=EVENTS)
def test_whoever_computes_and_in_which_order_the_weights_are_the_same_to_the_bit(events: list[tuple[str, int]]) -> None:
    expected = to_the_end(start(6))
    strategy, now = start(6), 0.0
    out: dict[str, Update] = {}
    brought: list[Update] = []
    for kind, which in [*events, *[*[("grant", 0), ("bring", 0), ("wait", 0)] * 3, ("again", 0)] * 15]:
        name = f"w{which}"
        if kind == "wait":
            now += 4.0
        elif kind == "grant":
            lease = strategy.grant(name, now)
            if lease is not None:
                out[name] = update(strategy, lease)
        elif kind == "drop":
            strategy.leave(name)
        elif kind == "again":  # the host is killed, and started again
            once_more = start(6)
            once_more.restore(*strategy.state())
            strategy = once_more
        elif name in out or (kind == "twice" and brought):
            sent = out.pop(name) if name in out else brought[which % len(brought)]
            for _ in range(1 + (kind == "twice")):
                strategy.take(sent, now)
            brought.append(sent)
    assert strategy.finished
    assert strategy.leases.done == 6 * BATCHES
    assert strategy.weights.tobytes() == expected.weights.tobytes()
    assert strategy.results()["objective"] == expected.results()["objective"]


def test_portions_are_added_in_their_order_whatever_the_order_of_arrival() -> None:
    def gradient_after(order: list[int]) -> Flat:
        strategy = start()
        leases = [granted(strategy, name) for name in "abcd"]
        for place in order:
            lease, value = leases[place], (1e18, 1.0, -1e18, 0.0)[place]  # 1e18 + 1 is 1e18 in float64
            found = Computed(values=np.full(VALUES, value, np.float32), buffers=NONE, loss=1.0)
            sent = Update(lease=lease.number, worker=lease.worker, steps=lease.unit.span, computed=found)
            assert strategy.take(sent, 0.0) == "taken"
        return strategy.state()[0]["gradient"]

    assert [gradient_after(list(order)).tolist() for order in itertools.permutations(range(4))] == [[0.0] * VALUES] * 24


def test_a_portion_from_an_earlier_version_changes_nothing() -> None:
    strategy = start()
    slow = granted(strategy, "slow")
    old = update(strategy, slow)
    one_pass(strategy)
    granted(strategy, "slow")
    before = strategy.state()[0] | {}
    kept = {name: each.tobytes() for name, each in before.items()}
    assert strategy.take(old, 1.0) == "late"
    assert {name: each.tobytes() for name, each in strategy.state()[0].items()} == kept


@pytest.mark.parametrize(
    "changed", [{"values": np.full(VALUES, np.nan, np.float32)}, {"loss": math.nan}, {"loss": math.inf}]
)
def test_a_value_that_is_not_finite_makes_the_line_search_step_back(changed: dict[str, Any]) -> None:
    strategy = start()
    first = granted(strategy)
    found = {"values": np.zeros(VALUES, np.float32), "buffers": NONE, "loss": 0.0, **changed}
    wild = Update(lease=first.number, worker="a", steps=first.unit.span, computed=Computed(**found))
    assert strategy.take(wild, 0.0) == "refused"  # there is no point to step back to
    one_pass(strategy)
    start_at = strategy.weights.copy()
    far = strategy.start_of(granted(strategy))[0] - start_at
    one_pass(strategy, **changed)
    assert strategy.weights.tobytes() == start_at.tobytes()
    near = strategy.start_of(granted(strategy))[0] - start_at
    np.testing.assert_allclose(near, far / 10, rtol=1e-3)
    assert to_the_end(strategy).results()["objective"] < objective(start_at)


def test_an_update_of_another_length_is_refused() -> None:
    strategy = start()
    one_pass(strategy)
    lease = granted(strategy)
    found = Computed(values=np.zeros(VALUES + 1, np.float32), buffers=NONE, loss=0.0)
    wrong = Update(lease=lease.number, worker="a", steps=lease.unit.span, computed=found)
    assert strategy.take(wrong, 0.0) == "refused"
    assert granted(strategy).unit == lease.unit


@given(
    st.lists(st.tuples(st.sampled_from(["grant", "copy", "bring", "drop", "wait"]), st.integers(0, 5)), max_size=100)
)
def test_with_copies_too_each_step_is_brought_once(events: list[tuple[str, int]]) -> None:
    leases, now = Leases(steps=23, period=4, lease_s=1.0), 0.0
    leases.until, leases.most_copies = 10, 3
    out: list[UnitLease] = []
    brought: list[int] = []
    for kind, which in [*events, *[("grant", 0), ("bring", -1), ("wait", 0)] * 30]:
        for expired in leases.expired(now):
            leases.give_back(expired)
        if kind == "wait":
            now += 0.4
        elif kind in ("grant", "copy"):
            lease = leases.grant("a", 0, now) if kind == "grant" else leases.grant_copy("a", now)
            if lease is not None:
                out.append(lease)
        elif out:
            lease = out.pop(which % len(out))
            if kind == "drop" and lease in leases:
                leases.give_back(lease)
            sent = Update(lease=lease.number, worker="a", steps=lease.unit.span, computed=computed(BENDS, range(1)))
            if kind == "bring" and leases.claim(sent, now) is lease:
                leases.fulfil(lease, now)
                brought.extend(lease.unit.span)
        assert not brought or max(brought) < leases.until
        if sorted(brought) == list(range(leases.until)):
            leases.until = 23
    assert sorted(brought) == list(range(23))
    assert leases.finished


# --- what is refused ---

NETWORK = TrainConfig(
    name="net",
    tier="end",
    target="fine",
    network=NetworkConfig(kind="mlp"),
    epochs=20,
    crop_padding=0,
    mirror=False,
    precision="fp32",
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "bf16"}, "set precision to fp32"),
        ({"crop_padding": 4, "mirror": True}, "set crop_padding to 0, set mirror to false"),
        ({"mixup": 0.2}, "set mixup to 0"),
        ({"cutmix": 1.0}, "set cutmix to 0"),
        ({"early_side": 16}, "leave out early_side"),
        ({"stream": True}, "set stream to false"),
        ({"network": NetworkConfig(kind="mlp", options={"dropout": 0.1})}, "set dropout to 0"),
    ],
)
def test_a_function_that_differs_from_pass_to_pass_is_refused(changes: dict[str, Any], said: str) -> None:
    check_lbfgs(NETWORK, "fp32")
    with pytest.raises(InvalidInput, match=said):
        check_lbfgs(NETWORK.model_copy(update=changes), "fp32")


def test_rounded_updates_and_shared_images_are_refused() -> None:
    with pytest.raises(InvalidInput, match="wire fp32"):
        check_lbfgs(NETWORK, "int8")
    with pytest.raises(InvalidInput, match="share-data"):
        check_lbfgs(NETWORK, "fp32", shares_data=True)


def test_vectors_that_do_not_fit_in_memory_are_refused_before_they_are_made() -> None:
    config, start_at = BatchConfig(period=1), (np.zeros(10_000, np.float32), NONE)
    with pytest.raises(InvalidInput, match="longer period"):
        build_strategy(config, start_at, constant(0.1, steps=10**6), workers=2, lease_s=1.0)
    too_large = np.broadcast_to(np.float32(0), 54_000_000), NONE
    with pytest.raises(InvalidInput, match="too large for lbfgs"):
        build_strategy(config, too_large, constant(0.1, steps=2), workers=2, lease_s=1.0)


def test_a_run_whose_loss_has_never_fallen_has_failed() -> None:
    with np.errstate(over="ignore"):
        assert "lower peak_rate" in to_the_end(start(passes=3, rate=1e30)).failure
    assert to_the_end(start(passes=3)).failure == ""


@pytest.mark.parametrize("table", ["[trust]", "[masking]"])
def test_no_portions_are_judged_or_masked(table: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('family = "batch"\nperiod = 2\nhistory = 5\nshards = 3\n')
    assert find_hosted(str(file)) == BatchConfig(period=2, history=5, shards=3)
    file.write_text(f'family = "batch"\n{table}\n')
    with pytest.raises(SetupError, match=table.strip("[]")):
        find_hosted(str(file))


@pytest.mark.parametrize(
    ("lease", "fits"),
    [
        ({"first": 10, "push": 3}, True),
        ({"first": 19, "push": 1}, True),
        ({"first": 10, "push": 3, "segments": (1,)}, False),
        ({"first": 8, "push": 3}, False),
        ({"first": 0, "push": 4}, False),
        ({"first": 199, "push": 2}, False),
    ],
)
def test_a_worker_refuses_what_is_no_portion(lease: dict[str, Any], fits: bool) -> None:
    spec = RunSpec(
        id="0" * 32,
        network=NETWORK,
        choice="lbfgs",
        strategy=BatchConfig(period=PERIOD),
        workers=2,
        wire="fp32",
        values=VALUES,
        buffers=0,
        data_sha256="",
        lease_s=1.0,
    )
    granted = GrantedLease(number=1, version=1, **lease)
    if fits:
        granted.check(spec, 20 * BATCHES)
    else:
        with pytest.raises(InvalidAnswer):
            granted.check(spec, 20 * BATCHES)
