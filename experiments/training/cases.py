"""Training runs of `terrace experiment training`, and the targets of its tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, get_args

from training.cheating import Cheat
from training.strategies.config import (
    BatchConfig,
    ExchangeConfig,
    HostedConfig,
    OuterConfig,
    ServerConfig,
    StrategyConfig,
    TournamentConfig,
)
from training.strategies.finding import HOSTED
from training.trust.config import TrustConfig

__all__ = [
    "APART",
    "CHEATERS",
    "DESCENT",
    "LINK_BYTES_PER_S",
    "LINK_DELAY_S",
    "NESTEROV",
    "ONE_PROCESS",
    "TABLES",
    "WIDE",
    "Case",
    "Judged",
    "cases",
    "judge",
    "key",
    "p_value",
    "round_s",
    "source_s",
]

Row = Mapping[str, Any]

TABLES = (
    "scaling",
    "delay",
    "slow-worker",
    "bytes",
    "faults",
    "cheating",
    "churn",
    "exchanges",
    "second-order",
    "volunteers",
    "predicted",
    "strategies",
)

LINK_DELAY_S, LINK_BYTES_PER_S = 0.0002, 125e6
"""Links between workers and host: one region of a data centre, one gigabit a second."""

_EXCHANGE = 50
"""Steps between two exchanges with the host where scaling is weak. With fewer, 12 workers wait for each other at the
host: see the lines that exchange each step, and every 20."""

_ROUND = 20
"""Steps between two exchanges where the images are shared: units are short, so that the last ones cost little."""

_DILOCO = HOSTED["diloco"].model_copy(update={"inner_rate": 0.004})
_PLAIN = ServerConfig(rule="sgd", momentum=0.0)
_DOWNPOUR = ServerConfig(rule="adagrad", rate=0.02)
_DC = ServerConfig(rule="dc-adaptive", delay_compensation=2.0)
_DC_RATE = 0.01
"""Learning rate of updates that are sums of many gradients."""
_SYNCHRONOUS = OuterConfig(period=1)
"""Applies the mean of all gradients at each step. The outer optimiser adds no momentum, because workers keep the
network's.
"""


_WORKERS = (3, 7, 11)
"""Numbers of workers. The host is one of the source's 4, 8 or 12 nodes."""
_SOURCE_S = {
    ("downpour", 4): 3.52,
    ("downpour", 8): 3.53,
    ("downpour", 12): 3.55,
    ("dc-adaptive", 4): 3.59,
    ("dc-adaptive", 8): 3.61,
    ("dc-adaptive", 12): 3.64,
}
_SOURCE_EPOCHS = 20
"""Epochs over which the source takes its mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A line of a table: runs that differ only in their seed."""

    table: str
    name: str
    """Name of the strategy within the table."""
    strategy: StrategyConfig
    workers: int
    ranks: bool = False
    """True if the workers exchange with each other, without a host."""
    epochs: int = 1
    """Epochs of each worker with weak scaling, of all workers together with strong scaling."""
    scaling: Literal["strong", "weak"] = "strong"
    """True if the training images are shared, or each worker goes through all of them."""
    peak_rate: float | None = None
    """Replaces the network's peak rate."""
    slow: tuple[float, ...] = ()
    """Factors by which the first workers are slower."""
    faulty: bool = False
    """True if updates meet with faults."""
    cheat: Cheat | None = None
    """Kind of cheating of some workers."""
    stays_s: float | None = None
    """Mean seconds until another worker takes the place of a worker; None if all stay."""
    lost: bool = False
    """True if a worker dies in the middle of the run."""
    step_s: float | None = None
    """Seconds of a worker's step; by default the time measured on this machine."""
    timed_epochs: int = 0
    """Epochs of a second run without gradients that measures the time of an epoch, because virtual time does not depend
    on gradients. 0 to measure the run itself.
    """
    network: Mapping[str, Any] = field(default_factory=dict)
    """Kind and options of a network in batches of 32, instead of the experiment's own. It trains on few images. In
    the table `predicted`, options of `mnist-100` only."""
    learns: bool = True
    """True if gradients are computed; else there is only the run without any."""
    held: int = 0
    """Neighbouring segments of the images that each worker draws from, one of them shared with the next worker if there
    are two; 0 if all draw from all images."""
    by_class: bool = False
    """True if the segments are cut from images in the order of their classes."""
    once: bool = False
    """True if the line has only the first seed: chance does not matter for its target."""

    @property
    def by_processes(self) -> bool:
        """True if the rule computes through torch, in processes of this machine, and has no virtual time."""
        return self.strategy.rule in ("pipeline", "hybrid") if isinstance(self.strategy, ExchangeConfig) else False

    def passes(self, epochs: int) -> int:
        """Number of passes through the training images, by all workers together."""
        return epochs * (self.workers if self.scaling == "weak" else 1)

    @property
    def words(self) -> str:
        """Words that distinguish it from the other lines of its table."""
        slow = f", one {self.slow[0]:g} times slower" if self.slow else ""
        cheat = f", {self.cheat}" if self.cheat else ""
        stays = "" if self.stays_s is None else f", each stays {self.stays_s:g} s"
        lost = ", one lost" if self.lost else ""
        return f"{self.name}{slow}{', with faults' if self.faulty else ''}{cheat}{stays}{lost}"


def _every(steps: int, strategy: ServerConfig, **changes: Any) -> ServerConfig:
    """Return the strategy with an exchange every `steps` steps."""
    return strategy.model_copy(update={"period": steps, **changes})


_MEAN = "fedavg"
"""The line whose updates are averaged, whichever worker sends them."""
CHEATERS = 3
"""Number of cheaters among ten workers."""

_SCALINGS: tuple[tuple[Literal["weak", "strong"], int, int, int], ...] = (
    ("weak", _EXCHANGE, 1, _SOURCE_EPOCHS),
    ("strong", _ROUND, 5, 0),
)
"""Scalings with their steps between exchanges, epochs, and epochs of the run without gradients."""
_DELAYED: tuple[tuple[str, HostedConfig, int], ...] = (
    ("sgd", _PLAIN, 1),
    ("sgd", _PLAIN, 8),
    ("dc-adaptive", _DC, 8),
    ("adagrad", _DOWNPOUR, 8),
)
_SLOWED: tuple[tuple[str, HostedConfig], ...] = (
    ("asynchronous", _every(_ROUND, _DOWNPOUR)),
    ("synchronous", OuterConfig(period=_ROUND, quorum=1.0)),
)
_CHURNED: tuple[tuple[str, HostedConfig], ...] = (
    ("downpour", _every(5, _DOWNPOUR)),
    ("fedavg", OuterConfig(period=5)),
)
_STAY_S, _LAPTOP_STEP_S = 20.0, 0.3
"""Each worker is so slow that the run lasts for several stays."""
_FAULTY: tuple[tuple[str, HostedConfig], ...] = (("downpour", _DOWNPOUR), ("fedavg", OuterConfig(period=5)))
_CHEATS: tuple[Cheat | None, ...] = (None, *get_args(Cheat))
_COLLUDING: tuple[Cheat | None, ...] = ("alie", "ipm")
"""These stay near the honest updates, so the median does not tell who cheats."""
_CHEATED: tuple[tuple[str, HostedConfig, tuple[Cheat | None, ...]], ...] = (
    (_MEAN, OuterConfig(period=_ROUND), _CHEATS),
    ("fedavg, median", OuterConfig(period=_ROUND, trust=TrustConfig(centre="median", recheck=0.05)), _CHEATS),
    (
        "fedavg, median without recheck",
        OuterConfig(period=_ROUND, trust=TrustConfig(centre="median")),
        _COLLUDING,
    ),
)


ONE_PROCESS = "one process"
APART = "lineages apart"
_ALLREDUCE = ExchangeConfig(rule="allreduce")
_PIPELINE = ExchangeConfig(rule="pipeline")
_GRID = [0.01, 0.0464, 0.2154, 1.0]
"""Rates from a tenth of the network's rate to ten times it, which is too high."""
_EXCHANGES: tuple[tuple[str, StrategyConfig, int], ...] = (
    ("allreduce", _ALLREDUCE, 4),
    ("gossip", ExchangeConfig(rule="gossip"), 4),
    ("gossip", ExchangeConfig(rule="gossip"), 8),
    (APART, TournamentConfig(period=10_000, rates=_GRID), 4),
    ("tournament", TournamentConfig(rates=_GRID), 4),
    ("ensemble", ExchangeConfig(rule="ensemble"), 4),
    ("fedavg", HOSTED["fedavg"], 4),
    ("bmuf", HOSTED["bmuf"], 4),
    ("diloco", _DILOCO, 4),
)
WIDE = ", wide layers"
"""Ends the name of a line with another network than the experiment's own."""
_WIDE = f"allreduce{WIDE}"
_WIDE_NETWORK = {"kind": "mlp", "options": {"hidden": [1024, 1024], "activation": "relu"}}
_DENSE_NETWORK = {
    "kind": "alexnet",
    "options": {"image": [1, 28, 28], "widths": [16, *[32] * 4], "hidden": [1024, 512]},
}
_PARTS: tuple[tuple[str, StrategyConfig, Mapping[str, Any]], ...] = (
    (_WIDE, _ALLREDUCE, _WIDE_NETWORK),
    ("factors", ExchangeConfig(rule="factors"), _WIDE_NETWORK),
    ("hybrid", ExchangeConfig(rule="hybrid"), _DENSE_NETWORK),
)
"""Rules with the networks that they are for: wide dense layers, and dense layers with 96 % of the parameters."""
_SANDBLASTER, _PASSES = BatchConfig(period=92), 20
"""Six portions of a pass of 550 batches: three workers need as many turns for them as four do. And passes in all."""
DESCENT, NESTEROV = "gradient descent", "Nesterov"
_SECOND_ORDER: tuple[tuple[str, int, tuple[float, ...]], ...] = (
    (DESCENT, 1, ()),
    (NESTEROV, 1, ()),
    ("lbfgs", 4, ()),
    ("lbfgs", 4, (8.0,)),
)
"""Methods with the number of workers, and the factors by which the first ones are slower."""
_COMPARED: tuple[tuple[str, StrategyConfig, bool], ...] = (
    (ONE_PROCESS, _ALLREDUCE, True),
    ("allreduce", _ALLREDUCE, True),
    ("gossip", ExchangeConfig(rule="gossip"), True),
    ("tournament", TournamentConfig(), True),
    ("ensemble", ExchangeConfig(rule="ensemble"), True),
    ("fedavg", HOSTED["fedavg"], False),
    ("fedavg, median", OuterConfig(trust=TrustConfig(centre="median")), False),
    ("bmuf", HOSTED["bmuf"], False),
    ("diloco", _DILOCO, False),
    ("tournament, at a host", TournamentConfig(), False),
    ("sgd", HOSTED["sgd"], False),
    ("downpour", _DOWNPOUR, False),
    ("dc-constant", HOSTED["dc-constant"], False),
    ("dc-adaptive", HOSTED["dc-adaptive"], False),
    ("average", HOSTED["average"], False),
    ("crowdsourced", HOSTED["crowdsourced"], False),
    ("lbfgs", _SANDBLASTER, False),
)
"""Names and strategies, and True for ranks."""
_WIDE_COMPARED: tuple[tuple[str, StrategyConfig, int], ...] = (
    (f"{ONE_PROCESS}{WIDE}", _ALLREDUCE, 1),
    (_WIDE, _ALLREDUCE, 2),
    (f"factors{WIDE}", ExchangeConfig(rule="factors"), 2),
    (f"hybrid{WIDE}", ExchangeConfig(rule="hybrid"), 2),
)
"""Names, strategies and numbers of workers. These lines train `_WIDE_NETWORK`."""


_VOLUNTEERS = HOSTED["crowdsourced"]
_HELD: tuple[tuple[str, int, bool], ...] = (
    ("all images", 0, False),
    ("one segment each", 1, False),
    ("two segments each", 2, False),
    ("one segment each, by class", 1, True),
    ("two segments each, by class", 2, True),
)
"""Images that each of four machines draws from: a name, the number of segments, and True if they are cut by class."""


def _volunteers() -> list[Case]:
    """Figure 18 of the source, where each machine goes through all images; then four machines that share one pass."""
    common = Case(table="volunteers", name="figure 18", strategy=_VOLUNTEERS, workers=4, epochs=10)
    found = [replace(common, workers=workers, scaling="weak") for workers in (1, 2, 3, 4)]
    return found + [replace(common, name=name, held=held, by_class=by_class) for name, held, by_class in _HELD]


def _predicted() -> list[Case]:
    """A network that learns all weights of its first layer, and two that learn a share of them."""
    common = Case(table="predicted", name="all weights", strategy=_ALLREDUCE, workers=1, epochs=20, ranks=True)
    shares = (0.25, 0.1)
    return [common, *(replace(common, name=f"{share:g} learned", network={"predicted": share}) for share in shares)]


def _compared() -> list[Case]:
    """Each strategy unchanged, with a worker that is lost, and with one that cheats."""
    found = []
    for name, strategy, ranks in _COMPARED:
        epochs = _PASSES if strategy == _SANDBLASTER else 2
        plain = Case(table="strategies", name=name, strategy=strategy, workers=4, epochs=epochs, ranks=ranks)
        if name == ONE_PROCESS:
            found.append(replace(plain, workers=1))
            continue
        found += [plain, replace(plain, cheat="sign-flip")]
        if not ranks:
            found.append(replace(plain, lost=True))
    common = Case(table="strategies", name="pipeline", strategy=_PIPELINE, workers=2, epochs=2, ranks=True)
    found.append(common)
    for name, strategy, workers in _WIDE_COMPARED:
        line = replace(common, name=name, strategy=strategy, workers=workers, network=_WIDE_NETWORK, peak_rate=0.02)
        found.append(line)
        if workers > 1 and not line.by_processes:
            found.append(replace(line, cheat="sign-flip"))
    return found


def cases(tables: Sequence[str] = TABLES) -> list[Case]:
    """Return all lines of these tables."""
    rules = ("downpour", _DOWNPOUR, None), ("dc-adaptive", _DC, _DC_RATE)
    lines = [
        Case(
            table="scaling",
            name=name,
            strategy=_every(steps, rule) if rate is None else _every(steps, rule, rate=rate),
            workers=workers,
            scaling=scaling,
            epochs=epochs,
            timed_epochs=timed,
        )
        for (scaling, steps, epochs, timed), (name, rule, rate), workers in product(_SCALINGS, rules, _WORKERS)
    ]
    lines += [
        Case(
            table="scaling",
            name=name,
            strategy=_every(steps, _DOWNPOUR),
            workers=workers,
            scaling="weak",
            timed_epochs=epochs,
            learns=False,
        )
        for (name, steps, epochs), workers in product(
            (("downpour, every 20 steps", 20, _SOURCE_EPOCHS), ("downpour, every step", 1, 1)),
            (_WORKERS[0], _WORKERS[-1]),
        )
    ]
    lines += [
        Case(table="delay", name=name, strategy=strategy, workers=workers, peak_rate=0.5)
        for name, strategy, workers in _DELAYED
    ]
    lines += [
        Case(
            table="slow-worker",
            name=name,
            strategy=strategy,
            workers=8,
            slow=slow,
            timed_epochs=_SOURCE_EPOCHS,
            learns=False,
        )
        for (name, strategy), slow in product(_SLOWED, ((), (4.0,)))
    ]
    lines += [
        Case(table="bytes", name="each step", strategy=_SYNCHRONOUS, workers=4, epochs=10),
        Case(table="bytes", name="diloco", strategy=_DILOCO, workers=4, epochs=10),
    ]
    lines += [
        Case(table="faults", name=name, strategy=strategy, workers=8, epochs=2, faulty=faulty)
        for (name, strategy), faulty in product(_FAULTY, (False, True))
    ]
    lines += [
        Case(table="cheating", name=name, strategy=strategy, workers=10, epochs=5, cheat=cheat)
        for name, strategy, cheats in _CHEATED
        for cheat in cheats
    ]
    lines += [
        Case(
            table="churn",
            name=name,
            strategy=strategy,
            workers=16,
            epochs=10,
            stays_s=stays_s,
            step_s=_LAPTOP_STEP_S,
        )
        for (name, strategy), stays_s in product(_CHURNED, (None, _STAY_S))
    ]
    lines += [
        Case(
            table="exchanges",
            name=name,
            strategy=strategy,
            workers=workers,
            epochs=5,
            ranks=isinstance(strategy, ExchangeConfig | TournamentConfig),
        )
        for name, strategy, workers in _EXCHANGES
    ]
    lines += [
        Case(table="exchanges", name=name, strategy=strategy, workers=2, ranks=True, network=network, peak_rate=0.02)
        for name, strategy, network in _PARTS
    ]
    lines += [
        Case(
            table="second-order",
            name=name,
            strategy=BatchConfig(period=7),  # six portions of 40 batches
            workers=workers,
            slow=slow,
            epochs=40,
            once=True,
        )
        for name, workers, slow in _SECOND_ORDER
    ]
    lines += _volunteers() + _predicted()
    lines += _compared()
    return [line for line in lines if line.table in tables]


# --- verdicts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A figure against its target."""

    words: str
    reached: bool


def p_value(differences: Sequence[float]) -> float:
    """p value of the exact one-sided test of paired differences: the share of all sign combinations with a mean as
    large.
    """
    total = math.fsum(differences)
    sums = [0.0]
    for difference in differences:
        sums = [each + sign * abs(difference) for each in sums for sign in (-1, 1)]
    return sum(each >= total - 1e-12 for each in sums) / len(sums)


def source_s(row: Row) -> float | None:
    """Seconds of an epoch in table 2 of the source (Mullapudi 2017, Distributed Deep Neural Networks); None if it has
    no such rule or number of nodes."""
    if row["table"] != "scaling" or row["scaling"] != "weak":
        return None
    return _SOURCE_S.get((row["strategy"], row["workers"] + 1))


def round_s(*, workers: int, steps: int, step_s: float, serve_s: float, transfer_s: float, delay_s: float) -> float:
    """Seconds of a round of a synchronous rule when one worker is the slowest. The others wait for its end and are
    served one by one; the slowest comes last.

    Args:
        step_s: seconds of a step of the slowest worker.
        transfer_s: seconds to transfer weights or an update.
    """
    return max(workers * serve_s, delay_s + serve_s) + 2 * transfer_s + steps * step_s + serve_s


def judge(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Judged]]:
    """Judge the targets of the tables by these rows. The result maps the `key` of each line to its verdicts."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(key(row), []).append(row)
    return {
        place: [judged for judged in _JUDGES[line[0]["table"]](line, lines) if judged is not None]
        for place, line in lines.items()
    }


def key(row: Row) -> tuple[Any, ...]:
    """The line of a row."""
    kept = tuple(row[name] for name in ("table", "scaling", "strategy", "workers", "slow", "faulty"))
    return (*kept, row.get("cheat"), row.get("stays_s"), row.get("lost", False))  # older records know none of these


Line = Sequence[Row]
Lines = Mapping[tuple[Any, ...], Line]


def _mean(line: Line, name: str) -> float:
    return statistics.fmean(row[name] for row in line)


def _other(line: Line, lines: Lines, **changes: Any) -> Line:
    """The line that differs from this one in these fields; empty where it was not measured."""
    return lines.get(key({**line[0], **changes}), ())


def _ratio(line: Line, other: Line, words: str, most: float) -> Judged | None:
    """Ratio of an epoch's time to the time in another line."""
    if not other:
        return None
    ratio = _mean(line, "epoch_seconds") / _mean(other, "epoch_seconds")
    return Judged(words=f"{ratio:.3f} of {words} (at most {most:g})", reached=ratio <= most)


def _scaling(line: Line, lines: Lines) -> list[Judged | None]:
    row = line[0]
    if row["scaling"] != "weak":
        return []
    found = []
    most, fewest = (
        (11, 3) if row["workers"] in _WORKERS else (12, 4)
    )  # records from before have no host among the nodes
    if row["workers"] == most:
        found.append(_ratio(line, _other(line, lines, workers=fewest), f"{fewest} workers", 1.014))
    if row["strategy"] == "dc-adaptive":
        found.append(_ratio(line, _other(line, lines, strategy="downpour"), "downpour", 1.03))
    return found


def _paired(line: Line, other: Line, name: str) -> list[float]:
    """Differences to another line, seed by seed."""
    theirs = {row["seed"]: row[name] for row in other}
    return [row[name] - theirs[row["seed"]] for row in line if row["seed"] in theirs]


def _delay(line: Line, lines: Lines) -> list[Judged | None]:
    differences = _paired(line, _other(line, lines, strategy="sgd"), "accuracy")
    if line[0]["strategy"] == "sgd" or not differences:
        return []
    mean, chance = statistics.fmean(differences), p_value(differences)
    words = f"{100 * mean:+.1f} points to sgd, p = {chance:.3f} (more than 0 with p below 0.05)"
    return [Judged(words=words, reached=mean > 0 and chance < 0.05)]


def _slow_worker(line: Line, lines: Lines) -> list[Judged | None]:
    row = line[0]
    if not row["slow"]:
        return []
    if row["strategy"] == "asynchronous":
        return [_ratio(line, _other(line, lines, slow=()), "no slow one", 1.15)]
    foretold = statistics.fmean(_synchronous_s(each) / each["timed_epochs"] for each in line)
    ratio = _mean(line, "epoch_seconds") / foretold
    words = f"{ratio:.3f} of its formula, {foretold:.2f} s (within 5 %)"
    other = _other(line, lines, slow=())
    if other:
        words += f"; {_mean(line, 'epoch_seconds') / _mean(other, 'epoch_seconds'):.2f} of no slow one"
    return [Judged(words=words, reached=abs(ratio - 1) <= 0.05)]


def _synchronous_s(row: Row) -> float:
    """Seconds of a run with one slow worker. It is in every round except a last one with fewer updates."""

    def a_round(factor: float) -> float:
        return round_s(
            workers=row["workers"],
            steps=_ROUND,
            step_s=factor * row["step_s"],
            serve_s=row["serve_s"],
            transfer_s=LINK_DELAY_S + row["size_bytes"] / LINK_BYTES_PER_S,
            delay_s=LINK_DELAY_S,
        )

    whole, rest = divmod(int(row["updates"]), int(row["workers"]))
    return whole * a_round(max(row["slow"])) + (a_round(1.0) if rest else 0.0)


def _bytes(line: Line, lines: Lines) -> list[Judged | None]:
    counted = all(row["bytes_sent"] == row["bytes_received"] == row["updates"] * row["size_bytes"] for row in line)
    exact = all(row["updates"] == row["formula_updates"] for row in line)
    found: list[Judged | None] = [Judged(words="as the formula says", reached=counted and exact)]
    other = _other(line, lines, strategy="each step")
    if line[0]["strategy"] == "diloco" and other:
        share = _mean(other, "bytes_sent") / _mean(line, "bytes_sent")
        found.append(Judged(words=f"1/{share:.1f} of each step (at most 1/40)", reached=share >= 40))
        found.append(_within_a_point(_paired(line, other, "accuracy"), "each step"))
    return found


def _within_a_point(differences: Sequence[float], words: str) -> Judged | None:
    if not differences:
        return None
    mean = statistics.fmean(differences)
    return Judged(words=f"{100 * mean:+.2f} points to {words} (at least -1)", reached=mean >= -0.01)


def _faults(line: Line, lines: Lines) -> list[Judged | None]:
    if not line[0]["faulty"]:
        return []
    lost, twice = sum(row["missing"] for row in line), sum(row["twice"] for row in line)
    words = f"{sum(row['faults'] for row in line):,} faults: {lost} steps lost, {twice} applied twice (none)"
    quiet = _paired(line, _other(line, lines, faulty=False), "accuracy")
    return [Judged(words=words, reached=not lost and not twice), _within_a_point(quiet, "no faults")]


def _cheating(line: Line, lines: Lines) -> list[Judged | None]:
    calm = {row["seed"]: row["accuracy"] for row in _other(line, lines, strategy=_MEAN, cheat=None)}
    shares = [row["accuracy"] / calm[row["seed"]] for row in line if row["seed"] in calm]
    if line[0]["strategy"] == _MEAN or not shares:
        return []
    share = statistics.fmean(shares)
    words = f"{share:.3f} of the mean without cheaters (at least 0.95)"
    if cheaters := sum(row["cheaters"] for row in line):
        words += f"; {sum(len(row['quarantined']) for row in line)} of {cheaters} cheaters excluded"
    return [Judged(words=words, reached=share >= 0.95)]


def _churn(line: Line, lines: Lines) -> list[Judged | None]:
    if line[0].get("stays_s") is None:
        return []
    calm = _other(line, lines, stays_s=None)
    return [_ratio(line, calm, "the calm run", 1.3), _within_a_point(_paired(line, calm, "accuracy"), "it")]


def _exchanges(line: Line, lines: Lines) -> list[Judged | None]:
    row = line[0]
    if row["strategy"] == "gossip" and row["workers"] == 8:
        each = [_mean(other, "step_bytes") for other in (_other(line, lines, workers=4), line) if other]
        words = f"{each[-1]:,.0f} bytes a step of each rank (as with 4 ranks)"
        return [Judged(words=words, reached=max(each) == min(each))]
    if row["strategy"] == "hybrid":
        return [_share(_mean(line, "allreduce_bytes") / _mean(line, "bytes_sent"), 8)]
    if row["strategy"] == "factors":
        other = _other(line, lines, strategy=_WIDE)
        share = _mean(other, "step_bytes") / _mean(line, "step_bytes") if other else None
        same = _within_a_point(_paired(line, other, "accuracy"), "it")
        return [] if share is None else [_share(share, 12), same]
    if row["strategy"] == "gossip":
        differences = _paired(line, _other(line, lines, strategy="allreduce"), "accuracy")
        spread = max(row["spread"] for row in line)
        found = [Judged(words=f"spread {spread:.3f} (at most 0.05)", reached=spread <= 0.05)]
        if differences:
            mean = statistics.fmean(differences)
            words = f"{100 * mean:+.2f} points to allreduce (at least -0.3), {_range(differences)} by seed"
            found.insert(0, Judged(words=words, reached=mean >= -0.003))
        return [*found]
    if row["strategy"] == "tournament":
        gains = _paired(line, _other(line, lines, strategy=APART), "mean")
        if not gains:
            return []
        words = (
            f"mean of the lineages {100 * _mean(line, 'mean'):.2f}: {_range(gains)} points above those apart, by seed"
        )
        return [Judged(words=f"{words} (at least 1.5 in each)", reached=min(gains) >= 0.015)]
    if row["strategy"] == APART:
        return [Judged(words=f"mean of the lineages {100 * _mean(line, 'mean'):.2f}", reached=True)]
    if row["strategy"] == "ensemble":
        best = _mean(line, "best_local")
        found = []
        for name, words, least in (("combined", "combined", 0.8), ("accuracy", "optimised together", 1.8)):
            gain = 100 * (_mean(line, name) - best)
            said = f"{words} {gain:+.2f} points to the best network's {100 * best:.2f} (at least {least})"
            found.append(Judged(words=said, reached=gain >= least))
        return [*found]
    return []


def _share(times: float, least: int) -> Judged:
    return Judged(words=f"1/{times:.1f} of the bytes of allreduce (at most 1/{least})", reached=times >= least)


def _second_order(line: Line, lines: Lines) -> list[Judged | None]:
    row = line[0]
    if row["strategy"] != "lbfgs":
        words = f"loss {row['objective']:.4f}, the lowest of {row['runs_of_grid']} runs: rate {row['rate']:g}"
        return [Judged(words=words + f", momentum {row['momentum']:g}" * bool(row["momentum"]), reached=True)]
    if row["slow"]:
        calm = _other(line, lines, slow=())
        same = bool(calm) and all(difference == 0 for difference in _paired(line, calm, "objective"))
        words = f"loss {row['objective']:.4f}, {'to the bit that' if same else 'which differs from that'} without it"
        return [_ratio(line, calm, "no slow one", 1.2), Judged(words=words, reached=same) if calm else None]
    found: list[Judged | None] = []
    for name, least in ((DESCENT, 6.0), (NESTEROV, 3.0)):
        if other := _other(line, lines, strategy=name, workers=1):
            times = _mean(other, "objective") / _mean(line, "objective")
            words = f"loss {row['objective']:.4f}: 1/{times:.1f} of {name}'s (at most 1/{least:g})"
            found.append(Judged(words=words, reached=times >= least))
    words = f"{row['command_bytes']:,} bytes of commands (at most 50,000)"
    return [*found, Judged(words=words, reached=row["command_bytes"] <= 50_000)]


def _range(differences: Sequence[float]) -> str:
    return f"{100 * min(differences):+.2f} to {100 * max(differences):+.2f}"


def _no_targets(line: Line, lines: Lines) -> list[Judged | None]:
    return []


def _parameters(line: Line, lines: Lines) -> list[Judged | None]:
    return [Judged(words=f"{line[0]['parameters']:,} parameters", reached=True)]


_JUDGES: Mapping[str, Callable[[Line, Lines], list[Judged | None]]] = {
    "scaling": _scaling,
    "delay": _delay,
    "slow-worker": _slow_worker,
    "bytes": _bytes,
    "faults": _faults,
    "cheating": _cheating,
    "churn": _churn,
    "exchanges": _exchanges,
    "second-order": _second_order,
    "volunteers": _no_targets,
    "predicted": _parameters,
    "strategies": _no_targets,
}
