"""A fleet of 40 sites on virtual time: time to finish, what deaths cost, and the cost of the mapping.

Each site has an edge node and three end devices, and two cloud nodes belong to no site. `makespan` compares the time
that a job takes with the least time that any fixed assignment of tasks to nodes takes. `deaths` lets 200 end devices
and edge nodes fail and come back, and counts pictures that reached a node which their site does not allow. `mapping`
takes the time that the next route takes after a node of a large fleet has left.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from experiments.harness import Experiment, Options, Record, Run, Table, option
from experiments.scale.world import Case, simulate
from models.manifest import load_manifest
from scheduler.core.fleet import Ledger
from scheduler.placement.routes import Placement
from scheduler.settings import SchedulerSettings
from tierkit.types import Scheme, Share, Tier
from tierkit.wire.messages import ModelOffer, Registration

__all__ = ["SITES", "mapping_costs", "site_case"]

_SCHEMES: tuple[tuple[Scheme, int | None], ...] = ((Scheme.MAPPING, None), (Scheme.MAPPING, 1), (Scheme.ADAPTIVE, None))
"""With N_map as Eq. 4 has it, and as one would set it by hand."""
_ENDS_PER_SITE = 4
_DEATHS_PER_MINUTE = 2.5
"""Share of the nodes."""


class SiteOptions(Options):
    """Sizes of the parts."""

    tasks: int = option(12_000, "Tasks of a job.", quick=1000, min=40, max=100_000)
    deaths: int = option(200, "Nodes that fail.", quick=20, min=1, max=10_000)
    sites: int = option(1000, "Sites of the fleet whose mapping is timed, with 5 nodes each.", quick=50, max=10_000)
    changes: int = option(200, "Changes of that fleet.", quick=20, min=2, max=10_000)


def site_case(scheme: Scheme, n_map: int | None, tasks: int, *, site_jobs: bool, **more: Any) -> Case:
    """The fleet of 40 sites; `site_jobs` divides the tasks among jobs that name a site."""
    return Case(
        ends=120,
        edges=40,
        clouds=2,
        sites=40,
        site_jobs=site_jobs,
        tasks=tasks,
        job_tasks=max(1, tasks // 40) if site_jobs else tasks,
        scheme=scheme,
        n_map=n_map,
        end_s=0.1,
        edge_s=0.3,
        cloud_s=0.05,
        edge_link_s=0.02,
        cloud_link_s=0.1,
        **more,
    )


def mapping_costs(sites: int, changes: int) -> dict[str, list[float]]:
    """Seconds for the next route after each change, and for the routes of all end devices after a few of them."""
    settings = SchedulerSettings(trusted=("end", "edge", "cloud"))
    ledger, manifest = Ledger(settings.detector_times), load_manifest()
    placement = Placement(ledger, settings, manifest, b"")

    def join(node_id: str, tier: Tier, site: str | None) -> None:
        network = manifest.default_for(tier)
        offer = ModelOffer(name=network.name, sha256=network.sha256, ms_per_image=1.0)
        registration = Registration(
            node_id=node_id,
            incarnation=f"process of {node_id}"[:64],
            tier=tier,
            url="http://10.0.0.1:8071",
            models=(offer,),
            version="0",
            site=site,
        )
        ledger.register(registration, 0.0)

    for site in range(sites):
        for number in range(_ENDS_PER_SITE):
            join(f"site-{site}-end-{number}", Tier.END, f"site-{site}")
        join(f"site-{site}-edge", Tier.EDGE, f"site-{site}")
    for number in range(4):
        join(f"cloud-{number}", Tier.CLOUD, None)
    found: dict[str, list[float]] = {"one": [], "all": []}
    for change in range(changes):
        site = change * 7 % sites
        leaves = f"site-{site}-end-{change * 7 // sites % (_ENDS_PER_SITE - 1)}"
        if (device := ledger.find(leaves)) is None:
            join(leaves, Tier.END, f"site-{site}")
        else:
            ledger.leave(leaves, device.incarnation, 0.0)
        began = time.perf_counter()
        placement.route(Scheme.MAPPING, f"site-{site}-end-{_ENDS_PER_SITE - 1}", 0.0)
        found["one"].append(time.perf_counter() - began)
        if change % max(1, changes // 10) == 0:
            began = time.perf_counter()
            placement.routes(Scheme.MAPPING, 0.0)
            found["all"].append(time.perf_counter() - began)
    return found


class Sites(Experiment):
    """Jobs in a fleet of sites, deaths in it, and the cost of its mapping."""

    name = "sites"
    options = SiteOptions
    quick = "1,000 tasks rather than 12,000, 20 deaths rather than 200, 50 sites rather than 1,000"
    ignores = frozenset({"seed", "share"})
    profile = None

    async def measure(self, run: Run, chosen: SiteOptions) -> None:
        run.config |= {"tasks": chosen.tasks, "sites": chosen.sites, "changes": chosen.changes}
        run.expect(len(_SCHEMES) * 2 + len(Share) * 4 + 1)
        least = site_case(Scheme.ADAPTIVE, None, chosen.tasks, site_jobs=False)
        best_s = (await asyncio.to_thread(simulate, least))["bound_seconds"]
        for scheme, n_map in _SCHEMES:
            for site_jobs in (False, True):
                case = site_case(scheme, n_map, chosen.tasks, site_jobs=site_jobs)
                with run.step("makespan"):
                    run.add(part="makespan", best_s=best_s, **await asyncio.to_thread(simulate, case))
        for share in Share:
            for scheme in (Scheme.MAPPING, Scheme.ADAPTIVE):
                for site_jobs in (False, True):
                    case = site_case(
                        scheme,
                        None,
                        chosen.tasks // 2,
                        site_jobs=site_jobs,
                        share=share,
                        churn_per_minute=_DEATHS_PER_MINUTE,
                        most_deaths=chosen.deaths,
                    )
                    with run.step("deaths"):
                        run.add(part="deaths", **await asyncio.to_thread(simulate, case))
        with run.step("mapping"):
            costs = await asyncio.to_thread(mapping_costs, chosen.sites, chosen.changes)
            run.add(part="mapping", nodes=5 * chosen.sites + 4, **costs)

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """One row for each job, and one for the mapping."""
        return [_row(point) for point in record["points"]]

    def table(self, record: Record) -> Table:
        headings = (
            "part | scheme, N_map | jobs | share | seconds | least, s | ratio | deaths | fine answers | coarse only | "
            "lost | strays"
        )
        rows = [
            [
                point["part"],
                f"{point['scheme']}, {point['n_map'] or 'Eq. 4'}" if point["scheme"] == "mapping" else point["scheme"],
                "one for each site" if point["site_jobs"] else "one",
                point["share"],
                f"{point['seconds']:.1f}",
                f"{point['best_s']:.1f}" if "best_s" in point else "",
                f"{row['ratio']:.3f}" if "best_s" in point else "",
                f"{point['deaths']}",
                f"{row['fine']:,}",
                f"{row['fallback']:,}",
                f"{row['lost']}",
                f"{row['strays']}",
            ]
            for point, row in zip(record["points"], self.rows(record), strict=True)
            if point["part"] != "mapping"
        ]
        for row in self.rows(record):
            if row["part"] == "mapping":
                for what, ms in (("next route after a change", row["one_ms"]), ("all routes", row["all_ms"])):
                    seconds = f"{ms / 1000:.5f}"
                    rows.append([f"mapping of {row['nodes']:,} nodes, {what}", *[""] * 3, seconds, *[""] * 7])
        return Table(headings=headings, rows=rows)


def _row(point: dict[str, Any]) -> dict[str, Any]:
    if point["part"] == "mapping":
        return {
            "part": "mapping",
            "nodes": point["nodes"],
            "changes": len(point["one"]),
            "one_ms": 1000 * statistics.median(point["one"]),
            "one_most_ms": 1000 * max(point["one"]),
            "all_ms": 1000 * statistics.median(point["all"]),
        }
    answers = point["answers"]
    return {
        "part": point["part"],
        "scheme": point["scheme"],
        "n_map": point["n_map"],
        "site_jobs": point["site_jobs"],
        "share": point["share"],
        "seconds": point["seconds"],
        "ratio": point["seconds"] / point["best_s"] if "best_s" in point else None,
        "deaths": point["deaths"],
        "fine": answers.get("fine", 0),
        "fallback": answers.get("fallback", 0),
        "lost": point["tasks"] - sum(answers.values()),
        "strays": point["strays"],
    }


SITES = Sites()
