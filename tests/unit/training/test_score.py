"""Scores over time, who is barred, what operators say, and which updates are like the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from tierkit.errors import Forbidden, Overloaded
from tierkit.types import WorkerOrder, WorkerStanding
from training.trust.config import TrustConfig
from training.trust.score import FIRST, Scores, are_valid
from training.units import Flat

CONFIG = TrustConfig()


def scored(*valid: bool, config: TrustConfig | None = CONFIG) -> Scores:
    scores = Scores(config)
    for each in valid:
        scores.judge("w", each)
    return scores


@pytest.mark.parametrize(
    ("valid", "score", "standing"),
    [
        ([], 0.5, "active"),
        ([True], 0.6, "active"),
        ([False], 0.4, "active"),
        ([True, False], 0.48, "active"),
        ([False] * 4, 0.5 * 0.8**4, "active"),
        ([False] * 5, 0.5 * 0.8**5, "quarantined"),
        ([True] * 100, 1.0, "active"),
        ([True] * 100 + [False] * 7, 0.8**7, "active"),
        ([True] * 100 + [False] * 8, 0.8**8, "quarantined"),
        # Who is wrong once in a while stays.
        ([True, True, True, False] * 50, 0.66, "active"),
    ],
)
def test_a_score_follows_what_its_worker_sends(valid: list[bool], score: float, standing: WorkerStanding) -> None:
    scores = scored(*valid)
    assert scores.score("w") == pytest.approx(score, abs=0.01)
    assert scores.standing("w") == standing
    assert (scores.weight("w") == 0) == (standing == "quarantined")


def test_who_is_in_quarantine_is_told_and_stays_there_whatever_it_sends() -> None:
    scores = scored(*[False] * 5, *[True] * 100)
    for ask in (scores.check, scores.admit):
        with pytest.raises(Forbidden, match="'w'"):
            ask("w")
    scores.check("other")
    assert scores.barred() == {"w"}


def test_an_update_that_is_not_what_its_steps_give_is_proof_enough() -> None:
    scores = scored(*[True] * 100)
    scores.rechecked("w", True)
    assert scores.standing("w") == "active"
    assert scores.put_out() == []
    scores.rechecked("w", False)
    scores.rechecked("w", True)  # another unit, which it had computed before
    assert (scores.score("w"), scores.standing("w")) == (0.0, "quarantined")
    assert (scores.put_out(), scores.put_out()) == (["w"], [])


def test_without_trust_nobody_is_judged() -> None:
    scores = scored(*[False] * 100, config=None)
    assert (scores.score("w"), scores.standing("w"), scores.knows("w")) == (FIRST, "active", False)


@pytest.mark.parametrize(
    ("taken_between", "standing"),
    [(0, "quarantined"), (1, "active"), (20, "active")],
)
def test_without_trust_refused_updates_put_a_worker_out_unless_others_are_taken(
    taken_between: int, standing: WorkerStanding
) -> None:
    scores = Scores(None)
    scores.taken("w")
    assert not scores.knows("w")
    for _ in range(5):
        scores.refused("w")
        for _ in range(taken_between):
            scores.taken("w")
    assert (scores.standing("w"), scores.score("w") <= FIRST) == (standing, True)


@pytest.mark.parametrize(
    ("orders", "standing", "weight"),
    [
        (["pause"], "paused", 0),
        (["pause", "resume"], "active", 0.7),
        (["drop"], "dropped", 0),
        (["drop", "resume"], "active", FIRST),
        (["trust"], "trusted", 1),
        (["trust", "resume"], "active", 1),
        (["drop", "trust"], "trusted", 1),
    ],
)
def test_what_operators_say(orders: list[WorkerOrder], standing: WorkerStanding, weight: float) -> None:
    scores = Scores(CONFIG)
    scores.restore({"w": {"score": 0.7, "standing": "active"}})
    for order in orders:
        scores.order("w", order)
    assert (scores.standing("w"), scores.weight("w")) == (standing, weight)


def test_whom_an_operator_trusts_is_not_judged() -> None:
    scores = Scores(CONFIG)
    scores.order("w", "trust")
    for _ in range(100):
        scores.judge("w", False)
    scores.rechecked("w", False)
    assert (scores.score("w"), scores.standing("w")) == (1.0, "trusted")


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that remembers 100 workers."""
    monkeypatch.setattr("training.trust.score._MOST", 100)


@pytest.mark.usefixtures("_few")
def test_a_bad_name_cannot_be_washed_by_a_flood_of_others() -> None:
    scores = Scores(CONFIG)
    scores.rechecked("bad", False)
    scores.order("paused", "pause")
    for number in range(200):
        scores.judge(f"w{number}", True)
    assert len(scores.state()) == 100
    assert (scores.standing("bad"), scores.standing("paused")) == ("quarantined", "paused")
    assert scores.knows("w199")
    assert not scores.knows("w0")


@pytest.mark.usefixtures("_few")
def test_a_caller_with_many_bad_names_loses_old_ones_and_locks_nobody_out() -> None:
    scores = Scores(CONFIG)
    for name in ("bad", *(f"w{number}" for number in range(200))):
        scores.admit(name, "alice" if name == "bad" else "mallory")
        scores.rechecked(name, False)
    scores.admit("new", "bob")
    assert len(scores.state()) == 100
    assert (scores.standing("bad"), scores.standing("w199")) == ("quarantined", "quarantined")
    assert not scores.knows("w0")


@pytest.mark.usefixtures("_few")
def test_what_operators_have_said_is_not_forgotten() -> None:
    scores = Scores(CONFIG)
    for number in range(100):
        scores.order(f"w{number}", "pause")
    with pytest.raises(Overloaded):
        scores.admit("new", "bob")
    with pytest.raises(Overloaded):
        scores.order("new", "trust")
    scores.judge("new", True)
    assert len(scores.state()) == 100


@settings(max_examples=50)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["judge", "recheck", "pause", "drop", "trust", "resume"]), st.integers(0, 3), st.booleans()
        ),
        max_size=60,
    ),
    cut=st.integers(0, 60),
)
def test_scores_stay_in_bounds_and_go_on_from_their_state(calls: list[tuple[str, int, bool]], cut: int) -> None:
    def call(scores: Scores, kind: str, which: int, good: bool) -> None:
        if kind == "judge":
            scores.judge(f"w{which}", good)
        elif kind == "recheck":
            scores.rechecked(f"w{which}", good)
        else:
            scores.order(f"w{which}", kind)  # type: ignore[arg-type]

    whole, part = Scores(CONFIG), Scores(CONFIG)
    for number, each in enumerate(calls):
        call(whole, *each)
        call(part, *each)
        if number == cut:
            kept = part.state()
            part = Scores(CONFIG)
            part.restore(kept)
        for name in whole.state():
            assert 0 <= whole.score(name) <= 1
            assert (whole.weight(name) == 0) == (name in whole.barred() or whole.score(name) == 0)
    assert list(part.state().items()) == list(whole.state().items())


def updates(*wrong: Flat) -> list[Flat]:
    chance = np.random.default_rng(0)
    goal = chance.standard_normal(200)
    return [*wrong, *((goal + 0.5 * chance.standard_normal(200)).astype(np.float32) for _ in range(7))]


def judged(values: Sequence[Flat], centre: NDArray[Any], buffers: Sequence[Flat] | None = None) -> list[bool]:
    """Of updates with these buffers, or with none."""
    own = buffers or [np.zeros(0, np.float32)] * len(values)
    middle = np.median(own, axis=0).astype(np.float32)
    return are_valid(list(zip(values, own, strict=True)), (centre.astype(np.float32), middle), deviation=4.0)


@pytest.mark.parametrize("wrong", [-1e6, 1e6, 0.0, 1.5])
def test_running_statistics_that_are_unlike_the_others_are_found(wrong: float) -> None:
    honest, chance = updates(), np.random.default_rng(4)
    buffers = [(1 + 0.01 * chance.standard_normal(8)).astype(np.float32) for _ in honest]
    buffers[2] = np.full(8, wrong, np.float32)
    assert judged(honest, np.median(honest, axis=0), buffers) == [number != 2 for number in range(7)]


@pytest.mark.parametrize("kind", ["sign", "far", "nothing", "noise", "huge", "elsewhere"])
def test_what_is_unlike_the_others_is_found(kind: str) -> None:
    honest = updates()
    centre = np.median(honest, axis=0)
    chance = np.random.default_rng(2)
    wrongs: dict[str, NDArray[Any]] = {
        "sign": -honest[0],
        "far": 5 * honest[0],
        "nothing": 0 * honest[0],
        "noise": chance.standard_normal(200),
        "huge": np.full(200, 3e38),
        "elsewhere": np.roll(honest[0], 7),
    }
    wrong = wrongs[kind].astype(np.float32)
    found = judged(updates(wrong, wrong, wrong), centre)
    assert found == [False] * 3 + [True] * 7


def test_an_update_of_nothing_is_found_where_the_others_lie_further_from_the_centre() -> None:
    chance = np.random.default_rng(3)
    goal = chance.standard_normal(2_000)
    honest = [(goal + 2 * chance.standard_normal(2_000)).astype(np.float32) for _ in range(7)]
    nothing = np.zeros(2_000, np.float32)
    centre = np.median([*honest, nothing, nothing, nothing], axis=0)
    assert np.linalg.norm(nothing - centre) < min(np.linalg.norm(each - centre) for each in honest)
    assert judged([*honest, nothing, nothing, nothing], centre) == [True] * 7 + [False] * 3


def test_what_is_all_alike_is_valid() -> None:
    same = np.ones(5, np.float32)
    near = same + np.float32(1e-6)
    assert judged([same, same, near], same) == [True, True, True]
    nothing = np.zeros(5, np.float32)
    assert judged([nothing, nothing, nothing], nothing) == [True, True, True]
