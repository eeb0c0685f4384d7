"""The limits of one scheduler: its own code on virtual time, with up to 100,000 simulated nodes.

First the simulation is compared with the real fleet: the jobs of `figure3` run on processes with the profile's speeds,
and the same jobs are simulated. Then fleets grow. Each tier keeps its share of the profile's total speed, even if it
has few nodes, so a cloud of a large fleet is a data centre. Speeds are spread about their mean, and nodes fail and come
back all the time.

`cores` is the processor time over the simulated time: above 1, one process of Python could not decide as quickly as its
fleet works, even if messages cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from experiments import figure3
from experiments.figure3 import Series, busy_window, times_of
from experiments.harness import Experiment, Options, Record, Run, Table, option, reason
from experiments.plots import Figures, bound, measured
from experiments.profile import Profile, recorded_profile
from experiments.record import read_record
from experiments.scale.world import BATCH, Case
from experiments.testbed import check_fleet, task_s
from scheduler.placement.mapping import map_count
from tierkit.errors import InvalidInput, ServiceFailed
from tierkit.settings import NodeSettings
from tierkit.types import Privacy, Scheme, Tier

__all__ = ["SCALE", "Size", "case_of", "simulated_point"]

_JOINED_IMAGES = NodeSettings.model_fields["max_batch_size"].default
"""Images of a batch for each core of an upstream node."""
_SCHEMES = (Scheme.MAPPING, Scheme.ADAPTIVE)
_SPREAD = 0.3
_CHURN_PER_MINUTE = 0.02
_AGGREGATED = 20_000
"""Above this many nodes heartbeats come together, `_TOGETHER` nodes at a time, and less often."""
_TOGETHER, _SLOW_BEAT_S = 100, 2.0


@dataclass(frozen=True, slots=True)
class Size:
    """A fleet, and how many tasks it gets."""

    ends: int
    edges: int
    clouds: int
    tasks: int

    @classmethod
    def read(cls, text: str, tasks: int | None) -> Size:
        """ "1000/50/2": end devices, edge nodes, clouds."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and part.strip("0") for part in parts):
            raise InvalidInput(f"{text!r} is not a fleet: write end devices/edge nodes/clouds, such as 1000/50/2")
        ends, edges, clouds = (int(part.lstrip("0")[:12]) for part in parts)
        if ends + edges + clouds > _MOST_NODES:
            raise InvalidInput(f"the fleet {text} has more than {_MOST_NODES:,} nodes, each of which takes memory")
        return cls(ends, edges, clouds, tasks or min(_MOST_TASKS, _TASKS_PER_END * ends))


_TASKS_PER_END, _MOST_TASKS = 100, 1_000_000
_MOST_NODES = 200_000
_SIZES = (
    Size(100, 5, 1, 10_000),
    Size(1000, 50, 2, 100_000),
    Size(10_000, 500, 20, 1_000_000),
    Size(100_000, 2000, 50, 1_000_000),
)
_QUICK_SIZES = (Size(100, 5, 1, 2000), Size(1000, 50, 2, 5000))
_MOST_OF = defaultdict(lambda: _MOST_TASKS, {Scheme.ADAPTIVE: 100_000})
"""Tasks of a usual run: a decision of `adaptive` takes several times as long as one of `mapping`."""


def case_of(size: Size, scheme: Scheme, profile: Profile, seed: int) -> Case:
    """A fleet of this size with the profile's proportions."""
    nodes = profile.nodes
    # So many of the profile's nodes does one node of the large fleet stand for.
    edge_s = task_s(profile, Tier.EDGE) * (size.edges / size.ends) * (nodes.end / nodes.edge)
    cloud_s = task_s(profile, Tier.CLOUD) * (size.clouds / size.ends) * (nodes.end / nodes.cloud)
    edge_rate, cloud_rate = size.edges / edge_s, size.clouds / cloud_s
    together = size.ends + size.edges + size.clouds > _AGGREGATED
    return Case(
        ends=size.ends,
        edges=size.edges,
        clouds=size.clouds,
        tasks=size.tasks,
        scheme=scheme,
        end_s=task_s(profile, Tier.END),
        edge_s=edge_s,
        cloud_s=cloud_s,
        edge_link_s=profile.round_trip_s("end-edge"),
        cloud_link_s=profile.round_trip_s("end-cloud"),
        window=busy_window(times_of(profile)),
        # So that the edge nodes and the clouds have as much to do for their speed.
        n_map=max(1, round(edge_rate / (edge_rate + cloud_rate) * size.ends / size.edges)),
        heartbeat_s=_SLOW_BEAT_S if together else 0.2,
        beats_at_once=_TOGETHER if together else 1,
        spread=_SPREAD,
        churn_per_minute=_CHURN_PER_MINUTE,
        seed=seed,
    )


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Fleets to simulate, and the reference of the simulation."""

    size: list[str] | None = option(
        None,
        "Simulated fleet; may be repeated. Default: up to 100000/2000/50; 1000/50/2 with --quick.",
        metavar="ENDS/EDGES/CLOUDS",
    )
    scheme: list[Scheme] | None = option(None, "Only this scheme; may be repeated. Default: mapping and adaptive.")
    tasks: int | None = option(
        None, "Tasks of each fleet of --size. Default: 100 per end device, 1,000,000 at most.", min=1, max=10_000_000
    )
    against: Path | None = option(
        None, "Record of a figure3 run to compare the simulation with.", dir_okay=False, exists=True
    )
    compare: bool = option(
        True,
        "Compare the simulation with the real fleet, which is measured now unless --against is set.",
        names="--validate/--no-validate",
    )


def _check_points(points: Sequence[Mapping[str, Any]]) -> None:
    """True if each has what a comparison needs."""
    for point in points:
        _key(point)
        float(point["seconds"])


def _check_comparable(record: Record) -> None:
    if record["experiment"] != figure3.FIGURE3.name or record["state"] != "complete":
        raise ValueError(f"it is a record of {record['experiment']}, {record['state']}")


def _key(point: Mapping[str, Any]) -> tuple[str, bool, int, int]:
    return point["scheme"], point["by_formula"], point["window"], point["ends"]


def simulated_point(
    key: tuple[str, bool, int, int], tasks: int, profile: Profile, *, n_map: int | None = None, joins: int = 1
) -> Case:
    """Return the simulation of a point of figure 3. Its key is: scheme, True if N_map is from Eq. 4, window, end
    devices.

    Args:
        n_map: N_map of the real scheduler; None for the value that it should have had.
        joins: number of tasks that an upstream node joins to one batch.
    """
    scheme, by_formula, window, ends = key
    times = times_of(profile)
    assert times.edge is not None
    return Case(
        ends=ends,
        edges=profile.nodes.edge,
        clouds=profile.nodes.cloud,
        tasks=tasks,
        scheme=Scheme(scheme),
        end_s=times.end.processing_s,
        edge_s=times.edge.processing_s,
        cloud_s=task_s(profile, Tier.CLOUD),
        edge_link_s=profile.round_trip_s("end-edge"),
        cloud_link_s=profile.round_trip_s("end-cloud"),
        window=window,
        n_map=n_map or (map_count(times.end, times.edge) if by_formula else 1),
        joins=joins,
        job_tasks=tasks,
    )


async def _simulate(case: Case) -> dict[str, Any]:
    """Simulate one case in a separate process, which ends with this task."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "experiments.scale",
        json.dumps(asdict(case)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = b""
    try:
        wrong = asyncio.create_task(process.stderr.read())
        while said := await process.stdout.readline():
            line = said
        if await process.wait():
            last = (await wrong).decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ServiceFailed(f"the simulation ended with exit code {process.returncode}: {' '.join(last)}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return dict(json.loads(line))


# --- from the record ------------------------------------------------------------------------------------------------


def _validated(record: Record) -> list[dict[str, Any]]:
    """Rows of the points that were both measured and simulated."""
    real: dict[tuple[str, bool, int, int], list[float]] = {}
    for point in record["points"]:
        if "part" not in point:
            real.setdefault(_key(point), []).append(point["seconds"])
    rows = []
    for point in record["points"]:
        if point.get("part") != "validation":
            continue
        scheme, by_formula, window, ends = key = tuple(point["key"])
        times = real[key]
        mean_s = sum(times) / len(times)
        rows.append(
            {
                "part": "validation",
                "series": str(Series(scheme=Scheme(scheme), by_formula=by_formula)),
                "window": window,
                "ends": ends,
                "seconds": round(mean_s, 3),
                "runs": len(times),
                "simulated_seconds": round(point["seconds"], 3),
                "difference": round(point["seconds"] / mean_s - 1, 4),
            }
        )
    return rows


def _row(point: Mapping[str, Any]) -> dict[str, Any]:
    nodes = point["ends"] + point["edges"] + point["clouds"]
    return {
        "part": "scale",
        "scheme": point["scheme"],
        "ends": point["ends"],
        "edges": point["edges"],
        "clouds": point["clouds"],
        "nodes": nodes,
        "tasks": point["tasks"],
        "answers": point["answers"],
        "seconds": round(point["seconds"], 3),
        "bound_seconds": round(point["bound_seconds"], 3),
        "ratio": round(point["seconds"] / point["bound_seconds"], 3),
        "decisions": point["decisions"],
        "decisions_per_cpu_s": round(point["decisions"] / point["cpu_s"], 1),
        "cpu_ms_per_task": round(point["cpu_s"] / point["tasks"] * 1000, 3),
        "cores": round(point["cpu_s"] / point["seconds"], 3),
        "heartbeats": point["heartbeats"],
        "messages_per_s": round(point["messages"] / point["seconds"], 1),
        "deaths": point["deaths"],
        "memory_bytes": point["memory_bytes"],
        "cpu_s": round(point["cpu_s"], 2),
        "wall_s": round(point["wall_s"], 2),
    }


class Scale(Experiment):
    """The scheduler's own code on virtual time, with fleets that grow to 100,000 nodes."""

    name = "scale"
    options = Chosen
    quick = "fewer and smaller fleets unless chosen"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        against, validate, schemes = chosen.against, chosen.compare, chosen.scheme or _SCHEMES
        sizes = [Size.read(text, chosen.tasks) for text in chosen.size] if chosen.size else None
        check_fleet(run.profile)
        if against is not None and not validate:
            raise InvalidInput("--against asks for a comparison and --no-validate for none: leave one of them out")
        usual = _QUICK_SIZES if run.request.quick else _SIZES
        wanted = [(size, scheme) for size in sizes or usual for scheme in schemes]
        if sizes is None:
            wanted = [(replace(size, tasks=min(size.tasks, _MOST_OF[scheme])), scheme) for size, scheme in wanted]
        cases = [case_of(size, scheme, run.profile, run.request.seed) for size, scheme in wanted]
        run.expect(len(cases))
        run.note(
            "simulated: the scheduler's own code on virtual time, with nodes that serve first come, first served; "
            "messages between machines cost no processor time"
        )
        run.note_limits()
        if against is not None:
            record = read_record(against)
            try:
                _check_comparable(record)
                profile = recorded_profile(record["config"]["profile"])
                run.config |= {
                    "compared_tasks": record["config"]["tasks"],
                    "compared_profile": profile.model_dump(mode="json"),
                    "compared_cores": record["host"]["cores"],
                }
                _check_points(record["points"])
                for point in record["points"]:
                    run.add(**point)
            except (KeyError, TypeError, AttributeError, ValueError) as exc:
                raise InvalidInput(f"{against} is not a whole record of figure3: {reason(exc):.200}") from exc
            if record["config"].get("privacy") not in ("auto", "none"):
                run.note("the measured points are with an encoder, whose time the simulation does not know")
        elif validate:
            run.config |= {
                "compared_tasks": run.tasks,
                "compared_profile": run.profile.model_dump(mode="json"),
                "compared_cores": os.cpu_count() or 1,
            }
            quick = run.request.quick
            few = (Scheme.END_EDGE, *_SCHEMES)
            ends = sorted({1, run.profile.nodes.end // 2, run.profile.nodes.end} - {0})
            shorter = figure3.Chosen(
                ends=tuple(ends[-1:] if quick else ends),
                window=[busy_window(times_of(run.profile))] if quick else None,
                scheme=list(few) if quick else None,
                privacy=Privacy.AUTO,  # pixels: the time of real heads is this machine's, not the profile's
            )
            await figure3.FIGURE3.measure(run, shorter)
        real = [point for point in run.points if "part" not in point]
        for key in dict.fromkeys(_key(point) for point in real):
            n_maps = {point.get("n_map") for point in real if _key(point) == key}
            case = simulated_point(
                key,
                run.config["compared_tasks"],
                Profile.model_validate(run.config["compared_profile"]),
                n_map=n_maps.pop() if len(n_maps) == 1 else None,
                joins=max(1, _JOINED_IMAGES * run.config["compared_cores"] // BATCH),
            )
            run.add(part="validation", key=list(key), **await _simulate(case))
        for case in cases:
            label = f"{case.scheme}, {case.ends:,} end devices, {case.tasks:,} tasks"
            with run.step(label):
                run.add(part="scale", **await _simulate(case))

    def rows(self, record: Record) -> list[dict[str, Any]]:
        return [*_validated(record), *(_row(point) for point in record["points"] if point.get("part") == "scale")]

    def table(self, record: Record) -> Table:
        return Table(
            headings=(
                "fleet: ends/edges/clouds | scheme | tasks | measured, s | simulated, s | bound, s | "
                "simulated / other | decisions per CPU s | cores | messages/s | memory, MiB | CPU, s"
            ),
            spare=("messages/s", "decisions per CPU s", "cores"),
            rows=[
                *(
                    [
                        f"{row['ends']} end{'s' * (row['ends'] > 1)}, window {row['window']}",
                        row["series"],
                        str(record["config"]["compared_tasks"]),
                        f"{row['seconds']:.2f}",
                        f"{row['simulated_seconds']:.2f}",
                        "-",
                        f"{1 + row['difference']:.3f}",
                        *["-"] * 5,
                    ]
                    for row in _validated(record)
                ),
                *(
                    [
                        f"{row['ends']}/{row['edges']}/{row['clouds']}",
                        row["scheme"],
                        f"{row['tasks']:,}",
                        "-",
                        f"{row['seconds']:.1f}",
                        f"{row['bound_seconds']:.1f}",
                        f"{row['ratio']:.3f}",
                        f"{row['decisions_per_cpu_s']:,.0f}",
                        f"{row['cores']:.2f}",
                        f"{row['messages_per_s']:,.0f}",
                        f"{row['memory_bytes'] / 2**20:,.0f}",
                        f"{row['cpu_s']:.1f}",
                    ]
                    for row in self.rows(record)
                    if row["part"] == "scale"
                ),
            ],
        )

    def draw(self, record: Record, figures: Figures) -> None:
        grown = [row for row in self.rows(record) if row["part"] == "scale"]
        if grown:
            for plot, title, field, unit in (
                ("scale", "processor time", "cpu_ms_per_task", "processor time for a task (ms), nodes included"),
                ("scale-makespan", "time to finish", "ratio", "simulated / pipelined bound"),
            ):
                most = max(grown, key=lambda row: row[field])
                figure = f"{most[field]:.2f} times the bound" if field == "ratio" else f"{most[field]:.2f} ms per task"
                (axes,) = figures.panels(
                    plot,
                    [f"{title}; one simulation of each fleet"],
                    xlabel="nodes",
                    ylabel=unit,
                    finding=f"At most {figure} ({most['scheme']}, {most['nodes']:,} nodes)",
                )
                for scheme in dict.fromkeys(row["scheme"] for row in grown):
                    shown = [row for row in grown if row["scheme"] == scheme]
                    values = [row[field] for row in shown]
                    axes.plot([row["nodes"] for row in shown], values, label=scheme, **measured(figure3.LOOKS[scheme]))
                axes.set_xscale("log")
                nodes = sorted({row["nodes"] for row in grown})
                axes.set_xticks(nodes, [f"{number:,}" for number in nodes])
                axes.minorticks_off()
                axes.set_ylim(0, 1.15 * max(row[field] for row in grown))
                if field == "ratio":
                    axes.axhline(1.0, label="pipelined bound", **bound())
                axes.legend(frameon=False)
        compared = _validated(record)
        if compared:
            (axes,) = figures.panels(
                "scale-validation",
                [f"{record['config']['compared_tasks']} tasks on real services and simulated"],
                xlabel="measured (s)",
                ylabel="simulated (s)",
                finding="Simulated and measured times differ by at most {:.1%}".format(
                    max(abs(row["simulated_seconds"] / row["seconds"] - 1) for row in compared)
                ),
            )
            most = 1.1 * max(max(row["seconds"], row["simulated_seconds"]) for row in compared)
            axes.plot([0, most], [0, most], label="equal", **bound())
            axes.fill_between([0, most], [0, 0.95 * most], [0, 1.05 * most], color="#999999", alpha=0.3, label="5 %")
            for name in dict.fromkeys(row["series"] for row in compared):
                shown = [row for row in compared if row["series"] == name]
                style = {**measured(figure3.LOOKS[name]), "linestyle": ""}
                axes.plot(
                    [row["seconds"] for row in shown], [row["simulated_seconds"] for row in shown], label=name, **style
                )
            axes.legend(frameon=False)


SCALE = Scale()
