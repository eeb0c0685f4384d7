"""Which strategy, and its numbers: a name, or a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from tierkit.documents import Strict, read_document, read_toml
from tierkit.errors import InvalidInput
from training.masking import Masking
from training.trust.config import TrustConfig

__all__ = ["STRATEGIES", "OuterConfig", "Sends", "ServerConfig", "StrategyConfig", "find_strategy"]

Sends = Literal["gradient", "change"]
"""The sum of the gradients of some steps, or the weights before these steps less those after them."""


Steps = Annotated[int, Field(ge=1, le=10_000)]
"""Of one worker until others hear of them."""


class ServerConfig(Strict):
    """Asynchronous: each update goes into the weights as it comes."""

    family: Literal["server"] = "server"
    rule: Literal["sgd", "adagrad", "dc-constant", "dc-adaptive", "average"]
    n_fetch: Steps = 1
    """Steps that a worker computes between two fetches of the weights."""
    n_push: Steps = 1
    """Steps whose gradients a worker adds up before it sends them."""
    rate: PositiveFloat | None = None
    """Learning rate at its highest, in place of the network's own: AdaGrad wants a smaller one."""
    delay_compensation: NonNegativeFloat = Field(default=0.04)
    """Lambda of `dc-constant`; lambda_0 of `dc-adaptive` (Zheng et al. 2016, arXiv:1609.08326, section 6)."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Of the mean square of the gradients in `dc-adaptive`."""
    shards: int = Field(default=1, ge=1, le=4)
    """Slices of the weights that the host changes at the same time, each in a thread of its own; the result is the same
    to the bit."""
    most_stale: PositiveInt = 1_000
    """An update from weights that have changed more often than this since is refused."""
    trust: TrustConfig | None = None
    """Judge updates by several at a time. Default: each goes into the weights as it comes, whoever sends it."""
    masking: Masking | None = None
    """Clip updates and add noise to them before they leave their worker. Default: they are sent as they are."""

    @property
    def sends(self) -> Sends:
        """What a worker's update holds."""
        return "change" if self.rule == "average" else "gradient"

    @property
    def push(self) -> int:
        """Steps of an update."""
        return self.n_push

    @model_validator(mode="after")
    def _fits(self) -> ServerConfig:
        if self.n_fetch % self.n_push:
            raise ValueError(f"n_fetch ({self.n_fetch}) must be a multiple of n_push ({self.n_push})")
        _check_noise(self.masking, self.trust)
        return self


class OuterConfig(Strict):
    """In rounds: workers train alone from the same weights; their mean change is a step of an outer optimiser."""

    family: Literal["outer"] = "outer"
    local_steps: Steps = 50
    """H: steps of a worker in a round."""
    workers: PositiveInt | None = None
    """Updates that make a round; as many as the run has workers unless given."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """A round ends without the updates that are overdue when this share of its updates is there; with 1 it waits for
    all. An update is overdue when its worker takes a quarter longer for it than for its last one, and at least
    a second."""
    most_stale: PositiveInt = 4
    """An update that is overdue counts in the round in which it comes. When it is still missing after this many more
    rounds, others get its steps."""
    rate: PositiveFloat = 1.0
    momentum: float = Field(default=0.0, ge=0, lt=1)
    nesterov: bool = False
    trust: TrustConfig | None = None
    """Judge the updates of a round. Default: their mean counts, whoever sends them."""
    masking: Masking | None = None
    """Clip updates and add noise to them before they leave their worker. Default: they are sent as they are."""

    @property
    def sends(self) -> Sends:
        """What a worker's update holds."""
        return "change"

    @property
    def push(self) -> int:
        """Steps of an update."""
        return self.local_steps

    @model_validator(mode="after")
    def _fits(self) -> OuterConfig:
        if self.trust is not None and self.trust.updates is not None:
            raise ValueError("trust.updates is for a server rule: those of a round are judged together, set workers")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is a kind of momentum: set momentum above 0, and below 1")
        _check_noise(self.masking, self.trust)
        return self


def _check_noise(masking: Masking | None, trust: TrustConfig | None) -> None:
    if masking is not None and masking.noise and trust is not None and trust.recheck:
        raise ValueError("an update with noise cannot be computed again: set masking.noise or trust.recheck to 0")


StrategyConfig = ServerConfig | OuterConfig

STRATEGIES: dict[str, StrategyConfig] = {
    "sgd": ServerConfig(rule="sgd"),
    # Dean et al. 2012, section 4.1: AdaGrad at the server, and n_fetch = n_push = 1 in its experiments.
    "downpour": ServerConfig(rule="adagrad", rate=0.1),
    "dc-constant": ServerConfig(rule="dc-constant", delay_compensation=0.04),
    "dc-adaptive": ServerConfig(rule="dc-adaptive", delay_compensation=2.0),
    "average": ServerConfig(rule="average", n_fetch=10, n_push=10),
    # The volunteers' platform of 2018, section 4.3: the host averages after every batch.
    "crowdsourced": ServerConfig(rule="average"),
    # McMahan et al. 2017, arXiv:1602.05629.
    "fedavg": OuterConfig(),
    # Chen and Huo 2016: momentum of a block 1 - 1/workers with rate 1; 0.75 suits four.
    "bmuf": OuterConfig(momentum=0.75, nesterov=True),
    # Douillard et al. 2023, arXiv:2311.08105: Nesterov, rate 0.7, momentum 0.9.
    "diloco": OuterConfig(rate=0.7, momentum=0.9, nesterov=True),
}
"""By name; `n_fetch`, `n_push` and rates are where these sources leave them open, or name several, our own choice."""


def find_strategy(name: str) -> StrategyConfig:
    """The strategy of this name, or in this TOML file.

    Raises:
        InvalidInput: there is no such name or family.
        SetupError: the file cannot be read or contradicts itself; the message says where.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    path = Path(name)
    if path.suffix != ".toml":
        raise InvalidInput(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}, or a file that ends in .toml")
    kinds: dict[str, type[StrategyConfig]] = {"server": ServerConfig, "outer": OuterConfig}
    family = read_toml(path, what="strategy").get("family", "server")
    if family not in kinds:
        raise InvalidInput(f"the strategy {path}: family is {family!r}, known are server and outer")
    return read_document(path, kinds[family], what="strategy")
