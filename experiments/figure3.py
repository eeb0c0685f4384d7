"""Figure 3 of the paper: the time to finish the test set against the number of end devices, by scheme.

Each point is one job of 50-image tasks on a fleet of the profile; surplus end devices are drained. The schemes run with
a window of 1 and with a longer one. With 1, an end device has one task at a time, as in the paper; the longer window
keeps an end device busy while its answers are on their way. The figure compares the
measurement with two calculated values.

The paper's formula (Eq. 1 to 3, and 6) adds the two stages up. The pipelined bound (`scheduler.placement.bound`) is a
lower bound for the scheme on this fleet: no order of the tasks is faster. Under `mapping` each edge node forms a
separate fleet with its own end devices, and so do the clouds. The bound assumes the best split of the tasks between
these fleets.

A window of w bounds the time as well. If a task takes l seconds from its dispatch to its last answer, n end devices get
no more than n w / l tasks a second.

As in the paper the encoder is on: end devices send the features of the first convolution. Their heads really run, which
neither formula nor bounds include.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.cost import ServedImages
from experiments.harness import MOST_RUNS, Experiment, Options, Point, Record, Run, Table, cell, grouped, option
from experiments.plots import Figures, averaged, bound, draw_ranges, formula, measured
from experiments.profile import NodeNumbers, Profile, recorded_profile
from experiments.record import spread
from experiments.testbed import BATCH, Encoding, check_fleet, task_s, wait_for_devices
from scheduler.placement.bound import NodeCounts, bound_of_scheme, least_bound
from scheduler.placement.mapping import (
    FleetTimes,
    TaskTimes,
    map_count,
    share_to_cloud,
    time_end,
    time_end_cloud,
    time_end_edge,
    time_mapping,
)
from tierkit.client import AsyncClient, Device, Job, JobState
from tierkit.types import EncoderKind, Health, Privacy, Scheme, Tier

__all__ = [
    "FIGURE3",
    "LOOKS",
    "SERIES",
    "Chosen",
    "Series",
    "bound_s",
    "busy_window",
    "counts_of",
    "formula_s",
    "times_of",
]

_JOB_BUDGET_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of the figure."""

    scheme: Scheme
    by_formula: bool = False
    """True if `mapping` uses N_map of Eq. 4; else N_map is 1, as in the paper's evaluation."""

    def __str__(self) -> str:
        if self.scheme is not Scheme.MAPPING:
            return str(self.scheme)
        return "mapping, N_map by Eq. 4" if self.by_formula else "mapping, N_map 1"


SERIES: Sequence[Series] = (
    Series(scheme=Scheme.END),
    Series(scheme=Scheme.END_CLOUD),
    Series(scheme=Scheme.END_EDGE),
    Series(scheme=Scheme.MAPPING),
    Series(scheme=Scheme.MAPPING, by_formula=True),
    Series(scheme=Scheme.ADAPTIVE),
)

LOOKS: Mapping[str, int] = {Scheme.MAPPING: 3} | {str(series): number for number, series in enumerate(SERIES)}
"""Look (`experiments.plots`) of each scheme in all plots, by its name."""


# --- formulas and bounds --------------------------------------------------------------------------------------------


def times_of(profile: Profile) -> FleetTimes:
    """Times of a task on each tier of a profile whose speeds are emulated."""

    def of(tier: Tier, path: str) -> TaskTimes:
        return TaskTimes(communication_s=profile.round_trip_s(path), processing_s=task_s(profile, tier))

    return FleetTimes(
        end=of(Tier.END, "scheduler-end"), edge=of(Tier.EDGE, "end-edge"), cloud=of(Tier.CLOUD, "end-cloud")
    )


def counts_of(profile: Profile) -> NodeCounts:
    """Nodes of each tier."""
    return NodeCounts(end=profile.nodes.end, edge=profile.nodes.edge, cloud=profile.nodes.cloud)


def busy_window(times: FleetTimes) -> int:
    """Tasks under way with which an end device is never idle, however far the node that it sends them on to."""
    assert times.edge is not None
    assert times.cloud is not None
    longest_s = times.end.total_s + max(times.edge.total_s, times.cloud.total_s)
    return 1 + math.ceil(longest_s / times.end.processing_s - 1e-9)


def formula_s(series: Series, tasks: int, counts: NodeCounts, times: FleetTimes) -> float | None:
    """The paper's time for a job; None for `adaptive`, which it does not have."""
    assert times.edge is not None
    assert times.cloud is not None
    end_cloud_s = time_end_cloud(tasks, counts.end, counts.cloud, times.end, times.cloud)
    end_edge_s = time_end_edge(tasks, counts.end, counts.edge, times.end, times.edge)
    match series.scheme:
        case Scheme.END:
            return time_end(tasks, counts.end, times.end)
        case Scheme.END_CLOUD:
            return end_cloud_s
        case Scheme.END_EDGE:
            return end_edge_s
        case Scheme.MAPPING:
            theta = share_to_cloud(counts.end, counts.edge, _n_map(series, times))
            return time_mapping(theta, end_cloud_s, end_edge_s)
        case _:
            return None


def bound_s(
    series: Series,
    tasks: int,
    counts: NodeCounts,
    times: FleetTimes,
    *,
    window: int | None = None,
) -> float:
    """The least time for a job (see the module).

    Args:
        window: tasks that an end device may have under way; None for any number.
    """
    if series.scheme is Scheme.ADAPTIVE:
        # It holds the end devices' own work against its window, not what waits for upstream nodes.
        return least_bound(tasks, counts, times).seconds
    if series.scheme is not Scheme.MAPPING:
        return _shared_s([(series.scheme, counts)], tasks, times, window)
    places = min(counts.end, counts.edge * _n_map(series, times))
    groups = [
        (Scheme.END_EDGE, NodeCounts(end=len(range(edge, places, counts.edge)), edge=1))
        for edge in range(min(places, counts.edge))
    ]
    if counts.end > places:
        groups.append((Scheme.END_CLOUD, NodeCounts(end=counts.end - places, cloud=counts.cloud)))
    return _shared_s(groups, tasks, times, window)


def _shared_s(groups: Sequence[tuple[Scheme, NodeCounts]], tasks: int, times: FleetTimes, window: int | None) -> float:
    """The least time for tasks that parts of the fleet share which have nothing else in common."""
    given = [0] * len(groups)
    for _ in range(tasks):
        # Each task goes where it is done first: bounds only grow, so this is the best way to share them.
        best = min(range(len(groups)), key=lambda one: _group_s(groups[one], given[one] + 1, times, window))
        given[best] += 1
    shares = zip(groups, given, strict=True)
    return max((_group_s(group, number, times, window) for group, number in shares if number), default=0.0)


def _group_s(group: tuple[Scheme, NodeCounts], tasks: int, times: FleetTimes, window: int | None) -> float:
    scheme, counts = group
    pipelined_s = bound_of_scheme(scheme, tasks, counts, times).seconds
    if window is None:
        return pipelined_s
    upper = {Scheme.END_EDGE: times.edge, Scheme.END_CLOUD: times.cloud}.get(scheme)
    latency_s = times.end.total_s + (upper.total_s if upper is not None else 0.0)
    return max(pipelined_s, tasks / (counts.end * window) * latency_s)


def _n_map(series: Series, times: FleetTimes) -> int:
    assert times.edge is not None
    return map_count(times.end, times.edge) if series.by_formula else 1


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Points to measure."""

    ends: NodeNumbers | None = option(
        None, "Numbers of end devices, up to the profile's. Default: 1 to all; half and all with --quick."
    )
    window: list[int] | None = option(
        None, "Tasks under way per end device; may be repeated. Default: 1, and enough.", min=1, max=64
    )
    scheme: list[Scheme] | None = option(None, "Only this scheme; may be repeated.")
    privacy: Privacy = option(Privacy.CONV1, "What goes up: pixels (none, auto), or the features of an encoder.")
    runs: int = option(1, "Runs of each point.", min=1, max=MOST_RUNS)


async def _only(client: AsyncClient, number: int, most: int) -> None:
    """Drain the end devices beyond the first `number`, and let the others take tasks."""
    wanted = {f"end-{n}": Health.ALIVE if n <= number else Health.DRAINING for n in range(1, most + 1)}
    known = {device.node_id: device.health for device in await client.devices()}
    for name, health in wanted.items():
        if health is Health.DRAINING:
            await client.drain(name)
        elif known[name] is Health.DRAINING:
            await client.resume(name)

    def lacking(devices: Sequence[Device]) -> str:
        known = {device.node_id: device.health for device in devices}
        reached = all(known[name] is health for name, health in wanted.items())
        return "" if reached else f"the fleet has not shrunk to {number} end devices"

    await wait_for_devices(client, lacking)


def _encoder(privacy: Privacy) -> EncoderKind | None:
    """Encoder whose features end devices send. The fleet is trusted, so by default they send pixels."""
    return EncoderKind(privacy.value) if privacy in (Privacy.CONV1, Privacy.BOTTLENECK) else None


async def _one_job(client: AsyncClient, run: Run, series: Series, privacy: Privacy) -> Job:
    images = run.images
    job = await client.submit(
        images.images,
        labels=images.fine,
        scheme=series.scheme,
        privacy=privacy,
        batch_size=BATCH,
        name=f"figure3 {series}",
    )
    return await client.wait(job, budget_s=_JOB_BUDGET_S)


def _facts(job: Job) -> dict[str, Any]:
    """Facts of a job for the record."""
    by_tier = dict.fromkeys(Tier, 0)
    for share in job.by_node.values():
        by_tier[share.tier] += share.coarse_images if share.tier is Tier.END else share.fine_images
    return {
        "state": job.state,
        "reason": job.reason,
        "seconds": job.elapsed_s,
        "images": job.images,
        "fallback": job.fallback,
        "images_by_tier": by_tier,
        "tasks_by_form": {form: share.tasks for form, share in job.sent.items()},
        "coarse_accuracy": job.coarse_accuracy,
        "fine_accuracy": job.fine_accuracy,
    }


# --- from the record ------------------------------------------------------------------------------------------------


def _row(key: tuple[Any, ...], points: Sequence[Point], profile: Profile, tasks: int) -> dict[str, Any]:
    scheme, by_formula, window, ends = key
    series, times = Series(scheme=Scheme(scheme), by_formula=by_formula), times_of(profile)
    counts = counts_of(profile.with_nodes(end=ends))
    whole = all(point["state"] == JobState.COMPLETED and not point["fallback"] for point in points)
    measured_s = spread([point["seconds"] for point in points])
    papers_s = formula_s(series, tasks, counts, times)
    pipelined_s = bound_s(series, tasks, counts, times)
    fine = [point["fine_accuracy"] for point in points if point["fine_accuracy"] is not None]
    return {
        "scheme": scheme,
        "series": str(series),
        "window": window,
        "ends": ends,
        "seconds": round(measured_s.mean, 3) if whole else None,
        "min_seconds": measured_s.minimum,
        "max_seconds": measured_s.maximum,
        "runs": len(points),
        "formula_seconds": None if papers_s is None else round(papers_s, 3),
        "bound_seconds": round(pipelined_s, 3),
        "window_bound_seconds": round(bound_s(series, tasks, counts, times, window=window), 3),
        "ratio": round(measured_s.mean / pipelined_s, 3) if whole else None,
        "fine_accuracy": spread(fine).mean if fine else None,
        "planned_cloud_share": _planned_share(series, counts, times),
        "cloud_share": spread([point["images_by_tier"][Tier.CLOUD] / point["images"] for point in points]).mean,
        "fallback": sum(point["fallback"] for point in points),
    }


def _planned_share(series: Series, counts: NodeCounts, times: FleetTimes) -> float | None:
    """Eq. 5. None except in the scheme that it describes."""
    if series.scheme is not Scheme.MAPPING:
        return None
    return share_to_cloud(counts.end, counts.edge, _n_map(series, times))


_TICKS_S = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


class Figure3(Experiment):
    """Time to finish against the number of end devices by scheme, compared with formula and bound."""

    name = "figure3"
    options = Chosen
    quick = "{share}, fewer points unless chosen"

    async def measure(self, run: Run, chosen_points: Chosen) -> None:
        privacy, runs = chosen_points.privacy, chosen_points.runs
        profile, most = run.profile, run.profile.nodes.end
        ends = chosen_points.ends or (sorted({(most + 1) // 2, most}) if run.request.quick else range(1, most + 1))
        check_fleet(profile, ends)
        times = times_of(profile)
        assert times.edge is not None
        windows = chosen_points.window or (1, busy_window(times))
        run.config |= {"ends": list(ends), "windows": list(windows), "runs": runs, "privacy": privacy}
        kind = _encoder(privacy)
        if kind is None:
            run.note("pixels are sent on, not encoded features: the encoder has no part in these figures")
        else:
            run.note(f"the encoder is on: end devices send {kind} features, whose heads really run on this machine")
        run.note_limits()
        wanted = [series for series in SERIES if series.scheme in (chosen_points.scheme or Scheme)]
        turns = [
            (window, by_formula, [series for series in wanted if series.by_formula is by_formula])
            for window in windows
            for by_formula in (False, True)
        ]

        run.expect(sum(runs * len(chosen) * len(ends) for _, _, chosen in turns))
        encoding = None if kind is None else Encoding(kind=kind)
        networks = await run.networks(profile, None, encoding)
        for window, by_formula, chosen in turns:
            if not chosen:
                continue
            # As in the paper. In the other order the cloud gets less than its share by Eq. 5.
            settings = {"window": window, "order": "sequential"} | ({} if by_formula else {"n_map": 1})
            async with run.fleet(profile, networks, settings) as (_, client):
                for number in ends:
                    await _only(client, number, most)
                    mapping = await client.mapping()
                    if by_formula and mapping["n_map"] != map_count(times.end, times.edge):
                        run.note(
                            f"with {number} end devices N_map was {mapping['n_map']}, {mapping['n_map_reason']}: not "
                            "that of the profile's times, but of the speeds that the nodes measured at their start"
                        )
                    for series in [series for series in chosen for _ in range(runs)]:
                        label = f"{series}, window {window}, {number} end devices"
                        with run.step(label):
                            job = await _one_job(client, run, series, privacy)
                        key = {"scheme": series.scheme, "by_formula": by_formula, "window": window, "ends": number}
                        run.add(**key, n_map=mapping["n_map"], **_facts(job))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        cells = grouped(record["points"], "scheme", "by_formula", "window", "ends")
        order = [(series.scheme, series.by_formula) for series in SERIES]
        ranked = sorted(cells, key=lambda key: (key[2], order.index((Scheme(key[0]), key[1])), key[3]))
        profile = recorded_profile(record["config"]["profile"])
        return [_row(key, cells[key], profile, record["config"]["tasks"]) for key in ranked]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "scheme | window | end devices | paper's formula, s | pipelined bound, s | "
                "bound with this window, s | measured, s | measured / pipelined bound | "
                "cloud, Eq. 5 | cloud, measured | fine accuracy"
            ),
            spare=("bound with this window, s",),
            rows=[
                [
                    row["series"],
                    str(row["window"]),
                    str(row["ends"]),
                    cell(row["formula_seconds"], ".1f"),
                    f"{row['bound_seconds']:.1f}",
                    f"{row['window_bound_seconds']:.1f}",
                    "not whole" if row["seconds"] is None else f"{row['seconds']:.1f}",
                    cell(row["ratio"], ".2f"),
                    cell(row["planned_cloud_share"], ".0%"),
                    cell(row["cloud_share"], ".0%"),
                    cell(row["fine_accuracy"], ".3f"),
                ]
                for row in self.rows(record)
            ],
        )

    def served(self, record: Record) -> list[ServedImages]:
        nodes = recorded_profile(record["config"]["profile"]).nodes
        uppers: dict[str, tuple[Tier, ...]] = {
            Scheme.END: (),
            Scheme.END_CLOUD: (Tier.CLOUD,),
            Scheme.END_EDGE: (Tier.EDGE,),
        }
        return [
            ServedImages(
                words=f"{row['series']}, window {row['window']}, {row['ends']} end devices",
                nodes={Tier.END: row["ends"]}
                | {tier: getattr(nodes, tier) for tier in uppers.get(row["scheme"], (Tier.EDGE, Tier.CLOUD))},
                images=BATCH * record["config"]["tasks"],
                seconds=row["seconds"],
            )
            for row in self.rows(record)
            if row["seconds"] is not None
        ]

    def draw(self, record: Record, figures: Figures) -> None:
        rows = self.rows(record)
        windows = sorted({row["window"] for row in rows})
        panels = figures.panels(
            "figure3",
            [
                f"window {window}; {averaged(row['runs'] for row in rows if row['window'] == window)}"
                for window in windows
            ],
            xlabel="end devices",
            ylabel=f"time to finish {record['config']['tasks']} tasks (s)",
            finding=_finding(rows),
        )
        names = list(dict.fromkeys(row["series"] for row in rows))
        for axes, window in zip(panels, windows, strict=True):
            for name in names:
                number = LOOKS[name]
                shown = [row for row in rows if (row["series"], row["window"]) == (name, window)]
                ends = [row["ends"] for row in shown]
                axes.plot(ends, [row["bound_seconds"] for row in shown], **bound(number))
                if shown and shown[0]["formula_seconds"] is not None:
                    axes.plot(ends, [row["formula_seconds"] for row in shown], **{**formula(number), "linestyle": ":"})
                draw_ranges(
                    axes, shown, ("ends", "seconds", "min_seconds", "max_seconds"), label=name, **measured(number)
                )
            axes.set_yscale("log")
            axes.set_yticks(_TICKS_S, [f"{tick:g}" for tick in _TICKS_S])
            axes.minorticks_off()
            axes.set_xticks(sorted({row["ends"] for row in rows}))
        low = min(min(row["bound_seconds"], row["seconds"] or math.inf) for row in rows)
        high = max(max(row["formula_seconds"] or 0, row["seconds"] or 0) for row in rows)
        panels[0].set_ylim(0.8 * low, 1.25 * high)
        of_all = {"marker": "o", "markersize": 6}
        panels[0].plot([], [], label="pipelined bound", **{**bound(), **of_all})
        panels[0].plot([], [], label="paper's formula", **{**formula(), **of_all, "linestyle": ":"})
        figures.legend("figure3", 3)


def _finding(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ratio of `adaptive` to its bound with the largest window, or of the closest scheme with fine answers."""
    worst: dict[str, float] = {}
    for row in rows:
        fully_used = row["window"] == max(other["window"] for other in rows)
        if fully_used and row["ratio"] is not None and row["scheme"] != Scheme.END:
            worst[row["series"]] = max(worst.get(row["series"], 0.0), row["ratio"])
    best = Scheme.ADAPTIVE if Scheme.ADAPTIVE in worst else min(worst, key=lambda name: worst[name], default="")
    return f"{best} takes at most {worst[best]:.2f} times its bound" if best else ""


FIGURE3 = Figure3()
