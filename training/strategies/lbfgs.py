"""Sandblaster L-BFGS (Dean et al. 2012, section 4.2). Workers compute the gradient of a whole pass in portions, and
shards hold the vectors. A coordinator that sees only numbers decides where the next pass is computed.

The two-loop recursion runs on the dot products of the vectors (Chen et al. 2014, "Large-scale L-BFGS using MapReduce").
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.training.config import TrainConfig
from tierkit.errors import InvalidInput
from training.strategies.config import BatchConfig
from training.strategies.leases import Leases
from training.strategies.pool import Pooled
from training.strategies.protocol import Schedule, Strategy
from training.units import Flat, UnitLease, Update, Verdict, is_finite

__all__ = ["BatchRules", "Coordinator", "Shard", "check_lbfgs", "two_loops"]

Command = Mapping[str, Any]
Products = NDArray[np.float64]
"""Dot products of all vectors with all, `[2 m + 1, 2 m + 1]` for m pairs: changes of the weights, changes of the
gradient, and the gradient."""

_MOST_BYTES = 2 << 30
_MOST_COPIES = 3
"""Leases of a portion at a time."""
_DECREASE = 1e-4
"""Share of the decrease that the slope promises which a step must reach (Armijo 1966)."""
_NOISE = 1e-7
"""Relative error of a loss in fp32; a step may raise the loss by this."""
_LEAST_BACK, _MOST_BACK = 0.1, 0.5
"""Bounds on the next rate, as shares of a rate that was too high."""
_BACK_STEPS = 8
"""Number of too high rates after which the coordinator forgets the pairs and follows the gradient."""
_CURVATURE = 1e-8
"""Least cosine between the changes of a pair. Smaller ones have no curvature to learn from."""
_DIGITS = 9
"""Digits of a coefficient in a command. They are enough for fp32."""


def check_lbfgs(network: TrainConfig, wire: str, *, shares_data: bool = False) -> None:
    """Check that all passes can evaluate the same function: the loss of the unchanged images.

    Args:
        wire: format of the updates.
        shares_data: True if workers may hold only some of the images.

    Raises:
        InvalidInput: they cannot; the message names the values to change.
    """
    wanted = {
        "precision": "fp32",
        "crop_padding": 0,
        "mirror": False,
        "mixup": 0.0,
        "cutmix": 0.0,
        "contrast": 1.0,
        "early_side": None,
        "stream": False,
    }
    wrong = [name for name, value in wanted.items() if getattr(network, name) != value]
    if network.network.options.get("dropout"):
        wanted["dropout"] = 0
        wrong.append("dropout")
    if wrong:
        changes = (f"leave out {name}" if wanted[name] is None else f"set {name} to {wanted[name]}" for name in wrong)
        raise InvalidInput(
            f"lbfgs compares the loss of the same images at different weights, which {', '.join(wrong)} of "
            f"{network.name!r} would change: {', '.join(changes).replace('False', 'false')}"
        )
    if wire != "fp32":
        raise InvalidInput(f"lbfgs compares gradients, which {wire} rounds: set --wire fp32")
    if shares_data:
        raise InvalidInput(
            "any worker of lbfgs may compute any portion, and --share-data gives workers some segments: leave it out, "
            "and give the workers the data set"
        )


def two_loops(products: Products, pairs: Sequence[int]) -> list[float]:
    """Coefficients of the direction of L-BFGS in the vectors (Chen et al. 2014, algorithm 3).

    Args:
        pairs: numbers of the pairs in use, the oldest first. Without any, the direction is the negative gradient.
    """
    size = len(products) // 2
    found = np.zeros(len(products))
    found[-1] = -1.0
    shares = {}
    for pair in reversed(pairs):
        shares[pair] = float(found @ products[pair]) / products[pair, size + pair]
        found[size + pair] -= shares[pair]
    if pairs:
        newest = pairs[-1]
        found *= products[newest, size + newest] / products[size + newest, size + newest]
    for pair in pairs:
        found[pair] += shares[pair] - float(found @ products[size + pair]) / products[pair, size + pair]
    return [float(f"{each:.{_DIGITS}g}") for each in found]


class Coordinator:
    """Finds the points of the passes: L-BFGS with a backtracking line search. It sees no vectors.

    Args:
        first: rate of a step along the gradient, before a pair is known.
        ask: sends a command to all shards, and returns the sum of their answers.
    """

    def __init__(self, history: int, first: float, ask: Callable[[Command], list[float]]) -> None:
        self._first, self._ask = first, ask
        self._pairs: list[int] = []
        self._products: Products = np.zeros((2 * history + 1, 2 * history + 1))
        self.value: float | None = None
        """Value of the function at the weights; None before the first pass."""
        self.accepted = 0
        """Points that were accepted."""
        self._slope = self._rate = 0.0
        self._backs = 0
        """Rates that were too high since then."""

    def passed(self, value: float, batches: int) -> None:
        """Take the value of the function at the trial point, and choose the next point.

        Args:
            value: mean loss of the batches; not finite if the point is out of bounds.
            batches: in a pass.
        """
        [slope] = self._ask({"do": "gradient", "batches": batches})
        if self.value is None or self._is_lower(value, slope):
            self._accept(value)
            self._go(two_loops(self._products, self._pairs), 1.0 if self._pairs else self._first)
            return
        self._backs += 1
        if self._backs == _BACK_STEPS and self._pairs:
            self._pairs.clear()
            self._go(two_loops(self._products, []), self._first)
        else:
            self._rate *= self._share_back(value)
            self._ask({"do": "go", "rate": self._rate})

    def _is_lower(self, value: float, slope: float) -> bool:
        assert self.value is not None
        most = self.value + _DECREASE * self._rate * self._slope + _NOISE * abs(self.value)
        return math.isfinite(slope) and value <= most

    def _share_back(self, value: float) -> float:
        """The minimum of the parabola through the point, its slope and the trial, as a share of the rate."""
        assert self.value is not None
        promised = self._rate * self._slope
        above = value - self.value - promised
        share = -promised / (2 * above) if math.isfinite(above) and above > 0 else 0.0
        return min(max(share, _LEAST_BACK), _MOST_BACK)

    def _accept(self, value: float) -> None:
        history, size = len(self._products) // 2, len(self._products)
        if self.value is None:
            self._products[-1] = self._products[:, -1] = self._ask({"do": "start"})
        else:
            used = len(self._pairs)
            pair = self._pairs.pop(0) if used == history else min(set(range(history)) - set(self._pairs))
            rows = np.array(self._ask({"do": "accept", "pair": pair})).reshape(3, size)
            for row, place in zip(rows, (pair, history + pair, size - 1), strict=True):
                self._products[place] = self._products[:, place] = row
            change, bend = self._products[pair, pair], self._products[history + pair, history + pair]
            if self._products[pair, history + pair] > _CURVATURE * math.sqrt(change * bend) > 0:
                self._pairs.append(pair)
        self.value, self._backs = value, 0
        self.accepted += 1

    def _go(self, along: list[float], rate: float) -> None:
        slope = float(np.array(along) @ self._products[-1])
        if self._pairs and not slope < 0:  # rounding has spoiled the pairs
            self._pairs.clear()
            self._go(two_loops(self._products, []), self._first)
            return
        self._slope, self._rate = slope, rate
        self._ask({"do": "go", "along": along, "rate": rate})

    def state(self) -> dict[str, Any]:
        """Everything that changes, as JSON."""
        return {
            "pairs": list(self._pairs),
            "products": self._products.tolist(),
            "value": self.value,
            "accepted": self.accepted,
            "slope": self._slope,
            "rate": self._rate,
            "backs": self._backs,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
        self._pairs, self._products[:] = list(state["pairs"]), state["products"]
        self.value, self.accepted, self._backs = state["value"], state["accepted"], state["backs"]
        self._slope, self._rate = state["slope"], state["rate"]


class Shard:
    """A slice of all vectors, which only this shard reads and writes.

    Args:
        vectors: by name. `changes` `[2 m + 1, n]` holds m changes of the weights, m changes of the gradient, and the
            gradient at the weights; `portions` `[p, n]` the gradients of a pass; the others are `[n]`.
        part: range of their last axis.
    """

    def __init__(self, vectors: Mapping[str, Flat], part: slice) -> None:
        own = {name: each[..., part] for name, each in vectors.items()}
        self._weights, self._trial, self._direction = own["weights"], own["trial"], own["direction"]
        self._gradient, self._changes, self._portions = own["gradient"], own["changes"], own["portions"]

    def do(self, command: Command) -> list[float]:
        """Obey a command of the coordinator; return the dot products of this slice that it asks for."""
        match command["do"]:
            case "gradient":  # of the trial, and its slope
                total = np.zeros(self._gradient.shape)
                for portion in self._portions:
                    total += portion
                self._gradient[:] = total / command["batches"]
                return [float(np.einsum("i,i->", self._gradient, self._direction, dtype=np.float64))]
            case "start":  # at the trial
                self._changes[-1] = self._gradient
                return self._products_with([-1])
            case "accept":  # the trial as the new weights
                pair, bend = command["pair"], command["pair"] + len(self._changes) // 2
                self._changes[pair] = self._trial - self._weights
                self._changes[bend] = self._gradient - self._changes[-1]
                self._changes[-1] = self._gradient
                self._weights[:] = self._trial
                return self._products_with([pair, bend, -1])
            case _:  # to the next trial
                if "along" in command:
                    along = np.array(command["along"])
                    self._direction[:] = np.einsum("i,ij->j", along, self._changes, dtype=np.float64)
                self._trial[:] = self._weights + np.float32(command["rate"]) * self._direction
                return []

    def _products_with(self, rows: Sequence[int]) -> list[float]:
        """Dot products of these vectors with all, in float64."""
        found = [np.einsum("ij,j->i", self._changes, self._changes[row], dtype=np.float64) for row in rows]
        return [float(each) for each in np.concatenate(found)]


class BatchRules(Strategy):
    """L-BFGS on the fleet. `weights` are the point that was accepted last; a lease starts from the trial point.

    The steps of pass k have the batches of the first epoch. A portion belongs to the pass of its version. So its
    gradient does not depend on the worker, and the sum of a pass does not depend on the order of arrival.

    Raises:
        InvalidInput: the vectors do not fit in memory.
    """

    def __init__(self, config: BatchConfig, start: tuple[Flat, Flat], leases: Leases, learner: Schedule) -> None:
        super().__init__(config, start, leases, together=1)
        self._batches = learner.steps // learner.config.all_epochs
        self._period, self._epochs = config.period, learner.config.all_epochs
        values, portions = len(self.weights), -(-self._batches // config.period)
        if (total := 4 * values * (2 * config.history + portions + 7)) > _MOST_BYTES:
            if 4 * values * (2 + 1 + 7) > _MOST_BYTES:
                raise InvalidInput(f"a network of {values:,} values is too large for lbfgs: use another strategy")
            raise InvalidInput(
                f"lbfgs with {portions:,} portions and a history of {config.history} takes {total / 2**30:.1f} GiB for "
                f"this network, more than the {_MOST_BYTES >> 30} that are kept: give a longer period, or a shorter "
                "history"
            )
        self._trial = self.weights.copy()
        self._rest = {
            "trial": self._trial,
            "direction": np.zeros_like(self.weights),
            "gradient": np.zeros_like(self.weights),
            "changes": np.zeros((2 * config.history + 1, values), np.float32),
            "portions": np.zeros((portions, values), np.float32),
        }
        self._losses: list[float | None] = [None] * portions
        """Sum over the batches of each portion of this pass; None for one that is still to come."""
        bounds = [number * values // config.shards for number in range(config.shards + 1)]
        vectors = {"weights": self.weights, **self._rest}
        self._shards = [Shard(vectors, slice(*part)) for part in itertools.pairwise(bounds)]
        self._coordinator = Coordinator(config.history, learner.config.peak_rate, self._ask)
        self._command_bytes = self._answer_bytes = 0
        leases.until, leases.most_copies = self._batches, _MOST_COPIES

    def start_of(self, lease: UnitLease) -> tuple[Flat, Flat]:
        return self._trial, self.buffers

    @property
    def failure(self) -> str:
        if self.finished and self._epochs > 1 and self._coordinator.accepted < 2:
            return "no pass after the first lowered the loss: lower peak_rate, or give more epochs"
        return ""

    def results(self) -> dict[str, float]:
        value = self._coordinator.value
        return {
            "objective": math.nan if value is None else value,
            "points": self._coordinator.accepted,
            "command_bytes": self._command_bytes,
            "answer_bytes": self._answer_bytes,
        }

    def _ask(self, command: Command) -> list[float]:
        answers = [shard.do(command) for shard in self._shards]
        self._command_bytes += len(self._shards) * len(json.dumps(command))
        self._answer_bytes += sum(len(json.dumps(answer)) for answer in answers)
        return [math.fsum(each) for each in zip(*answers, strict=True)]

    def _next(self, worker: str, now: float) -> UnitLease | None:
        lease = self.leases.grant(worker, self.version, now)
        return self.leases.grant_copy(worker, now) if lease is None else lease

    def _verdict(self, lease: UnitLease, update: Update) -> Verdict:
        found = update.computed
        if found.values.dtype != self.weights.dtype or found.values.shape != self.weights.shape:
            return "refused"
        # Without a first point there is nothing to step back to.
        good = math.isfinite(found.loss) and is_finite(found.values)
        return "taken" if good or self._coordinator.value is not None else "refused"

    def _apply(self, lease: UnitLease, update: Update) -> None:
        portion, found = lease.unit.first % self._batches // self._period, update.computed
        good = math.isfinite(found.loss) and is_finite(found.values)
        self._losses[portion] = found.loss * lease.unit.steps if good else math.inf
        self._rest["portions"][portion] = found.values if good else 0.0
        losses = [each for each in self._losses if each is not None]
        if len(losses) == len(self._losses):
            self._coordinator.passed(math.fsum(losses) / self._batches, self._batches)
            self._losses = [None] * len(self._losses)
            self.version += 1
            self.leases.until += self._batches

    def _vectors(self) -> dict[str, Flat]:
        return self._rest

    def _figures(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "coordinator": self._coordinator.state(),
            "command_bytes": self._command_bytes,
            "answer_bytes": self._answer_bytes,
        }

    def restore(self, vectors: Mapping[str, Flat], figures: Mapping[str, Any]) -> None:
        super().restore(vectors, figures)
        self._losses = list(figures["losses"])
        self._coordinator.restore(figures["coordinator"])
        self._command_bytes, self._answer_bytes = figures["command_bytes"], figures["answer_bytes"]
        self.leases.until = (self.version + 1) * self._batches

    def _apply_centre(self, values: Flat, buffers: Flat, of: Sequence[Pooled], weights: Sequence[float]) -> None:
        raise AssertionError("no updates are judged together")
