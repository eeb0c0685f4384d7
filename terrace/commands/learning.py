"""`terrace learning`: kept pictures, agreement of the tiers, and improvements of releases."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from terrace.console import Column, Listing, age_text, percent, print_json, screen
from terrace.options import Json, connected
from tierkit.client import Client, Improvement, LearningNow, NodeLearning

__all__ = ["app"]

app = typer.Typer(add_completion=False)

_MB = 1_000_000
_SILENT_S = 120.0
"""A command that is at work says so every few seconds."""


@app.command()
@connected
def learning(client: Client, json: Json = False) -> None:
    """Show the pictures that devices keep for learning, the agreement of the tiers, and the improvements of
    releases."""
    now, improvements = client.learning(), client.improvements()
    if json:
        print_json(
            {**now.model_dump(mode="json"), "improvements": [each.model_dump(mode="json") for each in improvements]}
        )
        return
    screen().print(_summary(now), soft_wrap=True, markup=False)
    if now.nodes:
        screen().print(_nodes(now.nodes), crop=False)
    if improvements:
        screen().print(_improvements(improvements), crop=False)


def _summary(now: LearningNow) -> str:
    agreement = "no audited pictures yet" if now.agreement is None else f"the tiers agree on {percent(now.agreement)}"
    pictures = "picture" if now.audited == 1 else "pictures"
    audited = f" of {now.audited:,} audited {pictures}" if now.audited else ""
    return f"{agreement}{audited}; {now.labels:,} labelled"


def _nodes(nodes: tuple[NodeLearning, ...]) -> Listing:
    table = Listing(
        Column(title="node"),
        Column(title="agree", right=True),
        Column(title="audited", rank=3, right=True),
        Column(title="kept", right=True),
        Column(title="differ", rank=2, right=True),
        Column(title="unsure", rank=2, right=True),
        Column(title="sure", rank=4, right=True),
        Column(title="labelled", rank=3, right=True),
        Column(title="MB", rank=4, right=True),
        Column(title="head", rank=3),
        Column(title="remark", rank=1, max_width=48),
    )
    for each in nodes:
        kept = each.kept
        counts = [] if kept is None else [kept.pictures, kept.differs, kept.unsure, kept.sure, kept.labelled]
        table.add_row(
            each.node,
            "" if each.agreement is None else percent(each.agreement),
            f"{each.audited:,}",
            *([""] * 5 if kept is None else [f"{count:,}" for count in counts]),
            "" if kept is None else f"{kept.bytes / _MB:,.1f} of {kept.size_bytes / _MB:,.1f}",
            "own" if kept is not None and kept.personal else "",
            "keeps no pictures" if kept is None else "; ".join(filter(None, (kept.reason, kept.personal_reason))),
        )
    return table


def _state(improvement: Improvement, now: datetime) -> str:
    """Return the state, and the seconds of silence of an improvement that should be under way."""
    told_at = improvement.told_at
    if improvement.state not in ("training", "evaluating") or told_at is None:
        return improvement.state
    silent_s = (now - told_at).total_seconds()
    return improvement.state if silent_s < _SILENT_S else f"{improvement.state}, silent for {age_text(silent_s)}"


def _improvements(improvements: tuple[Improvement, ...]) -> Listing:
    table = Listing(
        Column(title="improvement of"),
        Column(title="tier", rank=3),
        Column(title="state"),
        Column(title="made", rank=1),
        Column(title="devices", rank=4, right=True),
        Column(title="rounds", rank=4, right=True),
        Column(title="begun", rank=2),
        Column(title="by", rank=5),
        Column(title="remark", rank=2, max_width=48),
    )
    for each in improvements:
        begun = each.created_at
        table.add_row(
            each.release,
            each.tier,
            _state(each, datetime.now(UTC)),
            each.new_release or "",
            f"{each.devices:,}",
            f"{each.rounds:,}",
            "" if begun is None else begun.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ"),
            each.by or "",
            each.reason,
        )
    return table
