"""`terrace train`: training on many machines. Needs the extra `learn`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from models.dataset import Dataset
from terrace.commands import train_runs
from terrace.commands.processors import Processor
from terrace.commands.training import TorchThreads, say
from terrace.console import percent, print_json, progress_bars, screen
from terrace.options import Data, Json, OtherDataset, TlsCa, TokenFile, token_from
from terrace.stoppable import interruptible, run_stoppable
from tierkit import logs
from tierkit.access import invitation_of
from tierkit.documents import faults
from tierkit.errors import InvalidInput, ServiceFailed, SetupError
from tierkit.extras import training_extra
from tierkit.plaintext import harmless
from tierkit.settings import lasting_name
from tierkit.wire.runs import WorkerOffer
from training.host.__main__ import run as host_command
from training.worker.idle import NodeWatch, give_way

__all__ = ["app"]

app = typer.Typer(help="Training on many machines.", no_args_is_help=True)
app.add_typer(train_runs.app)


StrategyName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How updates become weights: fedavg, sgd, downpour, dc-constant, dc-adaptive, average, crowdsourced, "
        "bmuf, diloco, or a TOML file.",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="In place of the configuration's.")]
Wire = Annotated[Literal["fp32", "bf16", "int8"], typer.Option(help="Numbers of the updates.")]
Seed = Annotated[int | None, typer.Option(min=0, help="In place of the configuration's.")]


@app.command(name="run")
def run_local(
    config: Annotated[
        str, typer.Argument(help="A bundled configuration, such as mnist-100, or a TOML file.", show_default=False)
    ],
    strategy: StrategyName = "fedavg",
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that compute.")] = 4,
    wire: Wire = "fp32",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps the run and the trained network; the same command goes on with it. Kept nowhere "
            "unless given.",
            file_okay=False,
        ),
    ] = None,
    epochs: Epochs = None,
    seed: Seed = None,
    data: Data = None,
    dataset: OtherDataset = None,
    device: Annotated[Processor, typer.Option(help="What the workers compute on.")] = Processor.CPU,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")] = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show what host and workers log.")] = False,
    json: Json = False,
) -> None:
    """Train with a host and workers on this machine, each a process of its own."""
    with training_extra("training on the fleet", "learn"):
        from training.host.opening import find_network
        from training.local import LocalRun, run_here
        from training.strategies.config import find_strategy
    try:
        network, _ = find_network(config), find_strategy(strategy)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    images = {"data": data, "dataset": dataset}
    host: dict[str, Any] = {"network": config, "strategy": strategy, "workers": workers, "wire": wire, **images}
    host |= {"epochs": epochs, "seed": seed}
    if folder is not None:
        host["folder"] = folder
    notes = screen(stderr=True)

    def show(name: str, line: str) -> None:
        if verbose:
            notes.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)

    plan = LocalRun(host=host, worker={**images, "device": device, "threads": threads}, workers=workers, on_line=show)
    with progress_bars("step") as progress:
        bar = progress.add_task(network.name, total=None)
        try:
            result = run_stoppable(
                lambda: run_here(plan, lambda status: progress.update(bar, completed=status.done, total=status.steps))
            )
        except ServiceFailed as error:  # with the code of the process that could not go on
            typer.echo(harmless(f"terrace train run: {error}"), err=True)
            raise typer.Exit(max(1, error.code)) from error
    if result is None:
        raise typer.Abort
    if json:
        print_json(result)
        return
    screen().print(
        f"{result['network']} with {result['strategy']}, {workers} {'worker' if workers == 1 else 'workers'}: "
        f"{percent(result['accuracy'])} of the test images right, {result['seconds']:,.1f} s, "
        f"{result['updates']:,} updates, {result['bytes_sent'] / 1e6:,.1f} MB sent, "
        f"{result['bytes_received'] / 1e6:,.1f} MB received",
        soft_wrap=True,
        markup=False,
    )


app.command(name="host")(host_command)


@app.command(name="work")
def work_for(
    host: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Where the host of the run listens.", show_default=False),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask this scheduler for the host, in place of URL; of several, all, comma-separated."
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Id of the run, with --scheduler. Default: the oldest that still wants workers."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of this worker; with a token, one that the token is for. Default: the machine's."),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    data: Data = None,
    dataset: OtherDataset = None,
    device: Annotated[Processor, typer.Option(help="What to compute on.")] = Processor.CPU,
    threads: TorchThreads = None,
    patience_s: Annotated[float, typer.Option(min=0, metavar="S", help="How long the host may be away.")] = 120.0,
    while_idle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Stand back while the node of this machine serves that has written this --ready-file.",
            dir_okay=False,
        ),
    ] = None,
    fetch: Annotated[
        Literal["own", "all"] | None,
        typer.Option(
            help="Get the training images from the run, in place of --data: this worker's own segments, or all.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Folder for what is fetched.", file_okay=False, metavar="DIRECTORY")
    ] = Path("~/.cache/terrace"),
    serve_data: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Pass on to other workers of the run what is fetched, at this address; port 0 for any.",
        ),
    ] = None,
    data_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Under which they reach it. Default: that address.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate of --serve-data, which then speaks https.", dir_okay=False)
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.", dir_okay=False)] = None,
    json: Json = False,
) -> None:
    """Compute for a run, from now to its end. The worker connects to the host, never the other way."""
    watch = None if while_idle is None else NodeWatch(while_idle)
    if watch is not None:
        threads = threads or 1
        give_way()  # before torch has threads
    with training_extra("training on the fleet", "learn"):
        from models.training.run import RunOptions
        from training.worker.finding import at, through
        from training.worker.measuring import free_bytes, gflops
        from training.worker.node import WorkerOptions, work
    logs.configure("info", "text", node_id="work")
    if (host is None) == (scheduler is None) or (run is not None and scheduler is None):
        raise typer.BadParameter("give the URL of the host, or --scheduler, with --run or without.")
    if fetch is None and (serve_data is not None or data_url is not None):
        raise typer.BadParameter("--serve-data and --data-url are for what --fetch gets.")
    token = token_from(token_file)
    invited = None if token is None else invitation_of(token())
    if invited is not None:  # each name is a use of it, so the name stays
        name = name or f"{invited}-{lasting_name('work', 0)[-_LONGEST_OWN:].lstrip('-')}"
    name = name or lasting_name("work", os.getpid())
    if host is not None:
        try:
            find_host = at(host)
        except ValueError as error:
            raise typer.BadParameter(f"the URL {error}, and this is {host!r}") from error
    else:
        RunOptions(device=device, threads=threads).prepare()
        try:
            offer = WorkerOffer(name=name, run=run, gflops=gflops(device), memory_bytes=free_bytes(device))
        except ValidationError as error:
            raise typer.BadParameter(faults(error, WorkerOffer)) from error
        find_host = through(scheduler or "", offer, token, tls_ca)
    options = WorkerOptions(
        find_host=find_host,
        name=name,
        data=data,
        dataset=dataset,
        device=device,
        threads=threads,
        token=token,
        tls_ca=tls_ca,
        patience_s=patience_s,
        may_work=watch.may_work if watch is not None else lambda: True,
        fetch=fetch,
        cache=cache,
        serve_data=None if serve_data is None else _address(serve_data),
        data_url=data_url,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    done = run_stoppable(lambda: work(options))
    if done is None:
        raise typer.Abort
    if json:
        print_json({"name": options.name, "updates": done.updates, "faults": done.faults, "copied": done.copied})
        return
    screen().print(f"the run has ended: {done.updates:,} updates from here", markup=False)


_LONGEST_OWN = 34
"""What is left of 63 characters, of which the name of an invitation has 28."""


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65_535):
        raise typer.BadParameter(f"--serve-data is HOST:PORT, such as 0.0.0.0:8075, and not {text!r}.")
    return host.strip("[]"), int(port)


@app.command(name="simulate")
@interruptible
def simulate_run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Configuration of the network.", show_default=False)],
    strategy: StrategyName = "fedavg",
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Machines that compute.")] = 4,
    config: Annotated[
        Path | None, typer.Option(help="Configuration; the bundled one of this name unless given.", dir_okay=False)
    ] = None,
    wire: Wire = "fp32",
    epochs: Epochs = None,
    seed: Seed = None,
    slow: Annotated[
        list[float] | None,
        typer.Option(min=0.01, metavar="FACTOR", help="A worker is so many times slower; may be repeated."),
    ] = None,
    leave: Annotated[
        list[float] | None,
        typer.Option(min=0, metavar="S", help="A worker dies after so many seconds; may be repeated."),
    ] = None,
    cheat: Annotated[
        Literal["sign-flip", "noise", "stale", "free-rider", "alie", "ipm"],
        typer.Option(help="What workers that cheat send in place of their updates."),
    ] = "sign-flip",
    cheaters: Annotated[int, typer.Option(min=0, help="How many workers cheat.")] = 0,
    stay: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="S",
            help="Each worker dies after so many seconds on average; another one takes its place.",
        ),
    ] = None,
    delay_ms: Annotated[float, typer.Option(min=0, help="Of the links between workers and host, one way.")] = 0.0,
    mbps: Annotated[
        float | None, typer.Option(min=0.001, help="Megabits a second of each link; no limit unless given.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(min=0.001, help="What a step takes a worker; measured here unless given.")
    ] = None,
    serve_ms: Annotated[
        float | None, typer.Option(min=0, help="What an update takes the host; measured here unless given.")
    ] = None,
    sync_ms: Annotated[float, typer.Option(min=0, help="What the host's disk takes to keep updates.")] = 0.0,
    data: Data = None,
    dataset: OtherDataset = None,
    threads: TorchThreads = None,
    json: Json = False,
) -> None:
    """Train on virtual time: real gradients, and machines and links that are simulated."""
    with training_extra("training on the fleet", "learn"):
        import torch

        from models.training.config import find_config
        from training.simulation import Machines, read_images, run_simulation
        from training.strategies.config import find_strategy
        from training.virtual import Link
    if len(slow or []) + len(leave or []) > workers:
        raise typer.BadParameter(f"--slow and --leave speak of more than {workers} workers.")
    if cheaters > workers:
        raise typer.BadParameter(f"--cheaters speaks of more than {workers} workers.")
    if leave and stay is not None:
        raise typer.BadParameter("give --leave or --stay.")
    try:
        chosen, network = find_strategy(strategy), find_config(name, config)
    except (InvalidInput, SetupError) as error:
        raise typer.BadParameter(str(error)) from error
    changes = {"epochs": epochs, "seed": seed}
    network = network.model_copy(update={key: value for key, value in changes.items() if value is not None})
    machines = Machines(
        workers=workers,
        slow=slow or [],
        leave_after_s=leave or [],
        cheat=cheat,
        cheaters=cheaters,
        stays_s=stay,
        step_s=None if step_ms is None else step_ms / 1e3,
        serve_s=None if serve_ms is None else serve_ms / 1e3,
        sync_s=sync_ms / 1e3,
        link=Link(delay_s=delay_ms / 1e3, bytes_per_s=None if mbps is None else mbps * 1e6 / 8),
        wire=wire,
    )
    if threads is not None:
        torch.set_num_threads(threads)
    say("reading the images")
    images, test = read_images(network, Dataset.open(dataset or network.dataset, data))
    with progress_bars("step") as progress:
        bar = progress.add_task(network.name, total=None)
        result = {
            "strategy": strategy,
            **run_simulation(
                network,
                chosen,
                images,
                test,
                machines,
                lambda done, steps, now: progress.update(bar, completed=done, total=steps),
            ),
        }
    if json:
        print_json(result)
        return
    screen().print(
        f"{network.name} with {strategy}, {workers} {'worker' if workers == 1 else 'workers'}: "
        f"{percent(result['accuracy'])} of the test images right, {result['virtual_seconds']:,.1f} virtual seconds, "
        f"{result['updates']:,} updates, {result['bytes_sent'] / 1e6:,.1f} MB sent, "
        f"{result['bytes_received'] / 1e6:,.1f} MB received",
        soft_wrap=True,
        markup=False,
    )
