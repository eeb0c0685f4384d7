"""`terrace train`: training on many machines. Needs the extra `learn`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import SecretStr, ValidationError

from models.dataset import Dataset
from terrace.commands import train_release, train_runs
from terrace.commands.improve import improve
from terrace.commands.personal import train_head
from terrace.commands.processors import Processor
from terrace.commands.training import TorchThreads, say
from terrace.console import percent, print_json, progress_bars, screen
from terrace.options import Credentials, Data, Json, OtherDataset, on_command_line, token_from, with_options
from terrace.stoppable import interruptible, run_stoppable
from tierkit import logs
from tierkit.access import TokenFile, invitation_of
from tierkit.documents import faults
from tierkit.errors import InvalidInput, ServiceFailed, SetupError
from tierkit.extras import training_extra
from tierkit.plaintext import harmless
from tierkit.settings import NodeSettings, lasting_name
from tierkit.wire.messages import checked_url
from tierkit.wire.runs import WorkerOffer
from training.host.__main__ import run as host_command
from training.worker.idle import CpuShare, NodeWatch, give_way

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
        help="How updates become weights: fedavg, sgd, downpour, dc-constant, dc-adaptive, average, crowdsourced, "
        "bmuf, diloco, tournament, lbfgs; for ranks allreduce, elastic, gossip, ensemble, pipeline, hybrid, factors; "
        "or a TOML file.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="In place of the configuration's.")]
Wire = Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="Numbers of the updates.")]
TeacherFile = Annotated[
    Path | None,
    typer.Option(
        "--answers",
        metavar="FILE",
        help="Answers of the network's teacher, made by 'terrace models answers'.",
        dir_okay=False,
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="In place of the configuration's.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """Options of `terrace train run`."""

    strategy: StrategyName = "fedavg"
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that compute.")] = 4
    wire: Wire = "fp32"
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the run and the trained network; the same command goes on with it. Kept nowhere "
            "unless given.",
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
        from training.strategies.config import ExchangeConfig, TournamentConfig, find_strategy
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
    host |= {"until": options.until, "runs": options.runs}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlisting:
    """Options of `terrace train work` for the address of the run and the worker's name."""

    host: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Where the host of the run listens.", show_default=False),
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask this scheduler for the host, in place of URL; of several, all, comma-separated."
        ),
    ] = None
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Id of the run, with --scheduler. Default: the oldest that still wants workers."
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="Of this worker; with a token, one that the token is for. Default: the machine's."),
    ] = None

    def __post_init__(self) -> None:
        if (self.host is None) == (self.scheduler is None) or (self.run is not None and self.scheduler is None):
            raise typer.BadParameter("give the URL of the host, or --scheduler, with --run or without.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Working:
    """Options of `terrace train work` for the worker's processor and images."""

    answers: TeacherFile = None
    data: Data = None
    dataset: OtherDataset = None
    device: Annotated[Processor, typer.Option(help="What to compute on.")] = Processor.CPU
    threads: TorchThreads = None
    patience_s: Annotated[float, typer.Option(min=0, metavar="S", help="How long the host may be away.")] = 120.0
    while_idle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Stand back while the node of this machine serves that has written this --ready-file.",
            dir_okay=False,
        ),
    ] = None
    cores: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            metavar="SHARE",
            help="Use at most this share of a core. Default: 0.1 with --kept and --while-idle, otherwise no limit.",
            show_default=False,
        ),
    ] = None
    fetch: Annotated[
        Literal["own", "all"] | None,
        typer.Option(
            help="Get the training images from the run, in place of --data: this worker's own segments, or all.",
            show_default=False,
        ),
    ] = None
    cache: Annotated[Path, typer.Option(help="Folder for what is fetched.", file_okay=False, metavar="DIRECTORY")] = (
        Path("~/.cache/terrace")
    )
    serve_data: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Pass on to other workers of the run what is fetched, at this address; port 0 for any.",
        ),
    ] = None
    data_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Under which they reach it. Default: that address.")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate of --serve-data, which then speaks https.", dir_okay=False)
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.", dir_okay=False)] = None
    kept: Annotated[
        str | None,
        typer.Option(
            help="Train on the pictures that an end node has kept, and on no data set: its folder of kept pictures on "
            "this machine, or the node's URL.",
            metavar="DIRECTORY|URL",
        ),
    ] = None
    personal: Annotated[
        bool,
        typer.Option(
            "--personal",
            help="Join no run: with --scheduler and --kept, train this device's own head for the end network of the "
            "release in force. It stays on the device.",
        ),
    ] = False
    kept_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token that the end node of --kept URL knows.", dir_okay=False, metavar="FILE"),
    ] = None

    def __post_init__(self) -> None:
        if self.personal and (self.kept is None or self.kept_url is not None):
            raise typer.BadParameter("--personal goes with --kept: give the folder of the kept pictures.")
        if self.personal and self.device is not Processor.CPU:
            raise typer.BadParameter("--personal trains one layer, on the CPU: leave out --device.")
        if self.kept is not None and (self.dataset, self.fetch) != (None, None):
            raise typer.BadParameter(_KEPT_REPLACES)
        self._check_kept_url()
        if self.fetch is None and (self.serve_data is not None or self.data_url is not None):
            raise typer.BadParameter("--serve-data and --data-url are for what --fetch gets.")

    def _check_kept_url(self) -> None:
        if self.kept_url is None:
            if self.kept_token_file is not None:
                raise typer.BadParameter("--kept-token-file is for --kept with a URL.")
            return
        try:
            checked_url(self.kept_url)
        except ValueError as error:
            raise typer.BadParameter(f"the URL of --kept {error}, and this is {self.kept!r}") from error

    @property
    def kept_url(self) -> str | None:
        """The URL in `kept`; None without one."""
        return self.kept if self.kept is not None and self.kept.startswith(("http://", "https://")) else None


@app.command(name="work")
@with_options
def work_for(
    context: typer.Context, enlisting: Enlisting, credentials: Credentials, options: Working, json: Json = False
) -> None:
    """Compute for a run, from now to its end. The worker connects to the host, never the other way."""
    # The environment may name a data folder for other commands.
    if options.kept is not None and on_command_line(context, "data"):
        raise typer.BadParameter(_KEPT_REPLACES)
    if options.personal and (enlisting.scheduler is None or enlisting.run is not None):
        raise typer.BadParameter("--personal joins no run: give --scheduler, and neither a URL of a host nor --run.")
    watch = None if options.while_idle is None else NodeWatch(options.while_idle)
    cores = options.cores
    if cores is None and options.kept is not None and watch is not None:
        cores = _LEARNING_CORES
    share = None if cores is None else CpuShare(cores)
    threads, device = options.threads, options.device
    if watch is not None:
        threads = threads or 1
        give_way()  # before torch has threads
    with training_extra("training on the fleet", "learn"):
        from models.training.run import RunOptions
        from training.measuring import free_bytes, gflops
        from training.worker.finding import at, through
        from training.worker.kept_device import KeptDevice
        from training.worker.node import WorkerOptions, work
    logs.configure("info", "text", node_id="work")

    def may_work() -> bool:
        return all(each.may_work() for each in (watch, share) if each is not None)

    if options.personal:
        assert options.kept is not None
        RunOptions(device=device, threads=threads).prepare()
        train_head(_device(enlisting, credentials, options), Path(options.kept), may_work, json=json)
        return
    token = token_from(credentials.token_file)
    name = enlisting.name
    invited = None if token is None else invitation_of(token())
    if invited is not None:  # each name is a use of it, so the name stays
        name = name or f"{invited}-{lasting_name('work', 0)[-_LONGEST_OWN:].lstrip('-')}"
    name = name or lasting_name("work", os.getpid())
    if enlisting.host is not None:
        try:
            find_host = at(enlisting.host)
        except ValueError as error:
            raise typer.BadParameter(f"the URL {error}, and this is {enlisting.host!r}") from error
    else:
        RunOptions(device=device, threads=threads).prepare()
        try:
            offer = WorkerOffer(
                name=name,
                run=enlisting.run,
                gflops=gflops(device),
                memory_bytes=free_bytes(device),
                kept=options.kept is not None,
            )
        except ValidationError as error:
            raise typer.BadParameter(faults(error, WorkerOffer)) from error
        find_host = through(enlisting.scheduler or "", offer, token, credentials.tls_ca)
    kept: Path | KeptDevice | None = None if options.kept is None else Path(options.kept)
    if options.kept_url is not None:
        shown = None if options.kept_token_file is None else TokenFile(options.kept_token_file)
        kept = KeptDevice(url=options.kept_url.rstrip("/"), token=shown)
    worker = WorkerOptions(
        find_host=find_host,
        name=name,
        data=options.data,
        dataset=options.dataset,
        answers=options.answers,
        device=device,
        threads=threads,
        token=token,
        tls_ca=credentials.tls_ca,
        patience_s=options.patience_s,
        may_work=may_work,
        fetch=options.fetch,
        cache=options.cache,
        serve_data=None if options.serve_data is None else _address(options.serve_data),
        data_url=options.data_url,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        kept=kept,
    )
    done = run_stoppable(lambda: work(worker))
    if done is None:
        raise typer.Abort
    if json:
        print_json({"name": worker.name, "updates": done.updates, "faults": done.faults, "copied": done.copied})
        return
    screen().print(f"the run has ended: {done.updates:,} updates from here", markup=False)


def _device(enlisting: Enlisting, credentials: Credentials, options: Working) -> NodeSettings:
    """The device whose head is trained, as it asks the scheduler for networks."""
    token = token_from(credentials.token_file) if credentials.token_file is None else None
    try:
        return NodeSettings(
            scheduler=enlisting.scheduler,  # type: ignore[arg-type]  # of several, comma-separated
            token_file=credentials.token_file,
            token=None if token is None else SecretStr(token()),
            tls_ca=credentials.tls_ca,
            cache=options.cache,
        )
    except ValidationError as error:
        raise typer.BadParameter(faults(error, NodeSettings)) from error


def _machines(workers: int) -> str:
    return f"{workers} {'worker' if workers == 1 else 'workers'}"


_KEPT_REPLACES = "--kept replaces --data, --dataset and --fetch: leave them out."
_LEARNING_CORES = 0.1
"""Share of a core that learning takes on a device that serves."""
_LONGEST_OWN = 34
"""Length of the rest of a worker's name, of 63 characters; the name of an invitation has 28."""


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65_535):
        raise typer.BadParameter(f"--serve-data is HOST:PORT, such as 0.0.0.0:8075, and not {text!r}.")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Options of `terrace train simulate`."""

    strategy: StrategyName = "fedavg"
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Machines that compute.")] = 4
    config: Annotated[
        Path | None, typer.Option(help="Configuration; the bundled one of this name unless given.", dir_okay=False)
    ] = None
    wire: Wire = "fp32"
    epochs: Epochs = None
    seed: Seed = None
    answers: TeacherFile = None
    slow: Annotated[
        list[float] | None,
        typer.Option(min=0.01, metavar="FACTOR", help="A worker is so many times slower; may be repeated."),
    ] = None
    leave: Annotated[
        list[float] | None,
        typer.Option(min=0, metavar="S", help="A worker dies after so many seconds; may be repeated."),
    ] = None
    cheat: Annotated[
        Literal["sign-flip", "noise", "stale", "free-rider", "alie", "ipm"],
        typer.Option(help="What workers that cheat send in place of their updates."),
    ] = "sign-flip"
    cheaters: Annotated[int, typer.Option(min=0, help="How many workers cheat.")] = 0
    stay: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="S",
            help="Each worker dies after so many seconds on average; another one takes its place.",
        ),
    ] = None
    delay_ms: Annotated[float, typer.Option(min=0, help="Of the links between workers and host, one way.")] = 0.0
    mbps: Annotated[
        float | None, typer.Option(min=0.001, help="Megabits a second of each link; no limit unless given.")
    ] = None
    step_ms: Annotated[
        float | None, typer.Option(min=0.001, help="What a step takes a worker; measured here unless given.")
    ] = None
    serve_ms: Annotated[
        float | None, typer.Option(min=0, help="What an update takes the host; measured here unless given.")
    ] = None
    sync_ms: Annotated[float, typer.Option(min=0, help="What the host's disk takes to keep updates.")] = 0.0
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
        from training.strategies.config import ExchangeConfig, TournamentConfig, find_strategy
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
