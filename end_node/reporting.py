"""Reports on the sources of a device: for programs on the device, and for the scheduler with each batch."""

from __future__ import annotations

from collections.abc import Iterable

from end_node.sources.keeper import SourceKeeper
from end_node.spool import SpoolStats
from end_node.uplink.sending import Uplink
from tierkit.plaintext import without_passwords
from tierkit.wire.learning import KeptState
from tierkit.wire.observations import DeviceStatus, KeptReport, ReportedSource
from tierkit.wire.sources import SourcesReport, SourceState, SpoolState, UplinkState

__all__ = ["device_status", "report_of", "reported_sources"]

_MOST_REASON = 500
"""Characters of a reason that the scheduler is sent."""

_SOON_S = 5.0


def report_of(
    keepers: Iterable[SourceKeeper], stats: SpoolStats, uplink: Uplink, bytes_per_day: int | None
) -> SourcesReport:
    """The state of the sources, of the spool and of the uplink."""
    states = []
    for keeper in keepers:
        status = keeper.status
        states.append(
            SourceState(
                name=status.name,
                kind=status.kind,
                url=without_passwords(keeper.settings.url),
                state=status.state,
                reason=status.reason,
                taken=status.taken,
                skipped=status.skipped,
                restarts=status.restarts,
                last_s=status.last_picture_s,
            )
        )
    pace, route = uplink.pace, uplink.route
    return SourcesReport(
        sources=tuple(states),
        spool=SpoolState(
            bytes=stats.bytes_used,
            size_bytes=stats.size_bytes,
            waiting_bytes=stats.waiting_bytes,
            room_bytes=stats.room_bytes,
            waiting_answers=stats.undelivered,
            waiting_pictures=stats.waiting + stats.owed,
            dropped_pictures=stats.dropped_sure + stats.dropped_unsure,
            lost_answers=stats.lost,
            set_aside=", ".join(map(str, stats.set_aside)) or None,
        ),
        uplink=UplinkState(
            online=uplink.online,
            reason=uplink.reason or uplink.trouble or _next_batch(pace.answers_in_s(stats.undelivered), stats),
            route=None if route is None else route.version,
            spent_bytes=pace.spent_bytes,
            bytes_per_day=bytes_per_day,
            open=pace.open,
        ),
    )


def device_status(report: SourcesReport, kept: KeptState | None, *, in_batch: int) -> DeviceStatus:
    """The part of a report that the scheduler is sent.

    Args:
        kept: the kept sample; None if the device keeps nothing.
        in_batch: waiting answers that the same batch holds.
    """
    spool, uplink = report.spool, report.uplink
    assert spool is not None
    assert uplink is not None
    return DeviceStatus(
        sources=tuple(_reported(each.name, each.state, each.reason) for each in report.sources),
        waiting_answers=spool.waiting_answers - in_batch,
        waiting_pictures=spool.waiting_pictures,
        lost_answers=spool.lost_answers,
        dropped_pictures=spool.dropped_pictures,
        spool_bytes=spool.waiting_bytes,
        spool_size_bytes=spool.room_bytes,
        spent_bytes=uplink.spent_bytes,
        bytes_per_day=uplink.bytes_per_day,
        kept=None if kept is None else _kept(kept),
    )


def _kept(kept: KeptState) -> KeptReport:
    reasons = {name: getattr(kept, name)[:_MOST_REASON] for name in ("reason", "personal_reason")}
    return KeptReport(**kept.model_dump() | reasons)


def reported_sources(keepers: Iterable[SourceKeeper]) -> tuple[ReportedSource, ...]:
    """The states of the sources, equal to those in `device_status` at the same moment."""
    statuses = [keeper.status for keeper in keepers]
    return tuple(_reported(status.name, status.state, status.reason) for status in statuses)


def _reported(name: str, state: str, reason: str) -> ReportedSource:
    return ReportedSource(name=name, state=state, reason=reason[:_MOST_REASON])


def _next_batch(wait_s: float, stats: SpoolStats) -> str:
    """The reason why answers wait, if the next batch is more than a moment away."""
    return f"answers go in batches, the next one in {wait_s:.0f} s" if stats.undelivered and wait_s > _SOON_S else ""
