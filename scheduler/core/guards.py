"""The guards of a canary: the figures of the new release and of the old one, and what they decide. Pure.

Each guard compares one figure of the trial with its limit, by an interval of 99.9 % confidence. A guard *fails* once
its interval lies wholly beyond the limit, which ends the trial at once. At the end of the trial, a guard passes if its
figure is within the limit and there are enough samples; otherwise the trial is extended once. Ratios of few samples are
often beyond their limits by chance. So at the end of the extended trial, such a ratio passes as well unless the new
release is worse than the old one with confidence. That is 99 % for agreement, and 99.9 % for times, which come in
bursts. `docs/how-to/releases.md` explains the guards.

Agreement: the share of images whose coarse answer equals the coarse answer of the tier above, as the ratio of the new
release to the old one. The interval is logarithmic (Katz, Baptista, Azen and Pike, Biometrics 34, 1978), but its
half-width is 2 arsinh(z s / 2) instead of z s (Newcombe, The American Statistician 55, 2001). The two are equal for
many samples. Near 0, only the second stays bounded and monotone.

Errors: the share of failed attempts of the new release, with Wilson's interval.

p99: the ratio of the 99th percentiles of the time per image, or of the medians of coarse answers if that is worse. The
slowest answers of a busy machine hardly show that a network takes several times as long. Medians of final answers are
not compared: upstream nodes compute larger batches for the release that has more work, at less time per image. A
quantile has an interval of ranks: a rank is outside if Wilson's interval of the share of samples above it does not hold
the quantile's share. Each of the two intervals uses z divided by the square root of 2, so that both together have the
confidence of z.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

from tierkit.wire.releases import GuardName, GuardNow

__all__ = ["STAGES", "Conclusion", "ReleaseFigures", "Stage", "Step", "Trial", "conclude", "judge"]

Stage = Literal["coarse", "final"]
STAGES: Final[tuple[Stage, ...]] = ("coarse", "final")
Step = Literal["go on", "extend", "promote", "roll back"]

CONFIDENCE = 0.999
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_Z_EACH = _Z / math.sqrt(2)
_WORSE = NormalDist().inv_cdf(0.99) / _Z
"""Part of an interval, on the scale of logarithms, with which a release is worse with 99 % confidence."""

NEEDS: Final[dict[GuardName, int]] = {"agreement": 1000, "p99": 200, "errors": 200}
"""Images, answers or attempts of each release without which a guard decides nothing."""
DISAGREE_ENOUGH = 200
"""Images of each release with which the guard of agreement may fail. To pass it takes more: with few images, a small
loss cannot be distinguished from chance."""
FAILED_ENOUGH = 5
"""Failed attempts that decide whatever the number of attempts: a node that fails all of them gets few."""
_RARE = 0.1
"""Answers of a stage, as a share of the other stage's, below which a trial does not wait for that stage."""

_LEAST_MS = 1e-3
_MOST_MS = 1e6
_RATIO = 1.03
_LOG_RATIO = math.log(_RATIO)
_LAST = math.ceil(math.log(_MOST_MS / _LEAST_MS) / _LOG_RATIO)
_TAILS: Final[dict[Stage, tuple[float, ...]]] = {"coarse": (0.01, 0.5), "final": (0.01,)}
"""Shares of the samples above the quantiles that are compared."""
_WORDS = {0.01: "99 %", 0.5: "Half"}


class _Histogram:
    """Times in milliseconds, counted in buckets that are 3 % wide: at most 703 of them, whatever the times."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})
        self.total = sum(self.counts.values())

    def add(self, ms: float, count: int = 1) -> None:
        bucket = round(math.log(min(_MOST_MS, max(_LEAST_MS, ms)) / _LEAST_MS) / _LOG_RATIO)
        self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += count

    def merge(self, other: _Histogram) -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total

    def quantile(self, tail: float) -> _Quantile:
        """The time above which this share of the samples is, with its interval. There must be samples."""
        low = value = high = None
        above = 0
        for bucket in sorted(self.counts, reverse=True):
            ms = _LEAST_MS * _RATIO**bucket
            if high is None or wilson(above, self.total, _Z_EACH)[1] < tail:
                # The largest sample, if there are too few to bound the quantile from above.
                high = ms
            above += self.counts[bucket]
            if value is None and above > tail * self.total:
                value = ms
            if low is None and wilson(above, self.total, _Z_EACH)[0] > tail:
                low = ms
                break
        assert value is not None
        assert high is not None
        return _Quantile(low=0.0 if low is None else low, value=value, high=high)


class _Quantile(NamedTuple):
    low: float
    value: float
    high: float


class ReleaseFigures:
    """The figures of one group of answers, added up over a trial."""

    def __init__(self) -> None:
        self.agreeing = 0
        """Images whose coarse answer equals the coarse answer of the tier above."""
        self.compared = 0
        """Images that have both answers."""
        self.failed = 0
        self.attempts = 0
        self._times: dict[Stage, _Histogram] = {stage: _Histogram() for stage in STAGES}

    def agrees(self, agreeing: int, images: int) -> None:
        """Add the images of a task: those whose two answers agree, and all that have two."""
        self.agreeing += agreeing
        self.compared += images

    def attempted(self, ok: bool) -> None:
        """Add an attempt that has ended."""
        self.attempts += 1
        self.failed += not ok

    def took(self, stage: Stage, ms_per_image: float) -> None:
        """Add the time of the coarse answer or of the final one, a sample per task or per picture of a source. A
        time that is not finite is not counted."""
        if math.isfinite(ms_per_image):
            self._times[stage].add(ms_per_image)

    def times(self, stage: Stage) -> int:
        """Samples of a stage's time."""
        return self._times[stage].total

    def merged(self, others: Iterable[ReleaseFigures]) -> ReleaseFigures:
        """New figures: the sum of these and others."""
        total = ReleaseFigures()
        for each in (self, *others):
            total.agreeing += each.agreeing
            total.compared += each.compared
            total.failed += each.failed
            total.attempts += each.attempts
            for stage in STAGES:
                total._times[stage].merge(each._times[stage])
        return total

    def as_json(self) -> dict[str, Any]:
        """The figures as values of JSON, bounded in size."""
        times = {
            stage: {str(bucket): count for bucket, count in sorted(self._times[stage].counts.items())}
            for stage in STAGES
            if self._times[stage].total
        }
        return {
            "agreement": [self.agreeing, self.compared],
            "attempts": [self.failed, self.attempts],
            "ms_per_image": times,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ReleaseFigures:
        """The figures that `as_json` wrote; what is missing is zero."""
        figures = cls()
        figures.agreeing, figures.compared = value.get("agreement", (0, 0))
        figures.failed, figures.attempts = value.get("attempts", (0, 0))
        for stage in STAGES:
            counts = value.get("ms_per_image", {}).get(stage, {})
            figures._times[stage] = _Histogram({int(bucket): count for bucket, count in counts.items()})
        return figures

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReleaseFigures) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]


class Trial:
    """The figures of a trial: the new release, and the release in force in the same period."""

    def __init__(self) -> None:
        self.new = ReleaseFigures()
        self.old_here = ReleaseFigures()
        """The release in force, on the devices of the canary."""
        self.old_elsewhere = ReleaseFigures()
        """The same on all other devices."""

    def as_json(self) -> dict[str, Any]:
        return {
            "new": self.new.as_json(),
            "old_here": self.old_here.as_json(),
            "old_elsewhere": self.old_elsewhere.as_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trial:
        """The trial that `as_json` wrote; what is missing is empty."""
        trial = cls()
        trial.new = ReleaseFigures.from_json(value.get("new", {}))
        trial.old_here = ReleaseFigures.from_json(value.get("old_here", {}))
        trial.old_elsewhere = ReleaseFigures.from_json(value.get("old_elsewhere", {}))
        return trial

    def old(self, samples: int, needs: int) -> ReleaseFigures:
        """The figures to compare with: only the canary's own devices if they have enough samples, else all."""
        return self.old_here if samples >= needs else self.old_here.merged([self.old_elsewhere])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trial) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]


def wilson(count: int, total: int, z: float) -> tuple[float, float]:
    """Wilson's interval of a share; z is the number of standard deviations."""
    if not total:
        return 0.0, 1.0
    share, weight = count / total, z * z / total
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / total + weight / (4 * total))
    return (0.0 if count == 0 else max(0.0, middle - half)), (1.0 if count == total else min(1.0, middle + half))


def judge(name: GuardName, limit: float, trial: Trial) -> GuardNow:
    """The guard's figures so far, and its verdict."""
    if name == "agreement":
        return _agreement(limit, trial)
    if name == "errors":
        return _errors(limit, trial)
    return _p99(limit, trial)


def _agreement(limit: float, trial: Trial) -> GuardNow:
    needs = NEEDS["agreement"]
    new, old = trial.new, trial.old(trial.old_here.compared, needs)
    if not new.compared or not old.compared:
        return _nothing("agreement", limit, new.compared, old.compared, "images with an answer of the tier above")
    share_new, share_old = new.agreeing / new.compared, old.agreeing / old.compared
    # Half an image away from none and from all, where the interval would have no width.
    hits_new, hits_old = _inside(new.agreeing, new.compared), _inside(old.agreeing, old.compared)
    ratio = (hits_new / new.compared) / (hits_old / old.compared)
    deviation = math.sqrt(1 / hits_new - 1 / new.compared + 1 / hits_old - 1 / old.compared)
    spread = math.exp(2 * math.asinh(_Z * deviation / 2))
    low, high = ratio / spread, ratio * spread
    value = share_new / share_old if old.agreeing else ratio
    low, high = min(low, value), max(high, value)
    verdict: Literal["open", "holds", "fails"] = "open"
    if min(new.compared, old.compared) >= DISAGREE_ENOUGH:
        verdict = "fails" if high < limit else "holds" if low >= limit else "open"
    return GuardNow(
        name="agreement",
        limit=limit,
        old=share_old,
        new=share_new,
        value=value,
        low=low,
        high=high,
        samples=new.compared,
        old_samples=old.compared,
        needs=needs,
        verdict=verdict,
        detail=(
            f"The new release agrees with the tier above on {100 * share_new:.1f} % of {new.compared:,} images, "
            f"the old one on {100 * share_old:.1f} % of {old.compared:,}. "
            f"The ratio is {value:.3g} ({low:.3g} to {high:.3g}); at least {limit:g} is required."
        ),
    )


def _inside(count: int, total: int) -> float:
    """The count, at least half a sample away from none and from all."""
    return min(max(float(count), 0.5), total - 0.5)


def _errors(limit: float, trial: Trial) -> GuardNow:
    needs = NEEDS["errors"]
    new, old = trial.new, trial.old(trial.old_here.attempts, needs)
    if not new.attempts:
        return _nothing("errors", limit, 0, old.attempts, "attempts of the new release")
    share = new.failed / new.attempts
    low, high = wilson(new.failed, new.attempts, _Z)
    verdict: Literal["open", "holds", "fails"] = "open"
    if low > limit and (new.attempts >= needs or new.failed >= FAILED_ENOUGH):
        verdict = "fails"
    elif high <= limit and new.attempts >= needs:
        verdict = "holds"
    return GuardNow(
        name="errors",
        limit=limit,
        old=old.failed / old.attempts if old.attempts else None,
        new=share,
        value=share,
        low=low,
        high=high,
        samples=new.attempts,
        old_samples=old.attempts,
        needs=needs,
        verdict=verdict,
        detail=(
            f"{new.failed:,} of {new.attempts:,} attempts of the new release failed: "
            f"{100 * share:.2f} % ({100 * low:.2f} % to {100 * high:.2f} %); at most {100 * limit:.2f} % may."
        ),
    )


def _p99(limit: float, trial: Trial) -> GuardNow:
    """The worst quantile. A stage that few answers have is judged only once it has enough samples."""
    judged = [_stage(stage, tail, limit, trial) for stage in _due(trial) for tail in _TAILS[stage]]
    if not judged:
        return _nothing("p99", limit, 0, 0, "answers")
    return max(judged, key=_badness)


def _due(trial: Trial) -> Iterator[Stage]:
    """The stages that the trial waits for, and those that have enough samples."""
    counts = {stage: trial.new.times(stage) + trial.old_here.times(stage) for stage in STAGES}
    for stage in STAGES:
        count = counts[stage]
        rare = count < _RARE * max(counts.values())
        enough = trial.new.times(stage) >= NEEDS["p99"]
        if count and (not rare or enough):
            yield stage


def _badness(guard: GuardNow) -> tuple[int, float]:
    """Order: a figure that fails, one with too few samples, one that is worse for another reason than chance, one that
    may be beyond its limit, then the larger ratio."""
    if guard.verdict == "fails":
        return 4, 0.0
    if not _enough(guard):
        return 3, 0.0
    worse = not _within(guard) and _is_worse(guard)
    return 2 if worse else int(guard.verdict == "open"), guard.value or 0.0


def _stage(stage: Stage, tail: float, limit: float, trial: Trial) -> GuardNow:
    needs = NEEDS["p99"]
    old = trial.old(trial.old_here.times(stage), needs)
    samples, old_samples = trial.new.times(stage), old.times(stage)
    if not samples or not old_samples:
        return _nothing("p99", limit, samples, old_samples, f"{stage} answers")
    new_ms, old_ms = trial.new._times[stage].quantile(tail), old._times[stage].quantile(tail)
    value = new_ms.value / old_ms.value
    low, high = new_ms.low / old_ms.high, new_ms.high / max(_LEAST_MS, old_ms.low)
    verdict: Literal["open", "holds", "fails"] = "open"
    if min(samples, old_samples) >= needs:
        # Samples beyond the limit are more than the tail has, with confidence.
        verdict = "fails" if low > limit else "holds" if high <= limit else "open"
    return GuardNow(
        name="p99",
        limit=limit,
        old=old_ms.value,
        new=new_ms.value,
        value=value,
        low=low,
        high=high,
        samples=samples,
        old_samples=old_samples,
        needs=needs,
        verdict=verdict,
        detail=(
            f"{_WORDS[tail]} of {samples:,} {stage} answers of the new release take at most {new_ms.value:.3g} ms per "
            f"image, of {old_samples:,} of the old one {old_ms.value:.3g} ms. "
            f"The ratio is {value:.3g} ({low:.3g} to {high:.3g}); at most {limit:g} is allowed."
        ),
    )


def _nothing(name: GuardName, limit: float, samples: int, old_samples: int, of: str) -> GuardNow:
    return GuardNow(
        name=name,
        limit=limit,
        samples=samples,
        old_samples=old_samples,
        needs=NEEDS[name],
        detail=f"There is nothing to compare yet: {samples:,} {of}"
        + ("." if name == "errors" else f" in the new release, {old_samples:,} in the old one."),
    )


def _enough(guard: GuardNow) -> bool:
    """True if the guard has the samples that it needs. The share of errors is compared with nothing old."""
    return guard.samples >= guard.needs and (guard.name == "errors" or guard.old_samples >= guard.needs)


def _within(guard: GuardNow) -> bool:
    if guard.value is None:
        return False
    return guard.value >= guard.limit if guard.name == "agreement" else guard.value <= guard.limit


def _is_worse(guard: GuardNow) -> bool:
    """True if the figure is beyond its limit for another reason than chance. A share of errors has nothing to be
    compared with."""
    if guard.name == "errors" or not guard.value or not guard.low or not guard.high:
        return True
    if guard.name == "p99":
        return guard.low > 1
    # The interval for 99 %, from the one for 99.9 %.
    return guard.value * math.pow(guard.high / guard.value, _WORSE) < 1


class Conclusion(NamedTuple):
    """The next step of a trial, and why."""

    step: Step
    reason: str
    """Sentences with the figures; while the trial continues, they name what it waits for."""


def conclude(guards: Sequence[GuardNow], *, elapsed_s: float, for_s: float, extended: bool) -> Conclusion:
    """The next step of a trial that has been under way for `elapsed_s`. An extended trial lasts `2 * for_s`."""
    failed = [guard for guard in guards if guard.verdict == "fails"]
    if failed:
        return Conclusion("roll back", _because("The trial failed", failed))
    end_s = 2 * for_s if extended else for_s
    short = [guard for guard in guards if not _enough(guard)]
    if elapsed_s < end_s:
        return Conclusion("go on", _because("More samples are needed", short) if short else "All guards have samples.")
    beyond = [guard for guard in guards if _enough(guard) and not _within(guard)]
    if not short and not beyond:
        return Conclusion("promote", _because("All guards hold", guards) if guards else "There are no guards.")
    if not extended:
        why = "There is too little data" if short else "The figures are beyond a limit, but not with confidence"
        return Conclusion("extend", _because(f"{why}, so the trial is extended once", short + beyond))
    worse = [guard for guard in beyond if _is_worse(guard)]
    if worse:
        return Conclusion("roll back", _because("A figure is beyond its limit at the end of the trial", worse + short))
    if short:
        return Conclusion("roll back", _because("There is too little data, even in the extended trial", short))
    return Conclusion("promote", _because("No guard shows that the new release is worse than the old one", guards))


def _because(opening: str, guards: Iterable[GuardNow]) -> str:
    parts = []
    for guard in guards:
        more = (
            "" if _enough(guard) or guard.verdict == "fails" else f" It needs {guard.needs:,} samples of each release."
        )
        if guard.name == "errors":
            more = more.replace(" of each release", "")
        parts.append(f"{guard.name}: {guard.detail}{more}")
    return f"{opening}. {' '.join(parts)}"
