"""`terrace models fit` and `place`: networks that a machine can carry, and where to cut one between two machines."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.text import Text

from models.choosing import measure_ms
from models.fitting import WITHIN_MS, Capacity, Suitability, judge, left_out
from models.manifest import Manifest, load_manifest, weights_folder
from models.placing import Costing, PlacedCut, chosen_cut, measure_cuts, place
from models.session import import_runtime, verify_file
from terrace.commands.processors import Processor, within_cores
from terrace.commands.training import say
from terrace.console import Column, Listing, print_json, progress_bars, screen, tier_text
from terrace.options import Json, ModelSet, plain_name, with_options
from terrace.stoppable import interruptible
from tierkit.errors import NotFound
from tierkit.memory import free_bytes
from tierkit.types import Tier

__all__ = ["fit_networks", "place_layers"]

_STYLES = {"chosen": "green", "too large": "red", "too slow": "red", "fits": "", "left out": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """Options of `terrace models fit`."""

    models: ModelSet = None
    tier: Annotated[Tier | None, typer.Option(help="Only this tier. Default: each one.")] = None
    memory_mb: Annotated[
        float | None,
        typer.Option(
            "--memory-mb",
            min=1,
            max=1e9,
            help="Memory for a network. Default: the free memory here, within the limits of containers.",
        ),
    ] = None
    within_ms: Annotated[
        float | None,
        typer.Option(
            "--within-ms",
            min=0.001,
            max=1e9,
            help="Milliseconds for an image. Default: 100 for end and edge, any for the cloud.",
        ),
    ] = None
    provider: Annotated[Processor, typer.Option(help="Execution provider.")] = Processor.CPU
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            callback=within_cores,
            help="Cores for one network. Default: like a node, 1 at the end tier and otherwise all.",
        ),
    ] = None

    def capacity(self, tier: Tier) -> Capacity:
        """Return what this machine has for the network of a tier."""
        free = free_bytes() if self.memory_mb is None else int(self.memory_mb * 1e6)
        return Capacity(free_bytes=free, within_ms=WITHIN_MS[tier] if self.within_ms is None else self.within_ms)

    def cores(self, tier: Tier) -> int:
        """Return the cores that a node of a tier takes for one network."""
        return self.threads or (1 if tier is Tier.END else len(os.sched_getaffinity(0)))


@interruptible
@with_options
def fit_networks(options: MachineOptions, json: Json = False) -> None:
    """Propose a network for each tier that this machine can run, by memory, cores and speed."""
    import_runtime()
    manifest = load_manifest(options.models)
    tiers = [options.tier] if options.tier is not None else [Tier(tier) for tier in Tier if _has(manifest, tier)]
    judged = {tier: _judged(options, manifest, tier) for tier in tiers}
    left = [str(tier) for tier, each in judged.items() if all(one.outcome != "chosen" for one in each)]
    if json:
        print_json(
            [
                {
                    "tier": tier,
                    **asdict(options.capacity(tier)),
                    "cores": options.cores(tier),
                    "networks": list(map(asdict, each)),
                }
                for tier, each in judged.items()
            ]
        )
    else:
        _print_judged(judged)
    if left:
        noun = "tier" if len(left) == 1 else "tiers"
        say(
            f"no network of the {' and '.join(left)} {noun} suits this machine: import a smaller one with "
            "'terrace models import', or allow more with --memory-mb or --within-ms"
        )
        raise typer.Exit(1)


def _has(manifest: Manifest, tier: str) -> bool:
    return any(entry.tier == tier for entry in manifest.models)


def _judged(options: MachineOptions, manifest: Manifest, tier: Tier) -> list[Suitability]:
    try:
        candidates = manifest.candidates(tier, gpu=options.provider is Processor.CUDA)
    except NotFound as error:
        raise typer.BadParameter(str(error), param_hint="--tier") from error
    capacity, cores = options.capacity(tier), options.cores(tier)
    folder = options.models or weights_folder()
    fitting = {each.name for each in judge(candidates, capacity, {}) if each.outcome != "too large"}
    ms_per_image = {}
    for entry in candidates:
        if entry.name in fitting:
            say(f"measuring {entry.name}")
            ms_per_image[entry.name] = measure_ms(
                entry, folder, provider=options.provider, cores=cores, labels=manifest.labels(entry)
            )
    return [*judge(candidates, capacity, ms_per_image), *left_out(manifest.models, candidates)]


def _print_judged(judged: dict[Tier, list[Suitability]]) -> None:
    table = Listing(
        Column(title="tier", rank=2),
        Column(title="network"),
        Column(title="needs MB", rank=1, right=True),
        Column(title="ms/image", rank=1, right=True),
        Column(title="result"),
        Column(title="reason", rank=3),
    )
    for tier, networks in judged.items():
        for each in networks:
            table.add_row(
                tier_text(tier, tier),
                each.name,
                f"{each.needs_bytes / 1e6:,.0f}",
                "-" if each.ms_per_image is None else f"{each.ms_per_image:.3g}",
                Text(each.outcome, style=_STYLES[each.outcome]),
                each.reason,
            )
    screen().print(table, crop=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Options of `terrace models place` for two machines and the link between them."""

    device_ms: Annotated[
        float | None,
        typer.Option("--device-ms", min=0.001, max=1e9, help="Milliseconds of the whole network on the end device."),
    ] = None
    device_factor: Annotated[
        float | None,
        typer.Option(
            "--device-factor", min=0.001, max=1e9, help="Or its time as a multiple of this machine's; 1 by default."
        ),
    ] = None
    upstream_ms: Annotated[
        float | None,
        typer.Option(
            "--upstream-ms", min=0.001, max=1e9, help="Milliseconds of the whole network on the upstream node."
        ),
    ] = None
    upstream_factor: Annotated[
        float | None,
        typer.Option(
            "--upstream-factor", min=0.001, max=1e9, help="Or its time as a multiple of this machine's; 1 by default."
        ),
    ] = None
    most_bytes: Annotated[
        int | None,
        typer.Option("--most-bytes", min=1, max=2**31, help="Largest number of bytes to send for one image."),
    ] = None
    link_mbps: Annotated[
        float | None,
        typer.Option(
            "--link-mbps", min=0.000001, max=1e9, help="Speed of the link, Mbit/s. Default: sending takes no time."
        ),
    ] = None

    def check(self) -> None:
        """Refuse a speed that is given in both ways, and neither a limit nor a link."""
        for name in ("device", "upstream"):
            if getattr(self, f"{name}_ms") is not None and getattr(self, f"{name}_factor") is not None:
                raise typer.BadParameter(f"give --{name}-ms or --{name}-factor, not both", param_hint=f"--{name}-ms")
        if self.most_bytes is None and self.link_mbps is None:
            raise typer.BadParameter("give a limit (--most-bytes), the link (--link-mbps), or both")

    def costing(self, here_ms: float) -> Costing:
        """Return the costs of the two machines.

        Args:
            here_ms: Milliseconds of the whole network on this machine.
        """
        return Costing(
            device_factor=_factor(self.device_ms, self.device_factor, here_ms),
            upstream_factor=_factor(self.upstream_ms, self.upstream_factor, here_ms),
            most_bytes=self.most_bytes,
            link_mbps=self.link_mbps,
        )


def _factor(ms: float | None, factor: float | None, here_ms: float) -> float:
    return ms / here_ms if ms is not None else factor or 1.0


@interruptible
@with_options
def place_layers(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the network.", show_default=False, callback=plain_name)
    ],
    *,
    devices: Devices,
    models: ModelSet = None,
    json: Json = False,
) -> None:
    """Choose the layers of a network that run on an end device, under a limit of transmitted bytes."""
    devices.check()
    folder = models or weights_folder()
    try:
        entry = load_manifest(folder).entry(name)
    except NotFound as error:
        raise typer.BadParameter(f"{error}.") from error
    content = verify_file(entry, folder).read_bytes()
    with progress_bars("cut") as progress:
        bar = progress.add_task(f"measuring {name}", total=None)
        cuts = measure_cuts(
            content, entry.file, entry.input_shape, lambda done, of: progress.update(bar, completed=done, total=of)
        )
    costing = devices.costing(cuts[0].above_ms)
    placements = place(cuts, costing)
    chosen = chosen_cut(placements)
    if json:
        print_json({"network": name, **asdict(costing), "cuts": [asdict(each) for each in placements]})
        return
    _print_placements(placements, linked=costing.link_mbps is not None)
    layers = "layer" if chosen.layers == 1 else f"{chosen.layers} layers"
    below = f"the first {layers}" if chosen.layers else "nothing"
    screen().print(f"on the device: {below}; sent: {chosen.size_bytes:,} bytes of {chosen.tensor}", markup=False)


def _print_placements(placements: list[PlacedCut], *, linked: bool) -> None:
    numbers = ["layers below", "ms below", "bytes", "ms sent", "ms above", "ms in all"]
    table = Listing(
        Column(title=""),
        Column(title="cut after", rank=1),
        *(Column(title=title, right=True) for title in numbers),
        *([Column(title="most ms below", rank=2, right=True)] if linked else []),
    )
    for each in placements:
        table.add_row(
            Text("chosen", style="green")
            if each.chosen
            else ""
            if each.allowed
            else Text("too many bytes", style="red"),
            each.tensor,
            str(each.layers),
            f"{each.below_ms:.3f}",
            f"{each.size_bytes:,}",
            f"{each.send_ms:.3f}",
            f"{each.above_ms:.3f}",
            f"{each.total_ms:.3f}",
            *([f"{each.most_below_ms:.3f}"] if linked else []),
        )
    screen().print(table, crop=False)
