"""Offers on the wire: hosts that wait for a person to start a training run on them. See `tierkit.wire.runs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from tierkit.wire.messages import Flag
from tierkit.wire.runs import RUN_ID_PATTERN, Label, Message, Value

__all__ = [
    "HostOffer",
    "Offer",
    "OfferList",
    "OfferOrders",
    "OfferedNetwork",
    "OfferedRange",
    "OfferedStart",
    "StartWish",
    "StartedRun",
]

Id = Annotated[str, Field(pattern=RUN_ID_PATTERN)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class OfferedRange(Message):
    """Range of a number that a person may choose."""

    lowest: Positive
    """Lowest value that the host takes."""
    highest: Positive
    """Highest value that the host takes."""
    default: Positive
    """Value that the dashboard proposes."""

    @model_validator(mode="after")
    def _in_order(self) -> OfferedRange:
        if not self.lowest <= self.default <= self.highest:
            raise ValueError("must have lowest <= default <= highest")
        return self


class OfferedNetwork(Message):
    """A network that a host would train, and the limits of its hyperparameters."""

    name: Label
    """Name of the network."""
    rate: OfferedRange
    """Learning rate at its highest."""
    epochs: OfferedRange
    """Passes over the training images."""
    batch: OfferedRange
    """Images per step of a worker."""


class StartWish(Message):
    """POST /v1/offers/{id}/runs: what to train. Answered by a `OfferedStart`."""

    network: Label
    """Name of the network."""
    strategy: Label
    """Name of the training strategy."""
    rate: Positive
    """Learning rate at its highest."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    """Passes over the training images."""
    batch: Annotated[int, Field(ge=1, le=1_000_000)]
    """Images per step of a worker."""
    start_at: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Number of ready workers before which no work is handed out; null for no waiting."""


class OfferedStart(StartWish):
    """A run that a person wants from a host."""

    id: Id
    """Id of the start, chosen by the scheduler. The run gets another id."""


class StartedRun(Message):
    """A start in the hands of its host."""

    start: Id
    """`OfferedStart.id`."""
    run: Id | None = None
    """Null until the host has its images."""
    over: Flag = False
    """True if the host is free again."""
    error: Annotated[str, Field(max_length=2000)] | None = None
    """Reason why there is no run, or why it ended."""


def _different(networks: Sequence[OfferedNetwork]) -> Sequence[OfferedNetwork]:
    if len({network.name for network in networks}) != len(networks):
        raise ValueError("must name each network once")
    return networks


class HostOffer(Message):
    """PUT /v1/offers/{id}, every second. Answered by `OfferOrders`."""

    host: Label
    """Name of the machine."""
    networks: Annotated[tuple[OfferedNetwork, ...], Field(min_length=1, max_length=20), AfterValidator(_different)]
    """Networks that the host can train, each once."""
    strategies: Annotated[tuple[Label, ...], Field(min_length=1, max_length=20)]
    """The first one is the default."""
    workers: Annotated[int, Field(ge=1, le=1_000_000)]
    """Expected in each run."""
    latest: StartedRun | None = None
    """Start that the host has taken last; null before the first."""

    def fault_of(self, wish: StartWish) -> tuple[str, str] | None:
        """The field of a wish that this host does not offer, and a sentence; None for a wish within the limits."""
        network = next((each for each in self.networks if each.name == wish.network), None)
        if network is None:
            return "network", f"this host offers {', '.join(each.name for each in self.networks)}"
        if wish.strategy not in self.strategies:
            return "strategy", f"this host offers {', '.join(self.strategies)}"
        for field, value, limits in (
            ("rate", wish.rate, network.rate),
            ("epochs", wish.epochs, network.epochs),
            ("batch", wish.batch, network.batch),
        ):
            if not limits.lowest <= value <= limits.highest:
                return field, f"this host takes {limits.lowest:g} to {limits.highest:g}"
        if wish.start_at is not None and wish.start_at > self.workers:
            return "start_at", f"this host expects {self.workers} workers"
        return None


class OfferOrders(Value):
    """The run to start now; null for none. Repeated until the host reports it in its `latest` field."""

    start: OfferedStart | None = None
    """Run that a person wants; null for none."""


class Offer(Value):
    """A host that waits, or runs what was started on it."""

    id: str
    """Id of the offer, 32 hex digits."""
    owner: str | None = None
    """Name of the token of its host; None if none was asked for."""
    host: str
    """Name of the machine."""
    networks: tuple[OfferedNetwork, ...]
    """Networks that the host can train."""
    strategies: tuple[str, ...]
    """Strategies that it offers; the first one is the default."""
    workers: int
    """Workers that it expects in each run."""
    latest: StartedRun | None = None
    """Start that the host has taken last; kept until the next one."""
    waiting: tuple[OfferedStart, ...] = ()
    """Starts that the host has not taken yet, the next one first."""


class OfferList(Value):
    """The offers that the caller may use."""

    offers: tuple[Offer, ...]
    """Hosts that wait for a start, or run one."""
