"""`terrace train work`: a worker of a run, or a device that trains its own head. Needs the extra `learn`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import SecretStr, ValidationError

from models.kept.store import KeptStore
from terrace.commands.personal import train_head
from terrace.commands.processors import Processor
from terrace.commands.training import TeacherFile, TorchThreads
from terrace.console import print_json, screen
from terrace.options import Credentials, Data, Json, OtherDataset, on_command_line, token_from, with_options
from terrace.stoppable import run_stoppable
from tierkit import logs
from tierkit.access import TokenFile, invitation_of
from tierkit.documents import faults
from tierkit.extras import training_extra
from tierkit.settings import NodeSettings, lasting_name
from tierkit.wire.messages import checked_url
from tierkit.wire.runs import WorkerOffer
from training.worker.idle import CpuShare, NodeWatch, give_way, stand_back

__all__ = ["work"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enlisting:
    """Options of `terrace train work` for the address of the run and the worker's name."""

    host: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="URL of the run's host.", show_default=False),
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask this scheduler for the host instead of giving its URL; separate several by commas."
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
        typer.Option(help="Name of this worker; with a token, a name that the token allows. Default: the machine's."),
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
    device: Annotated[Processor, typer.Option(help="Processor to compute on.")] = Processor.CPU
    threads: TorchThreads = None
    patience_s: Annotated[float, typer.Option(min=0, metavar="S", help="How long the host may be away.")] = 120.0
    while_idle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Pause while the node on this machine serves that has this --ready-file.",
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
            help="Get the training images from the run instead of --data: this worker's own segments, or all.",
            show_default=False,
        ),
    ] = None
    cache: Annotated[Path, typer.Option(help="Folder for fetched images.", file_okay=False, metavar="DIRECTORY")] = (
        Path("~/.cache/terrace")
    )
    serve_data: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve fetched images to other workers of the run, at this address; port 0 for any.",
        ),
    ] = None
    data_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL at which other workers reach --serve-data. Default: its address."),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate of --serve-data, which then speaks https.", dir_okay=False)
    ] = None
    tls_key: Annotated[Path | None, typer.Option(help="Private key of --tls-cert.", dir_okay=False)] = None
    kept: Annotated[
        str | None,
        typer.Option(
            help="Train only on the pictures that an end node has kept: its folder of kept pictures on this "
            "machine, or the node's URL.",
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
        typer.Option(help="File with a token for the end node of --kept URL.", dir_okay=False, metavar="FILE"),
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


@with_options
def work(
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
        from training.worker.node import WorkerOptions, work as compute
    logs.configure("info", "text", node_id="work")

    def may_work() -> bool:
        return all(each.may_work() for each in (watch, share) if each is not None)

    if options.personal:
        assert options.kept is not None
        RunOptions(device=device, threads=threads).prepare()
        train_head(
            _device(enlisting, credentials, options), Path(options.kept), lambda: stand_back(may_work), json=json
        )
        return
    if options.kept is not None and options.kept_url is None:  # before the worker gets a seat
        KeptStore.reading(Path(options.kept)).close()
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
    done = run_stoppable(lambda: compute(worker))
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
