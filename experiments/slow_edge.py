"""An edge node that becomes slower in mid-job: what `adaptive` makes of it.

Each point is one job of 50-image tasks on a fresh fleet of the profile, whose first edge node takes `FACTOR` times as
long per image from about a given part of the job on. When that really began is read off the node's log. The time is
held against the bound of the changed fleet (`scheduler.placement.bound.bound_with_slow_edge`), which knows of the
change beforehand; the scheduler does not. A run whose edge node gets too little to do, and so never becomes slower,
says nothing of a slow one: it is named and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

from experiments.emulation.compute import SLOWER
from experiments.figure3 import counts_of, times_of
from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, grouped, option
from experiments.plots import Figures, bound, counted, draw_ranges, measured
from experiments.profile import NodeNumbers, Profile, recorded_profile
from experiments.record import spread
from experiments.testbed import BATCH, Network, check_fleet
from scheduler.placement.bound import NodeCounts, bound_with_slow_edge, least_bound
from tierkit.client import JobState
from tierkit.types import Scheme, Tier

__all__ = ["FACTOR", "SLOW_EDGE", "Chosen", "images_until"]

FACTOR = 4.0
_SLOW = f"{Tier.EDGE}-1"
_WARM_UP_IMAGES = 102
"""What a node computes at its start."""
_JOB_BUDGET_S = 900.0


def images_until(part: float, tasks: int, counts: NodeCounts, profile: Profile) -> int:
    """Images after which the edge node becomes slower, so that this happens at about this part of the job.

    Of the tasks that edge nodes get, in the split with the least bound, it has its share by then.
    """
    edge_tasks = least_bound(tasks, counts, times_of(profile)).edge_tasks
    return _WARM_UP_IMAGES + BATCH * round(part * edge_tasks / counts.edge)


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Which points are measured."""

    ends: NodeNumbers | None = option(
        None, "Numbers of end devices, up to the profile's. Default: half, three quarters, all; all with --quick."
    )
    after: list[float] = option(
        [0.25, 0.5, 0.75], "Part of the job before; may be repeated.", quick=[0.5], min=0, max=1
    )
    runs: int = option(1, "Runs of each point.", min=1, max=MOST_RUNS)


async def _one(run: Run, profile: Profile, networks: Sequence[Network], part: float, repeat: int) -> None:
    slower_at: list[datetime] = []

    def watch(name: str, line: str) -> None:
        if name == _SLOW and SLOWER in line:
            slower_at.append(datetime.now(UTC))

    after_images = images_until(part, run.tasks, counts_of(profile), profile)
    slow = {"emulate_slowdown": FACTOR, "emulate_slowdown_after": after_images}
    async with run.fleet(profile, networks, nodes={_SLOW: slow}, watch=watch) as (_, client):
        images = run.images
        with run.step(f"{profile.nodes.end} end devices, slower after {part:.0%}"):
            job = await client.submit(
                images.images, labels=images.fine, scheme=Scheme.ADAPTIVE, batch_size=BATCH, name="slow edge"
            )
            job = await client.wait(job, budget_s=_JOB_BUDGET_S)
        assert job.started_at is not None
        if not slower_at:
            run.note(
                f"left out: {profile.nodes.end} end devices, part {part:g}, run {repeat + 1}: the edge node got too "
                "little to do and never became slower"
            )
        run.add(
            ends=profile.nodes.end,
            part=part,
            after_images=after_images,
            # Not at all, when the node got too little to do.
            slower_after_s=(slower_at[0] - job.started_at).total_seconds() if slower_at else None,
            state=job.state,
            reason=job.reason,
            seconds=job.elapsed_s,
            fallback=job.fallback,
            fine_accuracy=job.fine_accuracy,
            fine_images_by_node={name: share.fine_images for name, share in sorted(job.by_node.items())},
        )


# --- from the record ------------------------------------------------------------------------------------------------


def _row(points: Sequence[Mapping[str, Any]], profile: Profile, config: Mapping[str, Any]) -> dict[str, Any]:
    """One cell, of the `runs` in which the edge node became slower; `never_slower` counts the others. `ratio` and the
    bounds are means over its runs, each against the bound for its own moment."""
    ends, part = points[0]["ends"], points[0]["part"]
    profile = profile.with_nodes(end=ends)
    slowed = [point for point in points if point["slower_after_s"] is not None]
    row: dict[str, Any] = {
        "ends": ends,
        "part": part,
        "runs": len(slowed),
        "never_slower": len(points) - len(slowed),
        "slower_after_s": None,
        "unchanged_bound_seconds": round(
            least_bound(config["tasks"], counts_of(profile), times_of(profile)).seconds, 3
        ),
        **dict.fromkeys(("bound_seconds", "seconds", "min_seconds", "max_seconds", "ratio", "max_ratio")),
    }
    if not slowed:
        return row
    bounds_s = [
        bound_with_slow_edge(
            config["tasks"],
            counts_of(profile),
            times_of(profile),
            factor=config["factor"],
            after_s=point["slower_after_s"],
        )
        for point in slowed
    ]
    whole = all(point["state"] == JobState.COMPLETED and not point["fallback"] for point in slowed)
    seconds = spread([point["seconds"] for point in slowed])
    ratios = spread([point["seconds"] / bound_s for point, bound_s in zip(slowed, bounds_s, strict=True)])
    return row | {
        "slower_after_s": round(spread([point["slower_after_s"] for point in slowed]).mean, 3),
        "bound_seconds": round(spread(bounds_s).mean, 3),
        "seconds": round(seconds.mean, 3) if whole else None,
        "min_seconds": seconds.minimum,
        "max_seconds": seconds.maximum,
        "ratio": round(ratios.mean, 3) if whole else None,
        "max_ratio": round(ratios.maximum, 3) if whole else None,
    }


def _moment(row: Mapping[str, Any]) -> str:
    if not row["runs"]:
        return "never"
    of = f" ({row['runs']} of {row['runs'] + row['never_slower']} runs)" if row["never_slower"] else ""
    return f"{row['slower_after_s']:.1f}{of}"


def _measured(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Bound, time, and the time's ratio to it."""
    if not row["runs"]:
        return "-", "-", "-"
    if row["seconds"] is None:
        return f"{row['bound_seconds']:.1f}", "not whole", "-"
    return f"{row['bound_seconds']:.1f}", f"{row['seconds']:.1f}", f"{row['ratio']:.3f}"


class SlowEdge(Experiment):
    """Time to finish with `adaptive` when an edge node becomes slower in mid-job."""

    name = "slow-edge"
    options = Chosen
    quick = "{share}, fewer points unless chosen"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        quick, most, runs = run.request.quick, run.profile.nodes.end, chosen.runs
        # Without a choice half, three quarters and all of the end devices.
        ends = chosen.ends or ((most,) if quick else sorted({(most + 1) // 2, (3 * most + 3) // 4, most}))
        check_fleet(run.profile, ends)
        run.config |= {"ends": list(ends), "parts": chosen.after, "runs": runs, "factor": FACTOR, "slow_node": _SLOW}
        run.note("pixels are sent on, not encoded features: the encoder has no part in these figures")
        run.note_limits()
        turns = list(product(ends, chosen.after, range(runs)))
        run.expect(len(turns))
        networks = await run.networks(run.profile)
        for number, part, repeat in turns:
            await _one(run, run.profile.with_nodes(end=number), networks, part, repeat)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        cells = sorted(grouped(record["points"], "ends", "part").items())
        profile = recorded_profile(record["config"]["profile"])
        return [_row(points, profile, record["config"]) for _, points in cells]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "end devices | part of the job before | one edge node slower after, s | "
                "bound without that, s | bound of the changed fleet, s | measured, s | measured / bound"
            ),
            rows=[
                [
                    str(row["ends"]),
                    f"{row['part']:g}",
                    _moment(row),
                    f"{row['unchanged_bound_seconds']:.1f}",
                    *_measured(row),
                ]
                for row in self.rows(record)
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        # Where nothing became slower there is nothing to show.
        rows = [row for row in self.rows(record) if row["seconds"] is not None]
        if not rows:
            return
        config = record["config"]
        n = counted(row["runs"] for row in rows)
        title = f"{config['tasks']} tasks, one edge node {config['factor']:g} times slower; {n}"
        (axes,) = figures.panels("slow-edge", [title], xlabel="part of the job before", ylabel="time to finish (s)")
        for number, ends in enumerate(sorted({row["ends"] for row in rows})):
            shown = [row for row in rows if row["ends"] == ends]
            of_runs = ("part", "seconds", "min_seconds", "max_seconds")
            draw_ranges(axes, shown, of_runs, capsize=3, label=f"{ends} end devices", **measured(number))
            axes.plot([row["part"] for row in shown], [row["bound_seconds"] for row in shown], **bound(number))
        axes.plot([], [], label="bound of the changed fleet", **bound())
        axes.set_ylim(0, 1.1 * max(row["max_seconds"] for row in rows))
        axes.legend(frameon=False, fontsize=8)


SLOW_EDGE = SlowEdge()
