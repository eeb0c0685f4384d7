"""`terrace train`: training on many machines. Needs the extra `learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from models.dataset import Dataset
from terrace.commands.training import TorchThreads, say
from terrace.console import percent, print_json, progress_bars, screen
from terrace.options import Data, Json, OtherDataset, training_extra
from terrace.stoppable import interruptible
from tierkit.errors import InvalidInput, SetupError

__all__ = ["app"]

app = typer.Typer(help="Training on many machines.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `simulate` a subcommand, although it is the only one."""


@app.command(name="simulate")
@interruptible
def simulate_run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Configuration of the network.", show_default=False)],
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How updates become weights: sgd, downpour, dc-constant, dc-adaptive, average, fedavg, bmuf, diloco, "
            "or a TOML file.",
        ),
    ] = "downpour",
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="Machines that compute.")] = 4,
    config: Annotated[
        Path | None, typer.Option(help="Configuration; the bundled one of this name unless given.", dir_okay=False)
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="In place of the configuration's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="In place of the configuration's.")] = None,
    slow: Annotated[
        list[float] | None,
        typer.Option(min=0.01, metavar="FACTOR", help="A worker is so many times slower; may be repeated."),
    ] = None,
    leave: Annotated[
        list[float] | None,
        typer.Option(min=0, metavar="S", help="A worker dies after so many seconds; may be repeated."),
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
        step_s=None if step_ms is None else step_ms / 1e3,
        serve_s=None if serve_ms is None else serve_ms / 1e3,
        link=Link(delay_s=delay_ms / 1e3, bytes_per_s=None if mbps is None else mbps * 1e6 / 8),
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
