"""Table 5 and figure 4 of the paper: how long a job takes when end devices fall silent in the middle of it.

Eight end devices share the test set, scheme `end`. Each of `failures` devices falls silent when it has answered half of
its share (12 tasks of 25): it is stopped (SIGSTOP), so its sockets stay open and nothing is refused. Between two runs
the stopped devices continue, and all are idle again before the next job.

The ideal time of the machines that were alive: with N_t tasks, N devices, f of which give k tasks each, and t seconds
per task, the other devices do the rest in

    (N_t - f k) / (N - f) * t

The paper's Eq. 9 is the overhead of `reassign`, which sends one task after the other: tasks that a device did not
acknowledge, times the time to notice that.
"""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from experiments.harness import MOST_RUNS, Experiment, Options, Record, Run, Table, cell, grouped, option
from experiments.plots import Figures, averaged, bound, draw_ranges, formula, measured, paper
from experiments.profile import NodeNumbers
from experiments.record import spread
from experiments.testbed import BATCH, read_metrics, task_s, wait_for_devices
from models.data import ImageSet
from tierkit.client import AsyncClient, Device, Job, JobState
from tierkit.errors import InvalidInput
from tierkit.fleet import SCHEDULER, Fleet
from tierkit.types import Health, Recovery, Scheme, Tier

__all__ = ["FIGURE4", "PAPER_S", "TABLE5", "Chosen", "ideal_s"]

PAPER_S: Mapping[str, Sequence[float | None]] = {
    "none": (24.9, None, None, None, None, None, None),
    "reassign": (25.7, 33.7, 43.2, 65.2, 92.8, 138.0, 226.0),
    "monitor": (26.4, 27.2, 27.3, 27.7, 28.0, 30.7, 38.3),
}
"""The paper's Table 5, by number of failures; None where the job did not end."""

COMMUNICATION_S = 0.5
"""Seconds to connect to a device and receive its acknowledgement (t_comm of Eq. 9)."""

_MOST_FAILURES = 6
_JOB_BUDGET_S = 900.0
_LOG_FROM = 4.0
"""Times that lie closer together are drawn on a linear scale, where they can be read."""
_TICKS_S = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_ATTEMPTS = re.compile(r'^terrace_scheduler_attempts_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
_LATE = re.compile(r"(\S+) is suspect: \1 did not acknowledge")
_UNACKNOWLEDGED = "unreachable"
"""Outcome of an attempt that its device did not acknowledge, in the scheduler's words."""


def ideal_s(tasks: int, devices: int, failures: int, given: int, task_seconds: float) -> float:
    """Seconds that the devices which stay alive need at least for what is left to them (see the module).

    Args:
        given: tasks that a device answers before it falls silent.
    """
    return (tasks - failures * given) / (devices - failures) * task_seconds


# --- measuring ------------------------------------------------------------------------------------------------------


class Chosen(Options):
    """Cells to measure, and the number of runs."""

    runs: int = option(5, "Runs of each cell.", quick=1, min=1, max=MOST_RUNS)
    failures: NodeNumbers | None = option(None, "Numbers of devices that fall silent. Default: 0 to 6.")
    method: list[Recovery] | None = option(None, "Only this method; may be repeated.")


class _Silence:
    """Stops end devices (SIGSTOP) as soon as their logs say that they have answered a number of tasks."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None
        self.late_answers = 0
        """Number of times that a live device did not acknowledge a task in time, because the machine is too busy."""
        self._left: dict[str, int] = {}

    def after(self, given: int, doomed: Sequence[str]) -> None:
        """Silence these devices after `given` tasks each."""
        self.late_answers = 0
        self._left = dict.fromkeys(doomed, given)

    def watch(self, name: str, line: str) -> None:
        """Take a line that a service wrote."""
        if name in self._left and " task done " in line:
            self._left[name] -= 1
            if self._left[name] == 0:
                self._send(name, signal.SIGSTOP)
        elif name == SCHEDULER and (found := _LATE.search(line)) and self._left.get(found[1], 1) > 0:
            self.late_answers += 1

    def end(self) -> None:
        """Let all stopped devices continue."""
        for name in self._left:
            self._send(name, signal.SIGCONT)
        self._left = {}

    def _send(self, name: str, number: signal.Signals) -> None:
        if self.fleet is not None and self.fleet.services[name].alive:
            self.fleet.services[name].process.send_signal(number)


async def _one_job(client: AsyncClient, images: ImageSet, method: Recovery) -> tuple[Job, dict[str, int]]:
    """One job to its end, and the scheduler's attempts for it by outcome."""
    before = await _attempts(client.url)
    job = await client.submit(images.images, scheme=Scheme.END, recovery=method, batch_size=BATCH, name=method)
    job = await client.wait(job, budget_s=_JOB_BUDGET_S)
    after = await _attempts(client.url)
    return job, {outcome: after[outcome] - before[outcome] for outcome in sorted(after)}


async def _attempts(url: str) -> Counter[str]:
    """Number of attempts that the scheduler has made, by outcome."""
    return Counter({outcome: int(float(count)) for outcome, count in _ATTEMPTS.findall(await read_metrics(url))})


async def _all_idle(client: AsyncClient, devices: int) -> None:
    """Wait until every device is alive and has nothing left of the job before."""

    def lacking(listed: Sequence[Device]) -> str:
        alive = [device for device in listed if device.health is Health.ALIVE and device.reached]
        idle = sum(not device.outstanding + device.queued_images for device in alive)
        return "" if idle == devices else f"only {idle} of {devices} end devices are ready"

    await wait_for_devices(client, lacking)


# --- from the record ------------------------------------------------------------------------------------------------


def _row(points: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """One cell of the table; `seconds` is the mean of its runs, None where a job did not complete."""
    method, failures = points[0]["method"], points[0]["failures"]
    failed = [point for point in points if point["state"] != JobState.COMPLETED]
    times = spread([point["seconds"] for point in points])
    unacknowledged = spread([point["attempts"].get(_UNACKNOWLEDGED, 0) for point in points]).mean
    alone_s = ideal_s(config["tasks"], config["devices"], failures, config["given"], config["task_s"])
    papers = PAPER_S[method]
    return {
        "method": method,
        "failures": failures,
        "seconds": None if failed else round(times.mean, 3),
        "ideal_seconds": round(alone_s, 3),
        "runs": len(points),
        "min_seconds": None if failed else times.minimum,
        "max_seconds": None if failed else times.maximum,
        "ratio": None if failed else round(times.mean / alone_s, 3),
        "unacknowledged_sends": unacknowledged,
        "eq9_seconds": round(unacknowledged * config["communication_s"], 3),
        "failed_after_seconds": round(times.mean, 3) if failed else None,
        "reason": failed[0]["reason"] if failed else "",
        "paper_seconds": papers[failures] if _is_papers(config) and failures < len(papers) else None,
    }


def _is_papers(config: Mapping[str, Any]) -> bool:
    """True if this is the paper's job on the paper's machines, so that the figures can be compared."""
    return (config["tasks"], config["devices"], config["task_s"]) == (200, 8, 0.3705)


def _seconds(row: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    if row is None:
        return "-"
    theirs = f" ({'Inf' if row['paper_seconds'] is None else row['paper_seconds']})" if _is_papers(config) else ""
    if row["seconds"] is None:
        return f"failed after {row['failed_after_seconds']:.1f}{theirs}"
    spread_text = f" [{row['min_seconds']:.1f}, {row['max_seconds']:.1f}]" if row["runs"] > 1 else ""
    return f"{row['seconds']:.1f}{spread_text}{theirs}"


class Table5(Experiment):
    """Time to finish against the number of end devices that fall silent, with three methods."""

    name = "table5"
    options = Chosen
    quick = "{share}"

    async def measure(self, run: Run, chosen: Chosen) -> None:
        runs, profile = chosen.runs, run.profile.with_nodes(edge=0, cloud=0)
        devices, seconds = profile.nodes.end, task_s(profile, Tier.END)
        failures = range(min(_MOST_FAILURES + 1, devices)) if chosen.failures is None else chosen.failures
        if max(failures) >= devices:
            raise InvalidInput(f"of {devices} end devices at most {devices - 1} can fail, not {max(failures)}")
        given = run.tasks // devices // 2  # half of its share: 12 of 25
        run.config |= {
            "runs": runs,
            "devices": devices,
            "task_s": seconds,
            "given": given,
            "communication_s": COMMUNICATION_S,
        }
        turns = list(product(range(runs), failures, chosen.method or tuple(Recovery)))
        run.expect(len(turns))
        networks = await run.networks(profile)
        silence, settings = _Silence(), {"acknowledge_s": COMMUNICATION_S}
        # `_Silence` counts the lines about single tasks.
        nodes = {f"{Tier.END}-{number + 1}": {"log_level": "debug"} for number in range(devices)}
        async with run.fleet(profile, networks, settings, nodes, watch=silence.watch) as (fleet, client):
            silence.fleet = fleet
            ends = [node.name for node in fleet.plan.nodes]
            for repeat, number, method in turns:
                doomed = random.Random(f"{run.request.seed}/{repeat}/{number}").sample(ends, number)
                with run.step(f"{method}, {number} failures, run {repeat + 1} of {runs}"):
                    silence.after(given, doomed)
                    try:
                        job, attempts = await _one_job(client, run.images, method)
                    finally:
                        silence.end()
                    await _all_idle(client, devices)
                answered = {name: share.coarse_images for name, share in sorted(job.by_node.items())}
                late = [name for name in doomed if answered.get(name, 0) != given * BATCH]
                if late:
                    run.note(
                        f"left out: {method}, {number} failures, run {repeat + 1}: {', '.join(late)} fell silent too "
                        "late"
                    )
                if silence.late_answers:
                    run.note(
                        f"{method}, {number} failures, run {repeat + 1}: {silence.late_answers} times a device that "
                        f"lived did not acknowledge a task within {COMMUNICATION_S:g} s, so this machine was too busy"
                    )
                run.add(
                    method=method,
                    failures=number,
                    repeat=repeat,
                    doomed=doomed,
                    state=job.state,
                    reason=job.reason,
                    seconds=job.elapsed_s,
                    answered_images=job.answered_coarse,
                    images_by_node=answered,
                    valid=not late,
                    late_answers=silence.late_answers,
                    attempts=attempts,
                )

    def rows(self, record: Record) -> list[dict[str, Any]]:
        """Rows of the runs in which everything happened as planned. The record's notes name the others."""
        cells = grouped((point for point in record["points"] if point["valid"]), "method", "failures")
        ranked = sorted(cells, key=lambda cell: (list(PAPER_S).index(cell[0]), cell[1]))
        return [_row(cells[cell], record["config"]) for cell in ranked]

    def table(self, record: Record) -> Table:
        config = record["config"]
        theirs = " (paper)" if _is_papers(config) else ""
        cells = {(row["method"], row["failures"]): row for row in self.rows(record)}
        rows = []
        for failures in sorted({failures for _, failures in cells}):
            none, reassign, monitor = (cells.get((method, failures)) for method in PAPER_S)
            some = none or reassign or monitor
            assert some is not None
            rows.append(
                [
                    str(failures),
                    _seconds(none, config),
                    _seconds(reassign, config),
                    "-" if reassign is None else f"{reassign['ideal_seconds'] + reassign['eq9_seconds']:.1f}",
                    _seconds(monitor, config),
                    f"{some['ideal_seconds']:.1f}",
                    cell(monitor["ratio"] if monitor else None, ".2f"),
                ]
            )
        return Table(
            headings=f"failures | none, s{theirs} | reassign, s{theirs} | ideal + Eq. 9, s | monitor, s{theirs} | "
            "ideal, s | monitor / ideal",
            rows=rows,
        )

    def draw(self, record: Record, figures: Figures) -> None:
        rows, config = self.rows(record), record["config"]
        if not rows:  # every run was left out
            return
        n = averaged(row["runs"] for row in rows)
        title = f"{config['tasks']} tasks on {config['devices']} end devices; {n}"
        ratios = [row["ratio"] for row in rows if row["method"] == Recovery.MONITOR and row["ratio"] is not None]
        (axes,) = figures.panels(
            "figure4",
            [title],
            xlabel="end devices that fall silent",
            ylabel="time to finish (s)",
            finding=f"monitor takes at most {max(ratios):.2f} times the ideal time" if ratios else "",
        )
        for number, method in enumerate(PAPER_S):
            shown = [row for row in rows if row["method"] == method and row["seconds"] is not None]
            if shown:
                of_runs = ("failures", "seconds", "min_seconds", "max_seconds")
                draw_ranges(axes, shown, of_runs, capsize=3, label=method, **measured(number))
            if _is_papers(config) and (known := [(f, s) for f, s in enumerate(PAPER_S[method]) if s is not None]):
                axes.plot(*zip(*known, strict=True), label=f"{method}, paper", **paper(number))
        if reassigned := [row for row in rows if row["method"] == Recovery.REASSIGN]:
            sums = [row["ideal_seconds"] + row["eq9_seconds"] for row in reassigned]
            axes.plot([row["failures"] for row in reassigned], sums, label="ideal + Eq. 9", **formula(1))
        alone = {row["failures"]: row["ideal_seconds"] for row in rows}
        # A line through one point would not be seen.
        looks = bound() if len(alone) > 1 else {**bound(), "marker": "D", "markersize": 6}
        axes.plot(sorted(alone), [alone[failures] for failures in sorted(alone)], label="ideal", **looks)
        axes.set_xticks(sorted(alone | dict.fromkeys(range(len(PAPER_S["none"])) if _is_papers(config) else ())))
        low, high = axes.dataLim.intervaly
        if high > _LOG_FROM * low:
            axes.set_yscale("log")
            limits = axes.get_ylim()
            axes.set_yticks(_TICKS_S, [f"{tick:g}" for tick in _TICKS_S])
            axes.minorticks_off()
            axes.set_ylim(limits)
        else:
            axes.set_ylim(0, 1.1 * high)
        axes.legend(frameon=False)


TABLE5 = Table5()


class Figure4(Table5):
    __doc__ = Table5.__doc__

    name = "figure4"


FIGURE4 = Figure4()
