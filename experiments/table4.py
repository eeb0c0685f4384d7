"""Table 4 of the paper: the extra time of a task when features go up instead of pixels, against the latency.

One node of each tier gets one task of 50 images at a time (window 1), through the scheduler like any job. The time of a
task is the time of its upper stage, from the coarse to the fine answer as the scheduler sees them. Its overhead is the
time that an encoder adds, split as in the paper's Eq. 8. Encoding is the time of the head that the encoding node
reports, packing included. Communication is all the rest: more bytes on the links, their compression and digests, and
the extra HTTP hop of an edge node that encodes.

A device encodes for the cloud or for an edge node; or a trusted edge node encodes for the cloud. With `encode_on=auto`
the scheduler chooses between the device and the edge node for each task, by its measurements. The latency that is
varied belongs to the way to the upstream node. If an edge node encodes, this way begins at that node, and the hop to it
has no latency, so the whole way is as long as without the encoder. A bandwidth applies to every link of the way.

If the profile has a speed for a tier, its heads are emulated as well. They take longer than on this machine by the same
factor as the tier's own network (`slowness`), about 85 for the paper's end device. The paper's figures include the
slowness of its software, so that is a high factor for a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from experiments.emulation.links import LinkSpec
from experiments.harness import MOST_TASKS, Experiment, Options, Record, Run, Table, option
from experiments.plots import Figures, bound, measured, paper
from experiments.profile import Profile
from experiments.record import spread
from experiments.testbed import BATCH, Encoding, Network, check_fleet, head_ms_per_image
from models.manifest import EncoderEntry, Manifest, load_manifest
from tierkit.client import AsyncClient, CoarseAnswer, FallbackResults, FineAnswer, FineResults
from tierkit.errors import InvalidInput, UpstreamError
from tierkit.types import EncodeOn, EncoderKind, FeatureForm, Privacy, Scheme, Tier

__all__ = ["PAPER", "TABLE4", "encoders_of", "links_of", "machines_of", "turns_of"]

PAPER: Mapping[tuple[str, float], float] = {
    ("end", 0.5): 0.571,
    ("end", 1.0): 0.332,
    ("end", 1.5): 0.247,
    ("end", 2.0): 0.179,
    ("edge", 0.5): 0.440,
    ("edge", 1.0): 0.272,
    ("edge", 1.5): 0.206,
    ("edge", 2.0): 0.159,
}
"""The paper's Table 4, encoding for the cloud: the overhead as a share of the time without encoder, by the tier that
encodes, and the latency in seconds."""

_LEAST_MBPS = 0.01
_LATENCIES_S = (0.5, 1.0, 1.5, 2.0)
_BANDWIDTHS_MBPS: tuple[float | None, ...] = (None, 100.0, 10.0)

_JOB_BUDGET_S = 900.0
_ENCODE: Mapping[EncodeOn | None, tuple[str | None, ...]] = {
    None: (None,),
    EncodeOn.END: ("end-1",),
    EncodeOn.EDGE: ("edge-1",),
    EncodeOn.AUTO: ("end-1", "edge-1"),
}
"""The nodes that may encode."""
_SCHEMES = {Tier.EDGE: Scheme.END_EDGE, Tier.CLOUD: Scheme.END_CLOUD}
_PIXELS = "pixels"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Way of images to the upstream node of a fleet."""

    upper: Tier
    encode_on: EncodeOn | None
    """Node that encodes; None to send pixels."""

    def __str__(self) -> str:
        return f"pixels to the {self.upper}" if self.encode_on is None else f"{self.encode_on} to {self.upper}"

    @property
    def warm_up(self) -> int:
        """Tasks that do not count: the first opens the connections, and loads head and tail. `auto` does that twice,
        and measures both places before it chooses."""
        return 4 if self.encode_on is EncodeOn.AUTO else 1


_WAYS = {
    Tier.CLOUD: tuple(_Way(upper=Tier.CLOUD, encode_on=on) for on in (None, *EncodeOn)),
    Tier.EDGE: tuple(_Way(upper=Tier.EDGE, encode_on=on) for on in (None, EncodeOn.END)),
}
"""Ways by upper tier; each has a separate fleet."""
_MOST_WARM_UP = max(way.warm_up for ways in _WAYS.values() for way in ways)


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """The encoder, the links, and how much is measured."""

    encoder: EncoderKind = option(EncoderKind.CONV1, "Encoder whose features are sent.")
    form: FeatureForm = option(FeatureForm.UINT8, "Number format of the features.")
    latency: list[float] | None = option(
        None,
        "Seconds to the upstream node and back; may be repeated. Default: 0.5, 1, 1.5, 2; 0.5, 2 with --quick.",
        min=0,
        max=60,
    )
    bandwidth: list[float] | None = option(
        None,
        "Mbit/s of every link, 0.01 at least, or 0: the profile's; may be repeated. Default: 0, 100, 10.",
        min=0,
        max=1_000_000,
    )
    tasks: int = option(5, "Tasks of each cell.", quick=2, min=1, max=MOST_TASKS)


def encoders_of(kind: EncoderKind, manifest: Manifest) -> dict[Tier, EncoderEntry]:
    """Find the encoder of this kind for each upper tier's own network. If the cloud's network has none, the cloud
    serves the edge node's.

    Raises:
        InvalidInput: neither has one.
    """
    known = {encoder.network: encoder for encoder in manifest.encoders if encoder.kind is kind}
    own = {tier: manifest.default_for(tier).name for tier in (Tier.CLOUD, Tier.EDGE)}
    found = {tier: known[name] for tier, name in own.items() if name in known}
    if not found:
        have = ", ".join(sorted({encoder.kind for encoder in manifest.encoders})) or "none"
        raise InvalidInput(f"there is no encoder of the kind {kind} for {' or '.join(own.values())}; there is {have}")
    return {Tier.CLOUD: next(iter(found.values())), **found}


def links_of(
    latencies_s: Sequence[float] | None, bandwidths_mbps: Sequence[float | None] | None, *, quick: bool
) -> list[tuple[float, float | None]]:
    """Latency and bandwidth of each cell. The default for quick runs is the shortest and the longest latency without a
    limit, and only the shortest with a limit, because limits matter most there.

    Raises:
        InvalidInput: one of them is not a finite number.
    """
    pairs = list(product(latencies_s or _LATENCIES_S, bandwidths_mbps or _BANDWIDTHS_MBPS))
    if not all(math.isfinite(number) for pair in pairs for number in pair if number is not None):
        raise InvalidInput("latencies and bandwidths are finite numbers")
    if quick and not latencies_s and not bandwidths_mbps:
        shown = {(_LATENCIES_S[-1], None), *((_LATENCIES_S[0], mbps) for mbps in _BANDWIDTHS_MBPS)}
        pairs = [pair for pair in pairs if pair in shown]
    return pairs


def turns_of(
    profile: Profile, links: Sequence[tuple[float, float | None]], uppers: Iterable[Tier]
) -> list[tuple[Tier, float, float | None]]:
    """Upper tier, latency and limit of each cell; where no limit is named, the profile's own on the way there."""

    def own(upper: Tier) -> float | None:
        bps = profile.path.get(f"end-{upper}", LinkSpec()).bandwidth_bps
        return None if bps is None else bps / 1e6

    return list(
        dict.fromkeys(
            (upper, latency_s, own(upper) if mbps is None else mbps) for latency_s, mbps in links for upper in uppers
        )
    )


def machines_of(profile: Profile, upper: Tier, latency_s: float, mbps: float | None) -> Profile:
    """Return a profile with one node of each tier that takes part, and with this latency to the upper node and back."""
    limited = {} if mbps is None else {"bandwidth_bps": mbps * 1e6}
    far = {"delay_s": latency_s / 2, "jitter_s": 0.0, **limited}
    near = {"delay_s": 0.0, "jitter_s": 0.0, **limited}

    def link(path: str, change: Mapping[str, float]) -> LinkSpec:
        return profile.path.get(path, LinkSpec()).model_copy(update=dict(change))

    if upper is Tier.EDGE:
        path = {"end-edge": link("end-edge", far)}
    else:
        way = link("end-cloud", far)
        path = {"end-cloud": way, "edge-cloud": way, "end-edge": link("end-edge", near)}
    return profile.with_nodes(end=1, edge=1, cloud=int(upper is Tier.CLOUD)).model_copy(update={"path": path})


async def _one_job(
    client: AsyncClient, run: Run, way: _Way, kind: EncoderKind, form: FeatureForm, tasks: int
) -> dict[str, Any]:
    """Run one job. Return the milliseconds that each task took in its upper stage and in the head, its bytes, and the
    node that encoded it.
    """
    tasks += way.warm_up
    images = run.images.take(np.arange(tasks * BATCH) % len(run.images)).images
    wanted: dict[str, Any] = (
        {"privacy": Privacy.NONE} if way.encode_on is None else {"privacy": Privacy(kind), "feature_form": form}
    )
    if way.encode_on is not None:
        wanted["encode_on"] = way.encode_on
    job = await client.submit(images, scheme=_SCHEMES[way.upper], batch_size=BATCH, name=f"table4 {way}", **wanted)
    events = [event async for event in client.events(job, budget_s=_JOB_BUDGET_S)]
    done = [event for event in events if isinstance(event, FineResults)]
    answers = [(event.results[0], event.sent[-1]) for event in sorted(done, key=lambda event: event.task)]
    if len(answers) != tasks:
        whys = [event.results[0].fallback for event in events if isinstance(event, FallbackResults)]
        raise UpstreamError(f"{len(answers)} of {tasks} tasks got a fine answer ({way}): {whys[:1]}")
    form_sent = _PIXELS if way.encode_on is None else kind
    if wrong := [
        sent for _, sent in answers if sent.form != form_sent or sent.encoded_by not in _ENCODE[way.encode_on]
    ]:
        raise UpstreamError(f"images went as {wrong[0].form}, encoded by {wrong[0].encoded_by} ({way})")
    kept = answers[way.warm_up :]
    return {
        "encoded_by": [sent.encoded_by for _, sent in kept],
        "stage_ms": [_ms(first.fine) - _ms(first.coarse) for first, _ in kept],
        "encode_ms": [sent.encode_ms for _, sent in kept],
        "upload_bytes": [sent.upload_bytes for _, sent in kept],
        "relay_bytes": [sent.relay_bytes for _, sent in kept],
    }


def _ms(answer: CoarseAnswer | FineAnswer | None) -> float:
    if answer is None or answer.ms is None:
        raise UpstreamError("an answer is missing, or its time")
    return answer.ms


def _slowness(network: Network) -> float | None:
    """Factor by which a tier is emulated to be slower than this machine; None if its speed is real."""
    if network.emulated_ms_per_image is None:
        return None
    return network.emulated_ms_per_image / network.real_ms_per_image


def _head_paces(real_ms: float, slowness: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """Settings of the nodes that encode, by name: what their heads take for an image where the tier is emulated.

    Args:
        real_ms: milliseconds per image of the head on this machine.
    """
    return {
        f"{tier}-1": {"emulate_encode_ms_per_image": real_ms * factor}
        for tier in (Tier.END, Tier.EDGE)
        # A head cannot run faster than it does, and its time here varies.
        if (factor := slowness.get(tier)) is not None and factor >= 2
    }


# --- from the record ------------------------------------------------------------------------------------------------


def _cell(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return point["upper"], point["latency_s"], point["bandwidth_mbps"]


def _row(
    point: Mapping[str, Any], without: Mapping[str, Any], fixed: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, Any]:
    """A row.

    Args:
        without, fixed: the points of the same cell with pixels, and with a fixed place of encoding.
    """
    plain, encoded = spread(without["stage_ms"]), spread(point["stage_ms"])
    encode_ms = spread(point["encode_ms"]).mean
    overhead_ms = encoded.mean - plain.mean
    slowness = config["slowness"].get(point["encode_on"])
    papers = PAPER.get((point["encode_on"], point["latency_s"])) if _as_in_the_paper(point) else None
    return {
        "encode_on": point["encode_on"],
        "upper": point["upper"],
        "network": point["network"],
        "encoder": config["encoder"],
        "form": config["form"],
        "latency_s": point["latency_s"],
        "bandwidth_mbps": point["bandwidth_mbps"],
        "ms_without": round(plain.mean, 3),
        "min_ms_without": round(plain.minimum, 3),
        "max_ms_without": round(plain.maximum, 3),
        "ms_with": round(encoded.mean, 3),
        "min_ms_with": round(encoded.minimum, 3),
        "max_ms_with": round(encoded.maximum, 3),
        "overhead_ms": round(overhead_ms, 3),
        "encoding_ms": round(encode_ms, 3),
        "communication_ms": round(overhead_ms - encode_ms, 3),
        "overhead": round(overhead_ms / plain.mean, 5),
        "encoding": round(encode_ms / plain.mean, 5),
        "communication": round((overhead_ms - encode_ms) / plain.mean, 5),
        "slowness": None if slowness is None else round(slowness, 2),
        "upload_bytes_without": round(spread(without["upload_bytes"]).mean),
        "upload_bytes_with": round(spread(point["upload_bytes"]).mean + spread(point["relay_bytes"]).mean),
        "tasks": encoded.n,
        "paper_overhead": papers,
        **_choice(point, fixed),
    }


def _choice(point: Mapping[str, Any], fixed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The choices of `auto`, and its time over the time of the better fixed place; None in other rows."""
    if point["encode_on"] != EncodeOn.AUTO or not fixed:
        return {"encoded_on_edge": None, "of_better": None}
    best_ms, on_edge = min(spread(each["stage_ms"]).mean for each in fixed), _ENCODE[EncodeOn.EDGE]
    return {
        "encoded_on_edge": sum(node_id in on_edge for node_id in point["encoded_by"]),
        "of_better": round(spread(point["stage_ms"]).mean / best_ms, 4),
    }


def _as_in_the_paper(point: Mapping[str, Any]) -> bool:
    return point["upper"] == Tier.CLOUD and point["bandwidth_mbps"] is None


def _limit(mbps: float | None) -> str:
    return "none" if mbps is None else f"{mbps:g} Mbit/s"


def _of_better(row: Mapping[str, Any]) -> str:
    if row["of_better"] is None:
        return "-"
    return f"{row['of_better']:.3f} ({row['encoded_on_edge']} of {row['tasks']} on the edge node)"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


class Table4(Experiment):
    """Time that an encoder adds to a task against the latency, on an end device or an edge node, split as in Eq. 8."""

    name = "table4"
    options = Chosen
    repeats = ("tasks", "tasks")
    quick = "{tasks_per_cell} tasks for each cell, fewer links unless chosen"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        quick, kind, form, tasks = run.request.quick, chosen.encoder, chosen.form, chosen.tasks
        for limit in chosen.bandwidth or ():
            if 0 < limit < _LEAST_MBPS:  # a task would be on its way for minutes
                raise InvalidInput(f"--bandwidth {limit:g} is too little: take {_LEAST_MBPS:g} at least, or 0")
        encoders = encoders_of(kind, load_manifest())
        links = links_of(chosen.latency, chosen.bandwidth and [mbps or None for mbps in chosen.bandwidth], quick=quick)
        check_fleet(run.profile)
        run.takes(tasks + _MOST_WARM_UP)
        run.config |= {"encoder": kind, "form": form, "tasks_per_cell": tasks}
        turns = turns_of(run.profile, links, encoders)

        run.expect(sum(len(_WAYS[upper]) for upper, _, _ in turns))
        names = {tier: encoder.network for tier, encoder in encoders.items()}
        machines = run.profile.with_nodes(end=1, edge=1, cloud=1)
        networks = await run.networks(machines, names, Encoding(kind=kind, form=form))
        run.config["slowness"] = {network.tier: _slowness(network) for network in networks}
        run.note("the links are emulated: of the latency and the limit in the table, without jitter")
        if any(spec.reset or spec.stall for spec in run.profile.path.values()):
            run.note("links lose exchanges: the time of a task that was sent again holds both ways")
        if any(run.config["slowness"].values()):
            run.note(
                "the emulated time of an upper network stands for that of its tail as well, so the upstream node gains "
                "nothing from the head's work; heads are slower than here by as much as the network of their tier"
            )
        for upper, latency_s, mbps in turns:
            machines = machines_of(run.profile, upper, latency_s, mbps)
            serving = [network for network in networks if machines.nodes.of(network.tier)]
            where = f"{latency_s:g} s" + (f", {mbps:g} Mbit/s" if mbps else "")
            paces = _head_paces(head_ms_per_image(encoders[upper], form), run.config["slowness"])
            async with run.fleet(machines, serving, {"window": 1}, paces) as (_, client):
                for way in _WAYS[upper]:
                    with run.step(f"{way}, {where}"):
                        answers = await _one_job(client, run, way, kind, form, tasks)
                    run.add(
                        upper=upper,
                        encode_on=way.encode_on,
                        network=names[upper],
                        latency_s=latency_s,
                        bandwidth_mbps=mbps,
                        **answers,
                    )
        run.note("with auto, the first 4 tasks do not count: the scheduler measures each place with two of them")
        for on, shown in ((EncodeOn.END, "an end device"), (EncodeOn.EDGE, "an edge node")):
            if times := [ms for point in run.points if point["encode_on"] == on for ms in point["encode_ms"]]:
                each = spread(times)
                run.note(
                    f"encoding a task took {each.mean:.2f} ms on {shown} ({each.minimum:.2f} to "
                    f"{each.maximum:.2f}, n = {each.n})"
                )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        without = {_cell(point): point for point in record["points"] if point["encode_on"] is None}
        ranked = sorted(
            (point for point in record["points"] if point["encode_on"] is not None),
            key=lambda point: (
                point["upper"] != Tier.CLOUD,
                list(EncodeOn).index(point["encode_on"]),
                -(point["bandwidth_mbps"] or math.inf),
                point["latency_s"],
            ),
        )
        return [
            _row(
                point,
                without[_cell(point)],
                [each for each in ranked if _cell(each) == _cell(point) and each["encode_on"] != EncodeOn.AUTO],
                record["config"],
            )
            for point in ranked
        ]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "encoding on, answer from | network | limit | latency, s | without, ms | with, ms | overhead | "
                "of it encoding | communication | of the better place | paper | kB sent | tasks"
            ),
            spare=("tasks", "network", "kB sent", "communication", "of it encoding"),
            rows=[
                [
                    f"{row['encode_on']}, {row['upper']}",
                    row["network"],
                    _limit(row["bandwidth_mbps"]),
                    f"{row['latency_s']:g}",
                    f"{row['ms_without']:.0f}",
                    f"{row['ms_with']:.0f}",
                    _percent(row["overhead"]),
                    _percent(row["encoding"]),
                    _percent(row["communication"]),
                    _of_better(row),
                    _percent(row["paper_overhead"]),
                    f"{row['upload_bytes_with'] / 1000:.0f} for {row['upload_bytes_without'] / 1000:.0f}",
                    str(row["tasks"]),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        rows = self.rows(record)
        if not rows:
            return  # it was stopped before the first task with an encoder
        limits = sorted({row["bandwidth_mbps"] for row in rows}, key=lambda mbps: -(mbps or math.inf))
        panels = figures.panels(
            "table4",
            ["no limit" if mbps is None else f"links of {mbps:g} Mbit/s" for mbps in limits],
            xlabel="latency to the upstream node and back (s)",
            ylabel="overhead of a task (% of its time without encoder)",
            finding="Encoding adds {:.1%} to {:.1%} to a task".format(
                *(pick(row["overhead"] for row in rows) for pick in (min, max))
            ),
        )
        ways = list(dict.fromkeys((row["encode_on"], row["upper"]) for row in rows))
        for axes, mbps in zip(panels, limits, strict=True):
            for number, way in enumerate(ways):
                shown = [row for row in rows if (row["encode_on"], row["upper"], row["bandwidth_mbps"]) == (*way, mbps)]
                name = f"{way[0]} for {way[1]}"
                for field, looks, label in (
                    ("overhead", measured(number), name),
                    ("paper_overhead", paper(number), f"{name}, paper"),
                ):
                    known = [(row["latency_s"], 100 * row[field]) for row in shown if row[field] is not None]
                    if known:
                        axes.plot(*zip(*known, strict=True), label=label, **looks)
            axes.axhline(0, **bound())
            axes.set_xticks(sorted({row["latency_s"] for row in rows}))
        figures.legend("table4", 3)


TABLE4 = Table4()
