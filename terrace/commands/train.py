"""`terrace train`: training on many machines. Needs the extra `learn`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from models.dataset import Dataset
from terrace.commands import train_release, train_runs
from terrace.commands.improve import improve
from terrace.commands.train_work import work
from terrace.commands.training import TeacherFile, TorchThreads, say
from terrace.console import percent, print_json, progress_bars, screen
from terrace.options import Credentials, Data, Json, OtherDataset, with_options
from terrace.stoppable import interruptible, run_stoppable
from tierkit.errors import InvalidInput, ServiceFailed, SetupError
from tierkit.extras import training_extra
from tierkit.plaintext import harmless
from training.host.__main__ import run as host_command

if TYPE_CHECKING:
    from experiments.training.ranks import RankMachines
    from experiments.training.simulation import Machines
    from training.virtual import Link

__all__ = ["app"]

app = typer.Typer(help="Training on many machines.", no_args_is_help=True)
app.add_typer(train_runs.app)
app.add_typer(train_release.app)


StrategyName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How updates become weights. With a host: fedavg, sgd, downpour, dc-constant, dc-adaptive, average, "
        "crowdsourced, bmuf, diloco, tournament, lbfgs. For ranks: allreduce, elastic, gossip, ensemble, pipeline, "
        "hybrid, factors. A name from a package or a TOML file works too.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs. Default: the configuration's.")]
Wire = Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="Number format of the updates.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed. Default: the configuration's.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """Options of `terrace train run`."""

    strategy: StrategyName = "fedavg"
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that compute.")] = 4
    wire: Wire = "fp32"
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the run and the trained network; the same command continues it. Default: not kept.",
            file_okay=False,
        ),
    ] = None
    epochs: Epochs = None
    seed: Seed = None
    until: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1,
            metavar="SHARE",
            help="End as soon as the accuracy on held-out training images is this high, such as 0.96.",
        ),
    ] = None
    start_at: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Hand out no work before N workers have joined; at most --workers."),
    ] = None
    answers: TeacherFile = None
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run whose weights the configuration starts from. Default: runs/models.", file_okay=False
        ),
    ] = None
    data: Data = None
    dataset: OtherDataset = None
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="What the workers compute on: cpu or cuda; ranks also take cuda:N."),
    ] = "cpu"
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1
    patience_s: Annotated[float, typer.Option(min=1, metavar="S", help="How long a rank waits for the others.")] = 120.0
    scheduler: Annotated[
        str | None, typer.Option(metavar="URL", help="Report the run to this scheduler; of several, all.")
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what host, workers and ranks log.")] = False


@app.command(name="run")
@with_options
def run_local(
    config: Annotated[
        str, typer.Argument(help="A bundled configuration, such as mnist-100, or a TOML file.", show_default=False)
    ],
    options: LocalTraining,
    credentials: Credentials,
    json: Json = False,
) -> None:
    """Train with a host and workers on this machine, or with ranks; each is a process."""
    with training_extra("training on the fleet", "learn"):
        from training.host.opening import find_network
        from training.local import LocalRun, run_here
        from training.parallel.starting import LocalRanks, run_ranks_here
        from training.strategies.config import ExchangeConfig, TournamentConfig
        from training.strategies.finding import find_strategy
    try:
        network, strategy = find_network(config), find_strategy(options.strategy)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    ranks = isinstance(strategy, ExchangeConfig | TournamentConfig)
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?" if ranks else "cpu|cuda", options.device):
        raise typer.BadParameter(f"no device {options.device!r}: there are cpu and cuda; ranks also take cuda:N.")
    if ranks and options.wire != "fp32":
        raise typer.BadParameter(f"--wire is for a host; the ranks of {options.strategy} exchange in fp32.")
    if ranks and options.until is not None:
        raise typer.BadParameter(f"--until is for a host; the ranks of {options.strategy} measure only at the end.")
    if options.start_at is not None:
        if ranks:
            raise typer.BadParameter(f"--start-at is for a host; the ranks of {options.strategy} start together.")
        if options.start_at > options.workers:
            raise typer.BadParameter(f"--start-at is at most --workers, which is {options.workers}.")
    common = {"strategy": options.strategy, "epochs": options.epochs, "seed": options.seed, "folder": options.folder}
    common |= {"scheduler": options.scheduler, "token_file": credentials.token_file, "tls_ca": credentials.tls_ca}
    images = {"data": options.data, "dataset": options.dataset}
    if options.answers is not None:
        if ranks:
            raise typer.BadParameter("--answers is for a host; ranks train networks without a teacher.")
        images["answers"] = options.answers
    worker: dict[str, Any] = {**images, "device": options.device, "threads": options.threads}
    common |= images
    notes = screen(stderr=True)

    def show(name: str, line: str) -> None:
        if options.verbose:
            notes.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)

    host: dict[str, Any] = {"network": config, **common, "wire": options.wire, "workers": options.workers}
    host |= {"until": options.until, "runs": options.runs, "start_at": options.start_at}
    ranked = {**common, **worker, "patience_s": options.patience_s}
    with progress_bars("step") as progress:
        bar = progress.add_task(network.name, total=None)

        async def train() -> dict[str, Any]:
            if ranks:
                return await run_ranks_here(
                    LocalRanks(network=config, settings=ranked, ranks=options.workers, on_line=show),
                    lambda now: progress.update(bar, completed=now["step"], total=now["steps"]),
                )
            return await run_here(
                LocalRun(host=host, worker=worker, workers=options.workers, on_line=show),
                lambda status: progress.update(bar, completed=status.done, total=status.steps),
            )

        try:
            result = run_stoppable(train)
        except ServiceFailed as error:  # with the code of the process that could not go on
            typer.echo(harmless(f"terrace train run: {error}"), err=True)
            raise typer.Exit(max(1, error.code)) from error
    if result is None:
        raise typer.Abort
    if json:
        print_json(result)
        return
    screen().print(
        f"{result['network']} with {result['strategy']}, {_machines(options.workers)}: "
        f"{percent(result['accuracy'])} of the test images right, {result['seconds']:,.1f} s, "
        f"{result['updates']:,} updates, {result['bytes_sent'] / 1e6:,.1f} MB sent, "
        f"{result['bytes_received'] / 1e6:,.1f} MB received",
        soft_wrap=True,
        markup=False,
    )
    if options.until is not None:
        screen().print(_reached_text(options.until, result.get("reached")), soft_wrap=True, markup=False)


def _reached_text(until: float, reached: dict[str, Any] | None) -> str:
    if reached is None:
        return f"the accuracy on held-out images was below {percent(until)} to the last step"
    return (
        f"{percent(reached['accuracy'])} of the held-out images right after {reached['seconds']:,.1f} s, "
        f"{reached['updates']:,} updates and {reached['steps']:,} steps"
    )


app.command(name="host")(host_command)
app.command(name="improve")(improve)
app.command(name="work")(work)


def _machines(workers: int) -> str:
    return f"{workers} {'worker' if workers == 1 else 'workers'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Options of `terrace train simulate`."""

    strategy: StrategyName = "fedavg"
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Machines that compute.")] = 4
    config: Annotated[
        Path | None, typer.Option(help="Configuration. Default: the bundled one of this name.", dir_okay=False)
    ] = None
    wire: Wire = "fp32"
    epochs: Epochs = None
    seed: Seed = None
    answers: TeacherFile = None
    slow: Annotated[
        list[float] | None,
        typer.Option(min=0.01, metavar="FACTOR", help="Factor by which a worker is slower; may be repeated."),
    ] = None
    leave: Annotated[
        list[float] | None,
        typer.Option(min=0, metavar="S", help="Seconds after which a worker dies; may be repeated."),
    ] = None
    cheat: Annotated[
        Literal["sign-flip", "noise", "stale", "free-rider", "alie", "ipm"],
        typer.Option(help="Content that cheating workers send instead of their updates."),
    ] = "sign-flip"
    cheaters: Annotated[int, typer.Option(min=0, help="Number of workers that cheat.")] = 0
    stay: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="S",
            help="Mean seconds after which a worker dies; another one takes its place.",
        ),
    ] = None
    delay_ms: Annotated[float, typer.Option(min=0, help="One-way delay of the links between workers and host.")] = 0.0
    mbps: Annotated[
        float | None, typer.Option(min=0.001, help="Megabits a second of each link. Default: no limit.")
    ] = None
    step_ms: Annotated[
        float | None, typer.Option(min=0.001, help="Duration of a worker's step. Default: measured here.")
    ] = None
    serve_ms: Annotated[
        float | None, typer.Option(min=0, help="Host's time for an update. Default: measured here.")
    ] = None
    sync_ms: Annotated[float, typer.Option(min=0, help="Time of the host's disk to keep updates.")] = 0.0
    data: Data = None
    dataset: OtherDataset = None
    threads: TorchThreads = None

    def __post_init__(self) -> None:
        if len(self.slow or []) + len(self.leave or []) > self.workers:
            raise typer.BadParameter(f"--slow and --leave speak of more than {self.workers} workers.")
        if self.cheaters > self.workers:
            raise typer.BadParameter(f"--cheaters speaks of more than {self.workers} workers.")
        if self.leave and self.stay is not None:
            raise typer.BadParameter("give --leave or --stay.")

    def machines(self) -> Machines:
        """Return the simulated workers, host and links."""
        from experiments.training.simulation import Machines

        return Machines(
            workers=self.workers,
            slow=self.slow or [],
            leave_after_s=self.leave or [],
            cheat=self.cheat,
            cheaters=self.cheaters,
            stays_s=self.stay,
            step_s=None if self.step_ms is None else self.step_ms / 1e3,
            serve_s=None if self.serve_ms is None else self.serve_ms / 1e3,
            sync_s=self.sync_ms / 1e3,
            link=self._link,
            wire=self.wire,
        )

    def rank_machines(self) -> RankMachines:
        """Return the simulated ranks and links."""
        from experiments.training.ranks import RankMachines

        given = {
            "--wire": self.wire != "fp32",
            "--leave": bool(self.leave),
            "--stay": self.stay is not None,
            "--cheaters": self.cheaters > 0,
            "--serve-ms": self.serve_ms is not None,
            "--sync-ms": self.sync_ms > 0,
        }
        if wrong := [flag for flag, used in given.items() if used]:
            raise typer.BadParameter(
                f"{wrong[0]} is for a run with a host. Ranks of {self.strategy} have none: they exchange fp32 with "
                "each other, and end when one of them is lost."
            )
        return RankMachines(
            ranks=self.workers,
            slow=self.slow or [],
            step_s=None if self.step_ms is None else self.step_ms / 1e3,
            link=self._link,
        )

    @property
    def _link(self) -> Link:
        from training.virtual import Link

        return Link(
            delay_s=self.delay_ms / 1e3,
            bytes_per_s=None if self.mbps is None else self.mbps * 1e6 / 8,
        )


@app.command(name="simulate")
@interruptible
@with_options
def simulate_run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Configuration of the network.", show_default=False)],
    options: Simulation,
    json: Json = False,
) -> None:
    """Train on virtual time: real gradients, and machines and links that are simulated."""
    with training_extra("training on the fleet", "learn"):
        import torch

        from experiments.training.ranks import simulate_ranks
        from experiments.training.simulation import run_simulation
        from models.training.config import find_config
        from training.learner import read_images, read_teacher
        from training.strategies.config import ExchangeConfig, TournamentConfig
        from training.strategies.finding import find_strategy
    try:
        chosen, network = find_strategy(options.strategy), find_config(name, options.config)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    changes = {"epochs": options.epochs, "seed": options.seed}
    network = network.model_copy(update={key: value for key, value in changes.items() if value is not None})
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Before the images, so that a wrong option is found at once.
    ranks = options.rank_machines() if isinstance(chosen, ExchangeConfig | TournamentConfig) else None
    say("reading the images")
    source = Dataset.open(options.dataset or network.dataset, options.data)
    images = read_images(network, source, answers=read_teacher(options.answers, network, source))
    with progress_bars("step") as progress:
        bar = progress.add_task(network.name, total=None)

        def watch(done: int, steps: int, now: float) -> None:
            progress.update(bar, completed=done, total=steps)

        if isinstance(chosen, ExchangeConfig | TournamentConfig):
            assert ranks is not None
            found = simulate_ranks(network, chosen, images, ranks, watch)
        else:
            found = run_simulation(network, chosen, images, options.machines(), watch)
    result = {"strategy": options.strategy, **found}
    if json:
        print_json(result)
        return
    screen().print(
        f"{network.name} with {options.strategy}, {_machines(options.workers)}: "
        f"{percent(result['accuracy'])} of the test images right, {result['virtual_seconds']:,.1f} virtual seconds, "
        f"{result['updates']:,} updates, {result['bytes_sent'] / 1e6:,.1f} MB sent, "
        f"{result['bytes_received'] / 1e6:,.1f} MB received",
        soft_wrap=True,
        markup=False,
    )
