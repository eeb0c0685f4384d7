"""Releases and their roll-outs in the terminal: tables, and following a change until its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from terrace.console import Column, Listing, percent, screen
from tierkit.client import Client, GuardNow, ReleaseList, Rollout, RolloutState
from tierkit.errors import Unavailable, UpstreamError, UpstreamTimeout
from tierkit.plaintext import one_line

__all__ = ["follow_rollout", "guard_table", "limit_text", "rollout_summary", "span_text", "state_text"]

_EVERY_S = 1.0
_OUTAGE_S = 60.0
"""Seconds without a sign of the scheduler after which following ends."""

_STYLES = {
    "canary": "yellow",
    "rolling out": "yellow",
    "in force": "green",
    "done": "green",
    "rolled back": "red",
    "stopped": "red",
    "ready": "",
    "retired": "dim",
}
_VERDICTS = {"open": "", "holds": "green", "fails": "red"}


def state_text(state: str) -> Text:
    """State of a release or of a roll-out, coloured."""
    return Text(state, style=_STYLES.get(state, ""))


def span_text(seconds: float) -> str:
    """7200 as "2 h", 5400 as "1 h 30 min", 45 as "45 s"."""
    whole, units = round(seconds), ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    parts = []
    for unit, name in units:
        if whole >= unit:
            parts.append(f"{whole // unit} {name}")
            whole %= unit
    return " ".join(parts[:2]) or "0 s"


def limit_text(name: str, limit: float) -> str:
    """Limit of a guard as the option `--guard` has it."""
    match name:
        case "p99":
            return f"{limit:g}x"
        case "errors":
            return f"{100 * limit:g}%"
    return f"{limit:g}"


def rollout_summary(rollout: Rollout) -> RenderableType:
    """State of a change, its devices and the figures of its guards."""
    head = Text.assemble((rollout.release, "bold"), "  ", state_text(rollout.state))
    if rollout.reason:
        head.append(f": {one_line(rollout.reason)}")
    parts: list[RenderableType] = [head]
    if not rollout.state.final:
        parts.append(Text(_progress(rollout)))
    if rollout.guards:
        parts += [Text(), guard_table(rollout.guards)]
        if not rollout.state.final:  # at the end, the reason has the figures
            told = [
                Text(one_line(f"{each.name}: {each.detail}"), style="dim") for each in rollout.guards if each.detail
            ]
            parts += [Text(), *told]
    return Group(*parts)


def _progress(rollout: Rollout) -> str:
    devices = f"{rollout.device_count} {'device' if rollout.device_count == 1 else 'devices'}"
    said = [f"share {percent(rollout.share)} ({devices})", f"{rollout.ready} of {rollout.wanted} nodes hold it"]
    if rollout.state is RolloutState.CANARY:
        length = rollout.for_s * (2 if rollout.extended else 1)
        extended = ", extended once" if rollout.extended else ""
        said.append(f"trial {span_text(rollout.elapsed_s)} of {span_text(length)}{extended}")
    return "   ".join(said)


def guard_table(guards: tuple[GuardNow, ...]) -> Listing:
    """Return one line per guard: its limit, the figures of both releases, and the verdict so far."""
    table = Listing(
        Column(title="guard"),
        Column(title="limit", right=True),
        Column(title="old", rank=3, right=True),
        Column(title="new", rank=3, right=True),
        Column(title="value", rank=1, right=True),
        Column(title="interval", rank=4),
        Column(title="samples", rank=5, right=True),
        Column(title="verdict"),
    )
    for guard in guards:
        interval = ""
        if guard.low is not None and guard.high is not None:
            interval = f"{_value(guard.name, guard.low)} to {_value(guard.name, guard.high)}"
        table.add_row(
            guard.name,
            limit_text(guard.name, guard.limit),
            _figure(guard.name, guard.old),
            _figure(guard.name, guard.new),
            _value(guard.name, guard.value),
            interval,
            _samples(guard),
            Text(guard.verdict, style=_VERDICTS[guard.verdict]),
        )
    return table


def _samples(guard: GuardNow) -> str:
    """Samples of the new release, or of the release that lacks some."""
    if guard.samples < guard.needs:
        return f"{guard.samples:,} of {guard.needs:,}"
    if guard.name != "errors" and guard.old_samples < guard.needs:
        return f"old {guard.old_samples:,} of {guard.needs:,}"
    return f"{guard.samples:,}"


def _figure(name: str, value: float | None) -> str:
    """Figure of one release: a share, or milliseconds."""
    if name != "p99":
        return _share(value)
    return "-" if value is None else f"{value:,.2f} ms"


def _value(name: str, value: float | None) -> str:
    """Value that is compared with the limit, in the unit of the limit."""
    if name == "errors":
        return _share(value)
    if value is None:
        return "-"
    return f"{value:.2f}x" if name == "p99" else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def follow_rollout(client: Client, begun: Rollout, *, shown: bool) -> Rollout:
    """Wait until a change has ended, and return its last state.

    Args:
        shown: draw its guards on standard error meanwhile. If nothing can be drawn over, each new state is a line.

    Raises:
        Unavailable: the scheduler has been away for a minute.
        UpstreamError: the scheduler does not know the change any more.
    """
    console = screen(stderr=True)
    last = begun
    if shown and console.is_terminal and not console.is_dumb_terminal:
        with Live(rollout_summary(begun), console=console, auto_refresh=False, transient=True) as live:
            for last in _states(client, begun):
                live.update(rollout_summary(last), refresh=True)
        return last
    told = ""
    for last in _states(client, begun):
        line = f"{last.release} {last.state}, share {percent(last.share)}, {last.ready} of {last.wanted} nodes hold it"
        if shown and line != told and not last.state.final:
            told = line
            console.print(line, soft_wrap=True, markup=False)
    return last


def _states(client: Client, begun: Rollout) -> Iterator[Rollout]:
    """A change once a second, until its end."""
    pause = threading.Event()  # never set: Ctrl-C ends the wait
    away_since: float | None = None
    now = begun
    while True:
        yield now
        if now.state.final:
            return
        pause.wait(_EVERY_S)
        try:
            now = _found(client.releases(), begun)
            away_since = None
        except (Unavailable, UpstreamTimeout):
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > _OUTAGE_S:
                raise


def _found(releases: ReleaseList, begun: Rollout) -> Rollout:
    changes = (releases.rollout, *releases.history)
    for each in changes:
        if each is not None and (each.release, each.started_at) == (begun.release, begun.started_at):
            return each
    raise UpstreamError(f"the scheduler knows the change to {begun.release} no more: see 'terrace models release list'")
