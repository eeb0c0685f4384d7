"""The guards of a canary: verdicts on simulated releases, and properties of the figures."""

import json
import random

import pytest
from hypothesis import example, given, strategies as st

from scheduler.core.guards import FAILED_ENOUGH, ReleaseFigures, Trial, conclude, judge, wilson
from tierkit.wire.releases import DEFAULT_GUARDS, GuardNow

LIMITS = DEFAULT_GUARDS


def figures(agreement=(0, 0), attempts=(0, 0), **times: dict[float, int]) -> ReleaseFigures:
    """ReleaseFigures with these counts; times as samples by milliseconds."""
    made = ReleaseFigures()
    made.agrees(*agreement)
    for number in range(attempts[1]):
        made.attempted(number >= attempts[0])
    for stage in ("coarse", "final"):
        for ms, count in times.get(stage, {}).items():
            for _ in range(count):
                made.took(stage, ms)
    return made


def trial(
    new: ReleaseFigures, old_here: ReleaseFigures | None = None, old_elsewhere: ReleaseFigures | None = None
) -> Trial:
    made = Trial()
    made.new = new
    made.old_here = old_here or ReleaseFigures()
    made.old_elsewhere = old_elsewhere or ReleaseFigures()
    return made


def conclusion(made: Trial, *, elapsed_s: float, extended: bool = False) -> tuple[str, str]:
    return conclude(
        [judge(name, limit, made) for name, limit in LIMITS.items()], elapsed_s=elapsed_s, for_s=100, extended=extended
    )


class Simulated:
    """A trial whose two releases answer pictures of the same kind, a task of ten at a time."""

    def __init__(self, seed: int, *, right=0.8, slower=1.0, failing=0.0):
        self.chance = random.Random(seed)
        self.trial = Trial()
        self.right, self.slower, self.failing = right, slower, failing

    def one_task(self) -> None:
        self._add(self.trial.new, self.right, self.slower, self.failing)
        self._add(self.trial.old_here, 0.8, 1.0, 0.001)
        for _ in range(3):
            self._add(self.trial.old_elsewhere, 0.8, 1.0, 0.001)

    def _add(self, to: ReleaseFigures, right: float, slower: float, failing: float) -> None:
        if self.chance.random() < failing:
            to.attempted(False)
            return
        to.attempted(True)
        to.agrees(sum(self.chance.random() < right for _ in range(10)), 10)
        to.took("coarse", slower * self.chance.lognormvariate(1, 0.5))
        to.took("final", slower * self.chance.lognormvariate(2, 0.5))

    def run(self, tasks: int, *, every: int = 20) -> tuple[str, str, int]:
        """The step, its reason and the number of tasks, as the scheduler would see it while samples come in."""
        for number in range(1, tasks + 1):
            self.one_task()
            if number % every == 0:
                step, reason = conclusion(self.trial, elapsed_s=1)
                if step != "go on":
                    return step, reason, number
        return *conclusion(self.trial, elapsed_s=100), tasks


@pytest.mark.parametrize("seed", range(20))
def test_an_equal_release_is_promoted(seed):
    step, reason, _ = Simulated(seed, failing=0.001).run(1000)
    assert step == "promote", reason


@pytest.mark.parametrize("seed", range(20))
def test_a_better_network_does_not_fail_the_guard_on_agreement(seed):
    assert Simulated(seed, right=0.95).run(600)[0] == "promote"


@pytest.mark.parametrize("seed", range(20))
def test_an_equal_release_is_promoted_even_if_there_is_little_work(seed):
    simulated = Simulated(seed, failing=0.0)
    step, reason, _ = simulated.run(220)
    if step == "extend":
        for _ in range(220):
            simulated.one_task()
        step, reason = conclusion(simulated.trial, elapsed_s=200, extended=True)
    assert step == "promote", reason


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("fault", "guard"),
    [
        ({"right": 0.05}, "agreement"),
        ({"slower": 5.0}, "p99"),
        ({"failing": 0.5}, "errors"),
        ({"right": 0.5}, "agreement"),
    ],
    ids=["one class", "slower", "failing", "half right"],
)
def test_a_bad_release_is_rolled_back_at_once(seed, fault, guard):
    step, reason, tasks = Simulated(seed, **fault).run(1000)
    assert step == "roll back"
    assert reason.startswith(f"The trial failed. {guard}: ")
    assert tasks <= 300


@pytest.mark.parametrize(
    ("new", "old", "limit", "verdict"),
    [
        ((0, 200), (140, 200), 0.97, "fails"),  # always one class
        ((10, 200), (140, 200), 0.97, "fails"),
        ((0, 199), (140, 200), 0.97, "open"),  # one image short
        ((0, 200), (140, 199), 0.97, "open"),
        ((140, 200), (140, 200), 0.97, "open"),
        ((200, 200), (200, 200), 0.97, "holds"),
        ((2000, 2000), (2000, 2000), 0.97, "holds"),
        ((200, 200), (100, 200), 0.97, "holds"),
        ((0, 500), (0, 500), 0.97, "open"),  # neither ever agrees: nothing is worse
        ((80_000, 100_000), (80_000, 100_000), 0.97, "holds"),
        ((77_000, 100_000), (80_000, 100_000), 0.97, "fails"),
    ],
)
def test_agreement(new, old, limit, verdict):
    guard = judge("agreement", limit, trial(figures(new), figures(old)))
    assert guard.verdict == verdict
    assert guard.value is not None
    assert guard.low is not None
    assert guard.high is not None
    assert guard.low <= guard.value <= guard.high
    assert (guard.samples, guard.old_samples) == (new[1], old[1])


@pytest.mark.parametrize(
    ("failed", "made", "verdict"),
    [
        (0, 0, "open"),
        (0, 199, "open"),
        (0, 5000, "holds"),
        (1, 200, "open"),
        (10, 200, "fails"),
        (4, 4, "open"),
        (19, 19, "fails"),
        (FAILED_ENOUGH, 20, "fails"),  # a node that fails everything gets few attempts
        (FAILED_ENOUGH, 4_000, "holds"),
        (100, 10_000, "fails"),
    ],
)
def test_errors(failed, made, verdict):
    assert judge("errors", 0.005, trial(figures(attempts=(failed, made)))).verdict == verdict


@pytest.mark.parametrize(
    ("new", "old", "verdict"),
    [
        ({1.0: 200}, {1.0: 200}, "holds"),
        ({1.0: 1000}, {1.0: 1000}, "holds"),
        ({1.2: 1000}, {1.0: 1000}, "holds"),
        ({1.4: 1000}, {1.0: 1000}, "fails"),
        ({5.0: 200}, {1.0: 200}, "fails"),
        ({5.0: 199}, {1.0: 200}, "open"),
        ({5.0: 200}, {1.0: 199}, "open"),
        ({1.0: 995, 50.0: 5}, {1.0: 1000}, "open"),  # above 1 % or not: too few to say
        ({1.0: 970, 50.0: 30}, {1.0: 1000}, "fails"),
        ({1.0: 970, 50.0: 30}, {1.0: 970, 50.0: 30}, "holds"),
        ({1.0: 990, 50.0: 10}, {1.0: 990, 50.0: 10}, "open"),
    ],
)
def test_p99(new, old, verdict):
    guard = judge("p99", 1.3, trial(figures(coarse=new), figures(coarse=old)))
    assert guard.verdict == verdict
    if guard.value is not None:
        assert guard.low is not None
        assert guard.high is not None
        assert guard.low <= guard.value <= guard.high


def test_a_network_that_is_slower_is_found_where_other_work_makes_the_slowest_answers():
    noisy_new, noisy_old = {5.0: 480, 90.0: 20}, {1.0: 480, 90.0: 20}
    guard = judge("p99", 1.3, trial(figures(coarse=noisy_new), figures(coarse=noisy_old)))
    assert guard.verdict == "fails"
    assert guard.detail.startswith("Half of 500 coarse answers of the new release take at most 4.98 ms")
    assert judge("p99", 1.3, trial(figures(coarse=noisy_old), figures(coarse=noisy_old))).verdict != "fails"


def test_the_worse_stage_counts():
    same, slow = {1.0: 300}, {5.0: 300}
    for new in (figures(coarse=same, final=slow), figures(coarse=slow, final=same)):
        guard = judge("p99", 1.3, trial(new, figures(coarse=same, final=same)))
        assert guard.verdict == "fails"
        assert guard.value == pytest.approx(5, rel=0.03)
    assert "coarse answers" in guard.detail


def test_a_stage_with_too_few_answers_is_waited_for_unless_it_is_rare():
    def now(final: int) -> GuardNow:
        some = figures(coarse={1.0: 1000}, final={1.0: final})
        return judge("p99", 1.3, trial(some, some))

    assert now(0).samples == 1000
    assert now(99).samples == 1000
    assert now(150).samples == 150
    assert now(150).verdict == "open"
    assert now(400).verdict == "holds"


def test_the_old_release_elsewhere_counts_only_if_there_is_too_little_here():
    bad, good = figures((50, 1000), (5, 1000), coarse={9.0: 1000}), figures((900, 1000), (0, 1000), coarse={1.0: 1000})
    little = figures((1, 1), (0, 1), coarse={1.0: 1})
    for name in LIMITS:
        enough = judge(name, LIMITS[name], trial(good, good, bad))
        assert enough.old_samples == 1000
        assert enough.old is not None
        assert enough.old == pytest.approx({"agreement": 0.9, "p99": 1.0, "errors": 0.0}[name], rel=0.02)
        assert judge(name, LIMITS[name], trial(good, little, bad)).old_samples == 1001


def guard(name="agreement", value=1.0, *, samples=500, old_samples=500, verdict="open", **interval) -> GuardNow:
    return GuardNow(
        name=name,
        limit=LIMITS[name],
        value=value,
        low=interval.get("low", value / 2),
        high=interval.get("high", value * 2),
        samples=samples,
        old_samples=old_samples,
        needs=200,
        verdict=verdict,
        detail=f"figures of {name}.",
    )


@pytest.mark.parametrize(
    ("guards", "elapsed_s", "extended", "step", "reason"),
    [
        ([guard()], 99, False, "go on", "All guards have samples."),
        ([guard(samples=3)], 99, False, "go on", "More samples are needed."),
        ([guard(verdict="fails")], 1, False, "roll back", "The trial failed. agreement: figures of agreement."),
        ([guard(), guard("p99", verdict="fails")], 1, True, "roll back", "The trial failed. p99:"),
        ([guard()], 100, False, "promote", "All guards hold."),
        ([], 100, False, "promote", "There are no guards."),
        ([], 99, False, "go on", ""),
        ([guard("errors", 0.004, old_samples=0)], 100, False, "promote", "All guards hold."),
        ([guard("errors", 0.006)], 100, False, "extend", "The figures are beyond a limit, but not with confidence"),
        ([guard(samples=199)], 100, False, "extend", "There is too little data, so the trial is extended once."),
        ([guard(old_samples=199)], 100, False, "extend", "There is too little data"),
        ([guard(samples=199)], 199, True, "go on", "More samples are needed."),
        ([guard(samples=199)], 200, True, "roll back", "There is too little data, even in the extended trial."),
        ([guard(value=0.96, high=0.98)], 100, False, "extend", "The figures are beyond a limit"),
        ([guard(value=0.8, high=0.9)], 200, True, "roll back", "A figure is beyond its limit at the end of the trial."),
        ([guard(value=0.9, high=1.3)], 100, False, "extend", "The figures are beyond a limit"),
        ([guard(value=0.9, high=1.3)], 200, True, "promote", "No guard shows that the new release is worse"),
        ([guard(value=0.9, high=1.3), guard("p99", samples=3)], 200, True, "roll back", "There is too little data"),
        ([guard("p99", 1.5, low=1.01)], 200, True, "roll back", "A figure is beyond its limit"),
        ([guard("p99", 1.5, low=0.99)], 200, True, "promote", "No guard shows that the new release is worse"),
        ([guard("p99", 1.5, low=0.6), guard("errors", 0.006)], 200, True, "roll back", "A figure is beyond"),
        ([guard()], 200, True, "promote", "All guards hold."),
        ([guard("p99", 1.31, low=1.2)], 200, True, "roll back", "A figure is beyond its limit"),
        ([guard("p99", 1.3)], 200, True, "promote", "All guards hold."),
    ],
)
def test_conclude(guards, elapsed_s, extended, step, reason):
    made = conclude(guards, elapsed_s=elapsed_s, for_s=100, extended=extended)
    assert made.step == step
    assert made.reason.startswith(reason)


def test_the_reason_has_the_figures():
    made = trial(
        figures((10, 200), (30, 300), coarse={5.0: 200}),
        figures((180, 200), coarse={1.0: 200}),
    )
    assert conclusion(made, elapsed_s=1) == (
        "roll back",
        "The trial failed. "
        "agreement: The new release agrees with the tier above on 5.0 % of 200 images, the old one on 90.0 % of 200. "
        "The ratio is 0.0556 (0.0209 to 0.148); at least 0.97 is required. "
        "p99: 99 % of 200 coarse answers of the new release take at most 4.98 ms per image, "
        "of 200 of the old one 1.01 ms. The ratio is 4.93 (4.93 to 4.93); at most 1.3 is allowed. "
        "errors: 30 of 300 attempts of the new release failed: 10.00 % (5.62 % to 17.16 %); at most 0.50 % may.",
    )


COUNT = st.integers(0, 1000)
TIMES = st.lists(st.floats(0, 1e7), max_size=20)


@st.composite
def any_figures(draw) -> ReleaseFigures:
    made = ReleaseFigures()
    agreeing = draw(COUNT)
    made.agrees(agreeing, agreeing + draw(COUNT))
    made.failed = draw(COUNT)
    made.attempts = made.failed + draw(COUNT)
    for stage in ("coarse", "final"):
        for ms in draw(TIMES):
            made.took(stage, ms)
    return made


ANY_TRIAL = st.builds(trial, any_figures(), any_figures(), any_figures())


@given(ANY_TRIAL)
def test_json_round_trip(made):
    assert Trial.from_json(json.loads(json.dumps(made.as_json()))) == made
    assert Trial.from_json({}) == Trial()


@given(ANY_TRIAL, st.sampled_from(list(LIMITS)), st.floats(0.001, 1000))
def test_every_guard_can_be_sent(made, name, limit):
    now = judge(name, limit, made)
    assert GuardNow.model_validate_json(now.model_dump_json()) == now
    if now.value is not None:
        assert now.low is not None
        assert now.high is not None
        assert now.low <= now.value * (1 + 1e-9)
        assert now.value <= now.high * (1 + 1e-9)


@given(any_figures(), any_figures(), st.lists(any_figures(), max_size=3))
def test_merging_adds_up(first, second, others):
    assert first.merged([second, *others]) == second.merged([*others, first])
    assert first.merged([]) == first
    assert first.merged([second]).times("coarse") == first.times("coarse") + second.times("coarse")


def test_times_are_bounded_and_odd_ones_harmless():
    made = ReleaseFigures()
    for number in range(10_000):
        made.took("coarse", 1.01**number if number < 5000 else 0.0)
    for odd in (float("nan"), float("inf"), -1.0, 0.0, 1e300):
        made.took("final", odd)
    assert len(made.as_json()["ms_per_image"]["coarse"]) <= 705
    assert made.times("final") == 3


@given(st.integers(200, 2000), st.data())
def test_agreement_is_monotone(images, data):
    old = figures((data.draw(st.integers(0, 1000)), 1000))
    fewer, more = sorted(data.draw(st.tuples(st.integers(0, images), st.integers(0, images))))
    low, high = (judge("agreement", 0.97, trial(figures((hits, images)), old)) for hits in (fewer, more))
    order = ["fails", "open", "holds"]
    assert order.index(low.verdict) <= order.index(high.verdict)
    assert (low.value or 0) <= (high.value or 0)
    assert (low.high or 0) <= (high.high or 0) * (1 + 1e-9)


@given(st.integers(200, 2000), st.data())
def test_errors_are_monotone(attempts, data):
    fewer, more = sorted(data.draw(st.tuples(st.integers(0, attempts), st.integers(0, attempts))))
    low, high = (judge("errors", 0.1, trial(figures(attempts=(failed, attempts)))) for failed in (fewer, more))
    order = ["holds", "open", "fails"]
    assert order.index(low.verdict) <= order.index(high.verdict)


@example(seed=151, factor=1.5, share=0.5)
@given(st.integers(0, 2**32), st.floats(1, 10), st.floats(0, 1))
def test_p99_is_monotone(seed, factor, share):
    chance = random.Random(seed)
    old, new, slower = ReleaseFigures(), ReleaseFigures(), ReleaseFigures()
    for _ in range(300):
        ms = chance.lognormvariate(1, 0.5)
        old.took("coarse", chance.lognormvariate(1, 0.5))
        new.took("coarse", ms)
        slower.took("coarse", ms * (factor if chance.random() < share else 1))
    low, high = judge("p99", 1.3, trial(new, old)), judge("p99", 1.3, trial(slower, old))
    order = ["holds", "open", "fails"]
    assert order.index(low.verdict) <= order.index(high.verdict)
    if low.detail.split()[0] == high.detail.split()[0]:  # the same quantile is the worst
        assert (low.value or 0) <= (high.value or 0)


@given(st.integers(1, 10_000), st.data(), st.floats(0.5, 4))
def test_wilson_holds_the_share(total, data, z):
    count = data.draw(st.integers(0, total))
    low, high = wilson(count, total, z)
    assert 0 <= low <= count / total <= high <= 1
