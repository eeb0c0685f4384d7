"""Configuration of a strategy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tierkit.documents import Strict
from training.masking import Masking
from training.trust.config import TrustConfig
from training.units import Sends

__all__ = [
    "BLOCK",
    "MOMENTUM",
    "RULES_WITHOUT_HOST",
    "SERVER_RULES",
    "BatchConfig",
    "ExchangeConfig",
    "HostedConfig",
    "Inner",
    "OuterConfig",
    "RanksConfig",
    "ServerConfig",
    "StrategyConfig",
    "TournamentConfig",
]

BLOCK = "1 - 1/N"
"""Momentum of a block of N updates."""

SERVER_RULES = ("sgd", "adagrad", "dc-constant", "dc-adaptive", "average")
"""Terrace's own rules of a `ServerConfig`."""
MOMENTUM = "momentum"
"""Terrace's own rule of an `OuterConfig`."""

RuleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
"""A rule of Terrace, or the name of an entry point of a package in `terrace.strategies`."""
Options = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")], float], Field(max_length=32)]
"""Numbers by name, which the rule of a package takes."""

Steps = Annotated[int, Field(ge=1, le=10_000)]
"""Number of steps that one worker does before others get the result."""


Inner = Literal["sgd", "adamw"]
"""Optimiser of a worker's local steps: SGD with the network's momentum, or AdamW (Loshchilov and Hutter 2019,
arXiv:1711.05101).
"""


class _Judged(Strict):
    """Options of every strategy."""

    trust: TrustConfig | None = None
    """Judge several updates together. Default: all updates count, whichever worker sends them."""
    masking: Masking | None = None
    """Clip updates and add noise to them before they leave their worker. Default: they are sent unchanged."""

    @property
    def keeps_moments(self) -> bool:
        """True if a worker keeps the momentum of its steps from unit to unit. Then no other machine can compute a unit
        again, and updates of honest workers differ by more than their batches.
        """
        return self.trust is None

    @model_validator(mode="after")
    def _is_repeatable(self) -> Self:
        if self.trust is not None and self.trust.recheck and self.masking is not None and self.masking.noise:
            raise ValueError("an update with noise cannot be computed again: set masking.noise or trust.recheck to 0")
        return self


class _Ruled(_Judged):
    """Has a rule that may be from a package."""

    options: Options = Field(default_factory=dict)
    """Numbers for the rule of a package, as its documentation names them."""

    @model_serializer(mode="wrap")
    def _without_a_package(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Workers of an older version can read a run that has no rule of a package.
        content: dict[str, Any] = written(self)
        if not content.get("options", True):
            del content["options"]
        for name, own in (("rule", MOMENTUM), ("pushes", None)):
            if content.get(name, "") == own:
                del content[name]
        return content


class ServerConfig(_Ruled):
    """Asynchronous: each update goes into the weights as it comes."""

    inner: ClassVar[Inner] = "sgd"
    family: Literal["server"] = "server"
    rule: RuleName
    """sgd, adagrad, dc-constant, dc-adaptive, average, or the rule of a package."""
    pushes: Literal["gradient", "change"] | None = None
    """Content of an update for the rule of a package: the sum of the gradients of its steps, which is the default, or
    the change of the weights in these steps."""
    period: Steps = 1
    """Steps that a worker computes between fetching the weights and pushing its update."""
    rate: PositiveFloat | None = None
    """Learning rate at its highest, of the host and of the workers' own steps. It replaces the network's rate, because
    AdaGrad needs a smaller one.
    """
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Nesterov momentum of `sgd` at the host. The delay of N workers adds a momentum of 1 - 1/N (Mitliagkas et al.
    2016, arXiv:1605.09774). The default makes both together equal to the network's momentum m: 1 - N (1 - m), at least
    0.
    """
    delay_compensation: NonNegativeFloat = Field(default=0.04)
    """Lambda of `dc-constant`; lambda_0 of `dc-adaptive` (Zheng et al. 2016, arXiv:1609.08326, section 6)."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean square of the gradients in `dc-adaptive`."""
    most_stale: PositiveInt = 1_000
    """An update from weights that have changed more often than this since is refused."""

    @property
    def own_rules(self) -> tuple[str, ...]:
        """Terrace's own rules of this family. Another one is from a package."""
        return SERVER_RULES

    @property
    def sends(self) -> Sends:
        """Content of a worker's update."""
        return "change" if self.rule == "average" else self.pushes or "gradient"

    @property
    def local_rate(self) -> float | None:
        """Highest learning rate of a worker's steps; None for the network's own."""
        return self.rate

    @model_validator(mode="after")
    def _fits(self) -> ServerConfig:
        if self.momentum is not None and self.rule != "sgd":
            raise ValueError(f"momentum is for the rule sgd, not for {self.rule}")
        if self.rule in SERVER_RULES and (self.options or self.pushes):
            raise ValueError(f"options and pushes are for rules of packages, and {self.rule} is one of Terrace")
        return self


class OuterConfig(_Ruled):
    """Training in rounds. Workers train independently from the same weights, and their mean change is a step of an
    outer optimiser.
    """

    sends: ClassVar[Sends] = "change"
    family: Literal["outer"] = "outer"
    period: Steps = 50
    """H: steps of a worker in a round."""
    workers: PositiveInt | None = None
    """Updates that make a round; by default the number of the run's workers."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """A round ends without the updates that are overdue when this share of its updates is there; with 1 it waits for
    all. An update is overdue when its worker takes a quarter longer for it than for its last one, and at least
    a second."""
    once: bool = False
    """A worker brings at most one update for a round, however fast it is. The round then waits for other workers until
    its quorum is there. For workers with different data."""
    most_stale: PositiveInt = 4
    """An update that is overdue counts in the round in which it comes. When it is still missing after this many more
    rounds, others get its steps."""
    rule: RuleName = MOMENTUM
    """The outer optimiser: momentum, or the rule of a package. `rate`, `momentum` and `nesterov` are for momentum."""
    rate: PositiveFloat = 1.0
    """Learning rate of the outer optimiser."""
    momentum: float | str = 0.0
    """Momentum of the outer optimiser. `1 - 1/N`, with N updates in a round, is the block momentum of Chen and Huo
    2016.
    """
    nesterov: bool = False
    inner: Inner = "sgd"
    """Optimiser of a worker's steps."""
    inner_rate: PositiveFloat | None = None
    """Learning rate of a worker's steps at its highest. Default: the network's own."""

    @property
    def own_rules(self) -> tuple[str, ...]:
        """Terrace's own rules of this family. Another one is from a package."""
        return (MOMENTUM,)

    @property
    def local_rate(self) -> float | None:
        """Highest learning rate of a worker's steps; None for the network's own."""
        return self.inner_rate

    @model_validator(mode="after")
    def _fits(self) -> OuterConfig:
        if self.momentum != BLOCK and not (isinstance(self.momentum, float) and 0 <= self.momentum < 1):
            raise ValueError(f'momentum is {self.momentum!r}: give a number from 0 to below 1, or "{BLOCK}"')
        if self.trust is not None and self.trust.updates is not None:
            raise ValueError("trust.updates is for a server rule; a round's updates are judged together: set workers")
        if self.rule == MOMENTUM and self.options:
            raise ValueError("options are for rules of packages: momentum has rate, momentum and nesterov")
        if self.rule != MOMENTUM and (self.rate, self.momentum, self.nesterov) != (1.0, 0.0, False):
            raise ValueError(f"rate, momentum and nesterov are for the rule momentum, not for {self.rule}: see options")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is a kind of momentum: set momentum above 0, and below 1")
        if self.inner == "adamw" and self.inner_rate is None:
            raise ValueError("the network's learning rate is one of SGD: set inner_rate for adamw, such as 0.001")
        if self.inner == "adamw" and self.trust is not None:
            raise ValueError(
                "the moments of adamw stay with the worker, and then honest updates are not alike: leave out trust, or "
                "set inner to sgd"
            )
        return self


class TournamentConfig(Strict):
    """Lineages train apart, each at its own learning rate. Pairs of them meet on held-out images now and then, and
    the winner's weights continue on both sides (LTFB; Jacobs et al. 2017). Each rank, or each worker of a host, has a
    lineage."""

    sends: ClassVar[Sends] = "change"
    inner: ClassVar[Inner] = "sgd"
    keeps_moments: ClassVar[bool] = False
    trust: ClassVar[TrustConfig | None] = None
    masking: ClassVar[Masking | None] = None
    local_rate: ClassVar[float | None] = None
    family: Literal["exchange"] = "exchange"
    rule: Literal["tournament"] = "tournament"
    period: Steps = 50
    """Steps of a lineage between two meetings."""
    rates: list[PositiveFloat] = Field(default_factory=list, max_length=1_000)
    """Grid of peak learning rates, which the lineages take in turn. Default: evenly spaced on a logarithmic
    scale around the network's own, from a tenth of it to ten times it."""
    variation: float = Field(default=0.2, ge=0, lt=1)
    """The loser continues at the winner's rate, changed by this share up or down, as the seed says."""

    def batches(self, ranks: int) -> int:
        """Batches that make a step of all ranks together."""
        return ranks


def _without_tables(given: Any, why: str) -> Any:
    """Raises ValueError for tables that only some strategies of a host have."""
    if isinstance(given, dict) and (tables := [name for name in ("trust", "masking") if name in given]):
        raise ValueError(f"no table {' or '.join(tables)} is possible, since {why}; fedavg and sgd have them")
    return given


RULES_WITHOUT_HOST = {
    "allreduce": {"scaling", "warmup", "elastic"},
    "gossip": {"period"},
    "ensemble": {"apart"},
    "pipeline": {"schedule", "micro_batches", "frozen"},
    "hybrid": {"scaling", "warmup"},
    "factors": {"scaling", "warmup"},
}
"""Options of each rule of an `ExchangeConfig`."""


class BatchConfig(Strict):
    """Training in passes over all images: a coordinator finds the next weights from the gradients of many portions
    (Sandblaster L-BFGS; Dean et al. 2012).
    """

    sends: ClassVar[Sends] = "portion"
    inner: ClassVar[Inner] = "sgd"
    keeps_moments: ClassVar[bool] = False
    trust: ClassVar[TrustConfig | None] = None
    masking: ClassVar[Masking | None] = None
    local_rate: ClassVar[float | None] = None
    family: Literal["batch"] = "batch"
    rule: Literal["lbfgs"] = "lbfgs"
    period: Steps = 5
    """Batches of a portion."""
    history: int = Field(default=10, ge=1, le=100)
    """Changes of weights and gradient that the coordinator remembers."""
    shards: int = Field(default=2, ge=1, le=64)
    """Parts of the vectors, each with its own dot products."""

    @model_validator(mode="before")
    @classmethod
    def _is_trusting(cls, given: Any) -> Any:
        return _without_tables(given, "lbfgs has no second gradient to compare one with, and noise misleads its steps")


class ExchangeConfig(Strict):
    """Ranks, without a host: each computes, and exchanges with the others; see `training.parallel`."""

    family: Literal["exchange"] = "exchange"
    sends: ClassVar[Sends] = "gradient"
    inner: ClassVar[Inner] = "sgd"
    keeps_moments: ClassVar[bool] = True
    rule: Literal["allreduce", "gossip", "ensemble", "pipeline", "hybrid", "factors"]
    period: Steps = 1
    """Steps of a rank between two exchanges of `gossip`; 1 for the other rules."""
    scaling: Literal["linear", "none"] = "linear"
    """Learning rate of `allreduce`, `hybrid` and `factors` with N ranks: N times the network's, since N batches make a
    step (Goyal et al. 2017, arXiv:1706.02677); or the network's own."""
    warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps in which that rate rises from the network's to the scaled one."""
    apart: float = Field(default=0.5, gt=0, lt=1)
    """Share of the steps of `ensemble` in which the networks train apart; then they are optimised together."""
    elastic: bool = False
    """Members of `allreduce` may come and go: the others compute on, and one that comes back gets their weights."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of the micro-batches of `pipeline`: one forward, one backward (Narayanan et al. 2019), or all forward first
    (Huang et al. 2019, arXiv:1811.06965). 1F1B keeps fewer activations in memory."""
    micro_batches: int = Field(default=4, ge=1, le=1_024)
    """Parts of a batch in `pipeline`."""
    frozen: bool = False
    """Batch normalisation in `pipeline` uses its running statistics and does not change them. Otherwise networks with
    batch normalisation need `micro_batches = 1`."""

    def batches(self, ranks: int) -> int:
        """Batches that make a step of all ranks together."""
        return 1 if self.rule == "pipeline" else ranks

    @model_validator(mode="before")
    @classmethod
    def _is_trusting(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("rule") == "factors" and "masking" in given:
            raise ValueError(
                "factors cannot be masked, since the factors of the first layer are the images. All ranks need them as "
                "they are; use a strategy of a host, such as fedavg, with masking"
            )
        return _without_tables(given, "ranks trust each other")

    @model_validator(mode="after")
    def _fits(self) -> ExchangeConfig:
        own = RULES_WITHOUT_HOST[self.rule]
        others = self.model_fields_set - own - {"family", "rule"}
        if foreign := sorted(others - ({"period"} if self.period == 1 else set())):
            raise ValueError(f"{', '.join(foreign)} is for another rule than {self.rule}: leave it out")
        return self


HostedConfig = ServerConfig | OuterConfig | TournamentConfig | BatchConfig
"""Strategies of a host."""
RanksConfig = ExchangeConfig | TournamentConfig
"""Strategies of ranks; see `training.parallel.programs`."""
StrategyConfig = HostedConfig | ExchangeConfig
