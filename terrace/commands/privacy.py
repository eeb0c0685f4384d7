"""`terrace privacy`: what the encoders give away, measured, and how learned ones are made. Needs the extra `train`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID

from encryption.audit.kept import KeptAudit, keep_audit
from encryption.audit.rows import PROVEN_SSIM, Row, Subject, strongest
from experiments.harness import Table
from experiments.pages import fill, place_in
from experiments.record import RunRecord
from models.dataset import CIFAR100, Dataset
from models.manifest import EncoderEntry, Manifest, ModelEntry, load_manifest, weights_folder
from terrace.commands.privacy_training import export, front, train
from terrace.commands.training import TorchThreads
from terrace.console import Column, Listing, percent, print_json, progress_bars, screen
from terrace.options import Data, DatasetName, Json, ModelSet, with_options
from terrace.stoppable import interruptible
from tierkit.atomic import made_folder
from tierkit.extras import training_extra
from tierkit.types import EncoderKind, Privacy

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure how much of the pictures an encoder gives away; train an encoder.",
)

_EXPERIMENT = "privacy-audit"
_SHOWN = 12
_THOROUGH = 1_000_000
"""About twice as many pictures as the adversaries saw that the bundled encoders were trained against."""
_PIXELS, _UINT8, _FLOAT32 = "pixels", "uint8", "float32"
_FORMS = (_UINT8, "float16", _FLOAT32)


app.command()(train)
app.command()(export)
app.command()(front)


def _one_of(names: Iterable[str], what: str, given: str) -> str:
    """`given`, or an error that names the nearest of `names`."""
    names = list(names)
    if given in names:
        return given
    near = difflib.get_close_matches(given, names, n=1)
    guess = f": did you mean '{near[0]}'?" if near else "."
    raise typer.BadParameter(f"there is no {what} {given!r}{guess} There is: {', '.join(names)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Options of `terrace privacy audit`."""

    encoder: Annotated[
        str | None, typer.Option(metavar="KIND", help="none (pixels), conv1 or bottleneck.", show_default=False)
    ] = None
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Network whose encoder is attacked. Default: the first that has one.",
            show_default=False,
        ),
    ] = None
    form: Annotated[
        str | None, typer.Option(metavar="FORM", help="uint8 (the default of jobs), float16 or float32.")
    ] = None
    all_: Annotated[bool, typer.Option("--all", help="Every encoder of the manifest, conv1 in two forms.")] = False
    images: Annotated[int, typer.Option(min=8, max=10_000, help="Test images to attack.")] = 200
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for record, table and pictures. Default: runs/privacy-TIME. The dashboard shows SET/privacy.",
            file_okay=False,
        ),
    ] = None
    page: Annotated[
        Path | None, typer.Option(help="Markdown page whose table is rewritten.", dir_okay=False, show_default=False)
    ] = None
    queries: Annotated[
        int, typer.Option(min=1, help="Pictures that a learned attack may send through the encoder; --quick has fewer.")
    ] = 100_000
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help=f"{_THOROUGH:,} queries, even with --queries. With --all, this takes an hour."),
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0
    quick: Annotated[bool, typer.Option("--quick", help="Weak attackers, to check that it works.")] = False
    threads: TorchThreads = None
    data: Data = None
    dataset: DatasetName = CIFAR100
    models: ModelSet = None

    def __post_init__(self) -> None:
        if self.thorough and self.quick:
            raise typer.BadParameter("--quick and --thorough contradict each other.")


@app.command()
@interruptible
@with_options
def audit(options: AuditOptions, json: Json = False) -> None:
    """Attack encoders, and show how much of the pictures the attacks recover."""
    folder = options.models or weights_folder()
    manifest = load_manifest(folder)
    subjects = _subjects(manifest, options.encoder, options.network, options.form, everything=options.all_)
    attacked = _of_one_size([subject.network for subject in subjects])
    with training_extra("attacking an encoder"):
        import torch

        from encryption.audit.run import Budget, run_audit
        from encryption.audit.sheet import draw_sheet

    source = Dataset.open(options.dataset, options.data, hierarchy=manifest.hierarchy)
    manifest.check_hierarchy(source.hierarchy)
    train, test = source.decoded_for(attacked, "train"), source.decoded_for(attacked, "test")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # First, so that an hour of attacks is not lost because the folder cannot be written to.
    place = made_folder(options.out or Path("runs") / f"privacy-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}")
    if options.page is not None:
        place_in(options.page, _EXPERIMENT)
    queries = _THOROUGH if options.thorough else options.queries
    budget = Budget.quick(options.images) if options.quick else Budget.standard(options.images, queries)
    with progress_bars("step") as progress:
        bars: dict[str, TaskID] = {}

        def tell(what: str, done: int, of: int) -> None:
            if what not in bars:
                for bar in bars.values():
                    progress.update(bar, visible=False)
                bars[what] = progress.add_task(what, total=of)
            progress.update(bars[what], completed=done, total=of)

        found = run_audit(subjects, manifest, folder, train, test, budget, seed=options.seed, tell=tell)
    rows = [asdict(row) for row in found.rows]
    record = RunRecord(
        experiment=_EXPERIMENT,
        config={
            "budget": asdict(budget),
            "quick": options.quick,
            "data": source.name,
            "threads": torch.get_num_threads(),
        },
        samples={},
        results={"rows": rows},
        seed=options.seed,
    )
    written = record.write(place)
    table = _table(found.rows)
    kept = KeptAudit(
        measured_at=datetime.fromisoformat(record.measured_at),
        quick=options.quick,
        heads={entry.name: entry.head.sha256 for entry in manifest.encoders if _attacked(entry, found.rows)},
        rows=found.rows,
    )
    keep_audit(place, kept, found.originals, found.reconstructions)
    (place / "table.md").write_text(table.markdown(), encoding="utf-8")
    labels = [_label(row) for row in found.rows]
    strips = zip(labels, found.reconstructions, strict=True)
    sheet = place / "reconstructions.png"
    shown = [(label, pictures[:_SHOWN]) for label, pictures in strips if "\npixels" not in label]
    draw_sheet([("what was photographed", found.originals[:_SHOWN]), *shown], sheet)
    if options.page is not None:
        fill(options.page, _EXPERIMENT, table.markdown())
    if json:
        print_json(rows)
        return
    _show(found.rows)
    for path in (written, place / "table.md", sheet):
        screen().print(str(path), style="dim", markup=False, soft_wrap=True)


def _attacked(entry: EncoderEntry, rows: Iterable[Row]) -> bool:
    return any((row.network, row.encoder) == (entry.network, entry.kind) for row in rows)


def _subjects(
    manifest: Manifest, encoder: str | None, network: str | None, form: str | None, *, everything: bool
) -> list[Subject]:
    if everything:
        if encoder or network or form:
            raise typer.BadParameter("--all is everything: name no encoder, network or form with it.")
        if not manifest.encoders:
            raise typer.BadParameter(_no_encoder("any kind"))
        fine = [entry for entry in manifest.models if entry.target == "fine"]
        subjects = [Subject(kind=None, network=entry, form=_PIXELS) for entry in fine]
        for entry in sorted(manifest.encoders, key=lambda each: each.kind is not EncoderKind.CONV1):
            forms = (_FLOAT32, _UINT8) if entry.kind is EncoderKind.CONV1 else (_UINT8,)
            subjects += [Subject(kind=entry.kind, network=manifest.entry(entry.network), form=each) for each in forms]
        return subjects
    if encoder is None:
        raise typer.BadParameter("name what to attack with --encoder, or say --all.")
    _one_of([Privacy.NONE, *EncoderKind], "encoder", encoder)
    kind = None if encoder == Privacy.NONE else EncoderKind(encoder)
    chosen = _network(manifest, kind, network)
    if kind is None:
        if form is not None:
            raise typer.BadParameter("pixels have no form: --form is for features.")
        return [Subject(kind=None, network=chosen, form=_PIXELS)]
    subject = Subject(kind=kind, network=chosen, form=_one_of(_FORMS, "form", form or _UINT8))
    if kind is EncoderKind.CONV1:
        return [subject]
    # What an attack cannot do to a first convolution says nothing about anything else.
    proof = Subject(kind=EncoderKind.CONV1, network=chosen, form=_UINT8)
    return [proof, subject]


def _network(manifest: Manifest, kind: EncoderKind | None, name: str | None) -> ModelEntry:
    if kind is None:
        able = [entry.name for entry in manifest.models if entry.target == "fine"]
    else:
        able = [entry.network for entry in manifest.encoders if entry.kind == kind]
    if not able:
        raise typer.BadParameter(_no_encoder(f"the kind '{kind}'"))
    what = "fine answer" if kind is None else f"encoder {kind}"
    return manifest.entry(_one_of(able, f"{what} of the network", name or able[0]))


def _no_encoder(kind: str) -> str:
    return (
        f"the model set has no encoder of {kind}: 'terrace models cut-encoder --models SET --out SET --dataset "
        f"PICTURES' makes one of the kind '{EncoderKind.CONV1}'."
    )


def _of_one_size(networks: Sequence[ModelEntry]) -> ModelEntry:
    """Return the first network if all take pictures in the same way: they are attacked on the same pixels."""
    if len({network.fit for network in networks}) > 1:
        names = ", ".join(dict.fromkeys(network.name for network in networks))
        raise typer.BadParameter(
            f"{names} take pictures of different sizes or by different rules: audit one at a time, with --network."
        )
    return networks[0]


def _table(rows: Sequence[Row]) -> Table:
    """Return the rows for a page."""
    return Table(
        headings="encoder | network | form | attack | SSIM | PSNR | recognised | fine | lost | bytes | ms | counts",
        rows=[_cells(row, rows) for row in rows],
    )


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    return [
        row.encoder,
        row.network,
        row.form,
        row.attack,
        f"{row.ssim:.3f}",
        "same" if row.psnr_db is None else f"{row.psnr_db:.1f} dB",
        f"{percent(row.recognised)} ({100 * row.recognised_low:.0f} to {100 * row.recognised_high:.0f})",
        percent(row.fine_accuracy),
        f"{100 * row.accuracy_lost:z.1f}",
        f"{row.payload_bytes:,.0f}",
        f"{row.device_ms_per_image:.2f}",
        "yes" if row.counts else "no",
    ]


def _label(row: Row) -> str:
    return f"{row.encoder} {row.network}\n{row.form}, {row.attack}\nSSIM {row.ssim:.2f}"


def _show(rows: Sequence[Row]) -> None:
    table = _table(rows)
    ranks = {
        "network": 3,
        "form": 2,
        "PSNR": 4,
        "recognised": 5,
        "fine": 6,
        "lost": 3,
        "ms": 7,
        "bytes": 6,
        "counts": 1,
    }
    words = ("encoder", "network", "form", "attack", "counts")
    listing = Listing(
        *(Column(title=title, rank=ranks.get(title, 0), right=title not in words) for title in table.columns)
    )
    for cells in table.rows:
        listing.add_row(*cells)
    out = screen()
    out.print(listing)
    for encoder, network in dict.fromkeys((row.encoder, row.network) for row in rows if row.encoder != Privacy.NONE):
        worst, seen = (strongest(rows, encoder, network, by=rank) for rank in ("ssim", "recognised"))
        out.print(
            f"[bold]{encoder} of {network}[/bold]: {worst.attack} gets most, SSIM {worst.ssim:.2f}; "
            f"{seen.judge} recognises {percent(seen.recognised)} of what {seen.attack} gives, "
            f"{percent(seen.recognised_originals)} of the originals",
            soft_wrap=True,
        )
    if not all(row.counts for row in rows):
        out.print(
            f"[yellow]note[/yellow]  an attack that did not get to SSIM {PROVEN_SSIM:g} against the same network's "
            "conv1 says nothing where it fails: it does not count",
            soft_wrap=True,
        )
