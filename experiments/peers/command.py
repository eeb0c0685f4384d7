"""`terrace experiment peers`: install, measure, write records, print the tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments.pages import fill
from experiments.peers import duel as duels
from experiments.peers.comparison import Comparison, compare, install
from experiments.peers.contenders import CONTENDERS, TERRACE, Contender, choose
from experiments.peers.environments import default_folder
from experiments.peers.measuring import Cores
from experiments.peers.processes import check_cores
from experiments.peers.rows import Timing, rows_for
from experiments.peers.table import EXPERIMENT, Record, as_markdown, newest_records, rows as rows_of
from experiments.record import made_folder
from models.manifest import load_manifest, weights_folder
from tierkit.commandline import Json
from tierkit.errors import InvalidInput, SetupError

__all__ = ["run"]

_DUEL_ROUNDS = 40
_QUICK = Timing(rounds=1, window_s=1.5, warmup_s=0.3, bare_s=0.3)
_INTERRUPTED = 130


def run(
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"Measure this one alone; may be repeated: {', '.join(c.name for c in CONTENDERS)}."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One short round, to see that everything works.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=100, help="Rounds; a figure is their median. Default: 3.")
    ] = None,
    duel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Terrace and this server alone, in windows of a second that take turns, for differences smaller than "
            f"the machine's drift. --rounds: windows of each; default: {_DUEL_ROUNDS}.",
        ),
    ] = None,
    venvs: Annotated[
        Path | None, typer.Option(help="Where the environments lie. Default: ~/.cache/terrace/peers.", file_okay=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the records and tables.", file_okay=False)] = Path("runs/peers"),
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of the networks. Default: those that come with Terrace.", file_okay=False),
    ] = None,
    server_core: Annotated[int, typer.Option(min=0, help="Core of the servers and of the bare loop.")] = 0,
    load_core: Annotated[int, typer.Option(min=0, help="Core of the load generator.")] = 1,
    install_only: Annotated[bool, typer.Option("--install-only", help="Make the environments and stop.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Measure nothing: print the tables of the records in --out.")
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Put the tables into this page as well, such as docs/performance.md.")
    ] = None,
    large: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Network that Terrace alone serves, beside the bare loop. Default: the edge's."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Terrace's node beside other servers, one core for each side, interleaved with a bare ONNX Runtime loop.

    Ctrl-C keeps what was measured. The tables are made of the newest record of each server in --out, so a server
    can be measured again alone.
    """
    if report:
        if not (records := newest_records(out)) and not duels.newest_records(out):
            raise InvalidInput(f"no records in {out}; name their folder with --out")
        _print(records, duels.newest_records(out), page, as_json=as_json)
        return
    contenders = choose(only or [])
    cores = Cores(server=server_core, load=load_core)
    check_cores(cores.server, cores.load)
    folder = weights or weights_folder()
    manifest = load_manifest(folder)
    if duel is not None:
        comparison = Comparison(manifest.default_for("end"), folder, [TERRACE, _peer(duel)], rows_for(everything=True))
        made_folder(out)
        pythons, failures = install(comparison.contenders, (venvs or default_folder()).resolve(), _announce)
        if failures:
            raise SetupError("; ".join(failures.values()))
        if not install_only:
            number = 2 if quick else rounds or _DUEL_ROUNDS
            record = duels.duel(comparison, number, cores=cores, pythons=pythons, announce=_announce)
            path = record.write(out)
            _announce(f"wrote {path}")
            told = [json.loads(path.read_text())] if as_json else duels.newest_records(out)
            _print([], told, page, as_json=as_json)
        return
    timing = _QUICK if quick else Timing()
    if rounds is not None:
        timing = Timing(rounds=rounds, window_s=timing.window_s, warmup_s=timing.warmup_s, bare_s=timing.bare_s)
    comparisons = [Comparison(manifest.default_for("end"), folder, contenders, rows_for(everything=True))]
    if TERRACE in contenders:
        entry = manifest.entry(large) if large else manifest.default_for("edge")
        comparisons.append(Comparison(entry, folder, [TERRACE], rows_for(everything=False)))
    made_folder(out)
    pythons, failures = install(contenders, (venvs or default_folder()).resolve(), _announce)
    for comparison in comparisons:
        comparison.failures.update(failures)
    interrupted = False
    try:
        if not install_only:
            compare(comparisons, timing, cores, pythons, _announce)
    except KeyboardInterrupt:
        interrupted = True
        _announce("stopped; what was measured is kept")
    finally:
        for comparison in comparisons:
            for record in comparison.records(timing, cores, pythons):
                _announce(f"wrote {record.write(out)}")
    if records := newest_records(out):
        _print(records, [] if as_json else duels.newest_records(out), page, as_json=as_json)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)


def _peer(name: str) -> Contender:
    (peer,) = choose([name])
    if peer is TERRACE:
        raise InvalidInput(f"a duel is with another server than {name!r}")
    return peer


def _print(records: Sequence[Record], pairs: Sequence[Record], page: Path | None, *, as_json: bool) -> None:
    parts = []
    if records:
        parts.append((EXPERIMENT, as_markdown(records, pairs)))
    if pairs:
        parts.append((duels.NAME, duels.as_markdown(pairs)))
    for name, tables in parts:
        if page is not None:
            fill(page, name, tables)
    if as_json:
        found = [row for record in records for row in rows_of(record)] + [
            row for pair in pairs for row in duels.rows(pair)
        ]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write("".join(tables for _, tables in parts))


def _announce(what: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%SZ', time.gmtime())}  {what}\n")
