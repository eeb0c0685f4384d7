"""Start one rank: `torchrun -m training.parallel`, or `terrace train run` for the ranks of one machine."""

from __future__ import annotations

import json as jsons
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkit import logs
from tierkit.commandline import Json, asked_wrongly, with_options
from tierkit.errors import DeadlineExceeded, TerraceError, Unavailable
from tierkit.extras import training_extra
from tierkit.orphan import die_with_parent
from tierkit.plaintext import harmless

if TYPE_CHECKING:
    from training.parallel.reporting import RankProgress

__all__ = ["main"]

log = logging.getLogger(__name__)

_SAY_S, _SHOW_S = 5.0, 0.1
"""Seconds between two lines for people, and for programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Options of one rank."""

    strategy: Annotated[
        str,
        typer.Option(
            help="allreduce, elastic, gossip, tournament, ensemble, pipeline, hybrid, factors, or a TOML file."
        ),
    ] = "allreduce"
    folder: Annotated[Path | None, typer.Option(help="Folder that keeps the run.", file_okay=False)] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="Replaces the configuration's.")] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Replaces the configuration's.")] = None
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets. Default: TERRACE_DATA.")] = None
    dataset: Annotated[str | None, typer.Option(help="Replaces the configuration's.")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda (each rank of a machine has its own GPU) or cuda:N.")] = "cpu"
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1
    patience_s: Annotated[float, typer.Option(min=1, metavar="S", help="Budget of each wait for others.")] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """Options for the scheduler that hears of the run."""

    scheduler: Annotated[str | None, typer.Option(metavar="URL", help="Scheduler that hears of the run.")] = None
    token_file: Annotated[Path | None, typer.Option(help="File with the token for the scheduler.")] = None
    tls_ca: Annotated[Path | None, typer.Option(help="Certificates (PEM) to trust.")] = None


@with_options
def rank(
    config: Annotated[str, typer.Argument(help="A bundled configuration, such as mnist-100, or a TOML file.")],
    flags: Flags,
    hearing: Hearing,
    json: Json = False,
) -> None:
    """Compute as one rank of a run. Its place comes from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; rank 0 prints
    the result. With --json, one object a line: progress, then the result."""
    with training_extra("training on the fleet", "learn"):
        from training.parallel.rank import RankOptions
        from training.parallel.reporting import ReportsTo
        from training.parallel.running import run_rank
    number = os.environ.get("RANK", "0")
    logs.configure("info", "text", node_id=f"rank-{number}")
    hears = None
    if hearing.scheduler is not None:
        urls = tuple(hearing.scheduler.split(","))
        hears = ReportsTo(urls=urls, token_file=hearing.token_file, tls_ca=hearing.tls_ca)
    options = RankOptions(network=config, scheduler=hears, **asdict(flags))
    result = run_rank(options, _teller(json) if number == "0" else lambda now: None)
    if result is not None:
        _print({"result": result} if json else result)


def _teller(json: bool) -> Callable[[RankProgress], None]:
    told_at = time.monotonic()

    def tell(now: RankProgress) -> None:
        nonlocal told_at
        if time.monotonic() - told_at < (_SHOW_S if json else _SAY_S):
            return
        told_at = time.monotonic()
        if json:
            _print({"progress": asdict(now)})
        else:
            log.info("step %d of %d, loss %.4g, %d ranks", now.step, now.steps, now.loss, now.ranks)

    return tell


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(jsons.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Exit code 2 where a person must act, 75 where another rank is missing and a later start may work, else 1."""
    die_with_parent()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or it shows its own stack for each rank that is lost
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(rank)
    try:
        app()
    except TerraceError as error:
        sys.stderr.write(harmless(f"terrace rank {os.environ.get('RANK', '?')}: {error}") + "\n")
        code = 2 if asked_wrongly(error) else 1
        sys.exit(os.EX_TEMPFAIL if isinstance(error, (Unavailable, DeadlineExceeded)) else code)
    except (MemoryError, RuntimeError) as error:
        from training.measuring import NO_MEMORY, lacks_memory

        if not lacks_memory(error):
            raise
        sys.stderr.write(f"terrace rank {os.environ.get('RANK', '?')}: {NO_MEMORY}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
