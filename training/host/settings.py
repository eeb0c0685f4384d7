"""Settings of a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from tierkit.access import Role, TokenFile
from tierkit.settings import CommaSeparated, CommaSeparatedUrls, HttpUrl, Port, ServiceSettings, UserPath
from tierkit.wire.messages import NodeId

__all__ = ["HostSettings"]


def _read_range(value: object) -> object:
    """Two numbers from LOWEST:HIGHEST."""
    if isinstance(value, str):
        lowest, colon, highest = value.partition(":")
        return (lowest, highest) if colon else value
    return value


def _rising(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError("must be LOWEST:HIGHEST")
    return value


Range = Annotated[
    Annotated[tuple[PositiveFloat, PositiveFloat], AfterValidator(_rising)] | None, BeforeValidator(_read_range)
]


class HostSettings(ServiceSettings):
    """The host of a run, or parameter server: keeps the weights, grants work to workers, and takes their updates."""

    callers: ClassVar[tuple[Role, ...]] = ("worker", "user")

    service: ClassVar[str] = "host"

    port: Port = 8074

    network: Annotated[str, Field(min_length=1)] | None = None
    """Network to train: the name of a bundled configuration, such as mnist-100, or a TOML file. With `parent`, the
    network of the parent's run.
    """

    base: UserPath | None = None
    """Folder that `terrace train improve` has prepared: a release's network, which workers train on pictures that each
    of them has kept. Its plan sets network, strategy and classes. Default: none."""

    parent: HttpUrl | None = None
    """URL of another host that this one works for: it takes units from there, distributes their steps to its own
    workers, and sends their change of the weights up as one update. Default: none.
    """

    parent_name: NodeId | None = None
    """Name of this host as a worker of `parent`; with a token, a name that the token allows. Default: the machine's."""

    parent_token_file: UserPath | None = None
    """File with the token of a worker for `parent`; only its owner may have access to the file."""

    patience_s: NonNegativeFloat = 120.0
    """Seconds that `parent` may be away."""

    strategy: str = "fedavg"
    """Strategy that turns updates into weights: fedavg, sgd, downpour, dc-constant, dc-adaptive, average, crowdsourced,
    bmuf, diloco, tournament, lbfgs, or a TOML file.
    """

    workers: Annotated[int, Field(ge=1, le=1_000_000)] = 4
    """Number of expected workers. A round of fedavg, bmuf and diloco waits for this many updates."""

    rate: PositiveFloat | None = None
    """Highest learning rate. A rate in the strategy takes precedence. Default: the configuration's."""

    batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Images per step. Default: the configuration's."""

    offer: CommaSeparated = ()
    """Networks that people may train on this host, comma-separated, each in the form of `network`. The host waits
    until one is started on the page *Hosts* of the scheduler. Default: none."""

    offer_strategies: CommaSeparated = ()
    """Strategies that they may choose, comma-separated. Default: `strategy`."""

    offer_rate: Range = None
    """Learning rates that they may choose, as LOWEST:HIGHEST, such as 0.01:0.5. Default: a tenth to ten times the
    network's."""

    offer_epochs: Range = None
    """Numbers of epochs that they may choose, in the same form. Default: 1 to twice the network's."""

    offer_batch: Range = None
    """Images per step that they may choose, in the same form. Default: a quarter to four times the network's."""

    start_at: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Number of workers that must have joined and have their images before the host hands out work, so that a group
    starts together. At most `workers`. Default: work from the first worker on.
    """

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Number format of the updates: fp32, or the shorter bf16 and int8. Weights travel in fp32 or bf16."""

    folder: UserPath | None = None
    """Folder that keeps the run. A run that is already there continues. Default: runs/<network> here."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Passes over the training images. Default: the configuration's."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the training. Default: the configuration's."""

    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """End as soon as the accuracy on the held-out training images is this high, such as 0.96. Default: only after the
    last step."""

    dataset: str | None = None
    """cifar100, mnist, or a folder with hierarchy.toml, train/ and test/. Default: the configuration's."""

    data: UserPath | None = None
    """Folder that holds cifar-100-python/ and mnist/. Default: the environment variable TERRACE_DATA."""

    answers: UserPath | None = None
    """File of `terrace models answers`: the answers of the configuration's teacher to the training images. Workers
    without images get the answers with them.
    """

    runs: UserPath = Path("runs/models")
    """Folder of runs, with the run whose weights the configuration starts from (`initial`). Workers need nothing."""

    scheduler: Annotated[CommaSeparatedUrls, Field(min_length=1)] | None = None
    """URL of the scheduler to report to, so that people can watch the run and workers find it; of several, all of them,
    comma-separated. Default: none."""

    token_file: UserPath | None = None
    """File with the token of a user for the scheduler; only its owner may have access to the file."""

    advertise_url: Annotated[CommaSeparatedUrls, Field(min_length=1, max_length=8)] | None = None
    """URL at which workers reach this host; or several URLs, comma-separated, in the order in which workers try
    them. Default: the address that it listens on; if that is every interface, the address of the interface that
    leads to the scheduler."""

    min_gflops: PositiveFloat | None = None
    """Least speed of a worker that the scheduler sends, in billions of fp32 operations a second. Default: any."""

    min_memory_mb: PositiveFloat | None = None
    """Least free memory of a worker that the scheduler sends, in MB. Default: any."""

    share_data: bool = False
    """Send the training images to workers of the run that lack them. There is one segment more than there are
    workers."""

    work: bool = False
    """Also compute as worker 0 of the run, in one thread of this process."""

    accept_loss: bool = False
    """Continue a run whose journal is damaged, without the updates from the damage on. The damaged part is kept."""

    lease_s: Annotated[float, Field(gt=0, le=1e9)] = 30.0
    """Seconds within which a worker must compute at least one step; otherwise its work goes to others."""

    max_lease_wait_s: PositiveFloat = 10.0
    """Seconds for which the host may keep a worker waiting that asks for work."""

    def own_token(self) -> Callable[[], str] | None:
        """Gives the token that this host shows to the scheduler; None where it has none.

        Raises:
            SetupError: the file cannot be used.
        """
        return None if self.token_file is None else TokenFile(self.token_file)

    @property
    def run_folder(self) -> Path:
        """The folder, the default filled in."""
        if self.offer:
            return self.folder or Path("runs") / "offered"
        name = "improve" if self.base is not None else Path(self.network or "aggregator").stem
        return self.folder or Path("runs") / name

    @model_validator(mode="after")
    def _trains_something(self) -> HostSettings:
        if [self.network, self.parent, self.base, self.offer or None].count(None) != 3:
            raise ValueError("give one of --network, --parent, --base and --offer")
        if self.offer and self.scheduler is None:
            raise ValueError("--offer needs --scheduler: its page shows what is offered")
        given = (self.epochs, self.rate, self.batch_size, self.start_at, self.answers, self.until)
        if self.offer and given.count(None) != len(given):
            raise ValueError("--offer takes no --epochs, --rate, --batch-size, --start-at, --answers and --until")
        if self.base is not None and (self.share_data or self.work):
            raise ValueError("--share-data and --work need a data set, and a run of --base has none")
        if self.parent is not None and self.share_data:
            raise ValueError("--share-data is for a host without --parent: the others of a run have the images")
        if self.parent is not None and self.until is not None:
            raise ValueError("--until is for a host without --parent: that one measures the accuracy")
        if self.parent is not None and self.start_at is not None:
            raise ValueError("--start-at is for a host without --parent: give it to that one")
        if self.start_at is not None and self.start_at > self.workers:
            raise ValueError(
                f"--start-at {self.start_at} is more than --workers {self.workers}: so many are never sent"
            )
        return self
