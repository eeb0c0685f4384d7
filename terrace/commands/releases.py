"""`terrace models release`: which networks answer, and changing them on a running fleet."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from models.manifest import load_manifest, parse_manifest
from terrace.commands.token import span
from terrace.console import Column, Listing, percent, print_json, screen, tier_text
from terrace.options import Json, connected
from terrace.release_differences import Difference, NetworkFacts, difference
from terrace.rollouts import follow_rollout, limit_text, rollout_summary, span_text, state_text
from tierkit.client import Client, GuardName, Pruned, ReleaseList, ReleaseNow, Rollout, RolloutState

__all__ = ["app", "guards_of", "share_of"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Make releases of networks, try them on a part of the fleet, and return to an earlier one.",
)

Ref = Annotated[str, typer.Argument(metavar="RELEASE", help="NAME@NUMBER, or the number.", show_default=False)]
Follow = Annotated[
    bool, typer.Option("--follow", help="Wait for the end; exit code 1 unless all nodes got the release.")
]

_GUARDS: dict[str, GuardName] = {"agreement": "agreement", "p99": "p99", "errors": "errors"}
_NUMBER = r"([0-9]{1,6}(?:\.[0-9]{1,6})?)"
_FORMS = {"agreement": rf"{_NUMBER}(%?)", "p99": rf"{_NUMBER}(x)", "errors": rf"{_NUMBER}(%)"}
_EXAMPLES = {"agreement": "agreement=0.97", "p99": "p99=1.3x", "errors": "errors=0.5%"}
_SHORT = 12
"""Characters of a sha256 that tables show."""
_LEAST_DETAIL = 30
_LONGEST_TRIAL_S = 30 * 24 * 3600


def share_of(text: str, hint: str) -> float:
    """Return "10%" as 0.1; more than 0 and less than 100 %."""
    found = re.fullmatch(rf"{_NUMBER}%", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share < 1:
        raise typer.BadParameter(
            f"it is a share of the end devices such as 10%, between 0% and 100%, not {text[:40]!r}", param_hint=hint
        )
    return share


def guards_of(texts: Sequence[str]) -> dict[GuardName, float]:
    """Return limits by name for "agreement=0.97", "p99=1.3x" and "errors=0.5%"."""
    limits: dict[GuardName, float] = {}
    for text in texts:
        given, _, value = text.partition("=")
        if (name := _GUARDS.get(given)) is None:
            known = ", ".join(_EXAMPLES.values())
            raise typer.BadParameter(f"unknown guard {text[:40]!r}; there are {known}", param_hint="--guard")
        if name in limits:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--guard")
        found = re.fullmatch(_FORMS[name], value)
        limit = float(found[1]) / (100 if found[2] == "%" else 1) if found else 0.0
        if limit <= 0 or (name != "p99" and limit > 1):
            raise typer.BadParameter(
                f"wrong limit {text[:40]!r}: write it like {_EXAMPLES[name]}", param_hint="--guard"
            )
        limits[name] = limit
    return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of `terrace models release start`."""

    canary: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of the end devices, and of new jobs, that try it.")
    ] = "10%"
    guard: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LIMIT",
            help="Condition that rolls it back; may be repeated. Default: agreement=0.97, p99=1.3x and errors=0.5%.",
        ),
    ] = None
    length: Annotated[str, typer.Option("--for", metavar="SPAN", help="Length of the trial, such as 30m or 2h.")] = "2h"

    def fields(self) -> dict[str, Any]:
        """Return the arguments of the client."""
        share, guards = share_of(self.canary, "--canary"), guards_of(self.guard or ())
        try:
            for_s = span(self.length, longest_s=_LONGEST_TRIAL_S).total_seconds()
        except typer.BadParameter as exc:
            raise typer.BadParameter(exc.message, param_hint="--for") from exc
        return {"canary": share, "guards": guards or None, "for_s": for_s}


@app.command()
@connected
def create(
    client: Client,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the release.", show_default=False)],
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="SET", file_okay=False, help="Model set, whose files are sent. Default: the scheduler's own folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a release of a model set. It answers nothing until it is started or promoted."""
    if models is not None:
        load_manifest(models)  # a wrong one is refused before anything is sent
    release = client.create_release(name, models)
    if json:
        print_json(release)
        return
    screen().print(f"{release.release}: {_content_text(release)}", soft_wrap=True, markup=False)
    if release.state not in ("in force", "canary", "rolling out"):
        _note(f"try it: terrace models release start {release.release}")


@app.command("list")
@connected
def list_releases(client: Client, json: Json = False) -> None:
    """The releases, the newest first."""
    found = client.releases()
    if json:
        print_json(found)
        return
    table = Listing(
        Column(title="release"),
        Column(title="state", rank=1),
        Column(title="nodes", rank=2, right=True),
        Column(title="jobs", rank=3, right=True),
        Column(title="networks", rank=4, max_width=60),
        Column(title="made", rank=5),
        Column(title="by", rank=6),
        Column(title="troubles", rank=2, max_width=60),
    )
    for release in found.releases:
        table.add_row(
            release.release,
            state_text(release.state),
            f"{release.nodes:,}",
            f"{release.jobs:,}",
            ", ".join(network.name for network in release.networks),
            f"{release.created_at.astimezone():%Y-%m-%d %H:%M}",
            release.created_by or release.origin,
            "; ".join(f"{each.node_id}: {each.kind}" for each in release.troubles),
        )
    screen().print(table, crop=False)
    if found.rollout is not None:
        screen().print()
        screen().print(rollout_summary(found.rollout), crop=False)


@app.command()
@connected
def show(client: Client, release: Ref, json: Json = False) -> None:
    """Show one release: its networks, the nodes that hold or cannot hold them, and the guards of its trial."""
    now = client.release(release)
    rollout = _latest(client.releases(), now.release)
    if json:
        print_json({"release": now, "rollout": rollout})
        return
    console = screen()
    head = Text.assemble((now.release, "bold"), "  ", state_text(now.state))
    made = f"made {now.created_at.astimezone():%Y-%m-%d %H:%M}"
    made += f" by {now.created_by}" * bool(now.created_by) + f" from {now.origin}" * bool(now.origin)
    console.print(head.append(f"   {made}"), soft_wrap=True)
    console.print(
        f"{_content_text(now)}   nodes {now.nodes:,}   unfinished jobs {now.jobs:,}", soft_wrap=True, markup=False
    )
    console.print(_networks_table(now), crop=False)
    if now.encoders:
        _note(f"encoders: {', '.join(now.encoders)}")
    if now.troubles:
        table = Listing(
            Column(title="node"), Column(title="trouble", rank=1), Column(title="detail", least=_LEAST_DETAIL)
        )
        for each in now.troubles:
            table.add_row(each.node_id, Text(each.kind, style="red"), each.detail)
        console.print()
        console.print(table, crop=False)
    if rollout is not None and rollout.kind != "first":
        console.print()
        console.print(rollout_summary(rollout), crop=False)


@app.command()
@connected
def diff(
    client: Client,
    old: Annotated[str, typer.Argument(metavar="A", help="NAME@NUMBER, or the number.", show_default=False)],
    new: Annotated[str, typer.Argument(metavar="B", help="NAME@NUMBER, or the number.", show_default=False)],
    json: Json = False,
) -> None:
    """Compare two releases: networks, accuracies, thresholds, encoders and classes."""
    a, b = client.release(old), client.release(new)
    before, after = (
        parse_manifest(dumps(client.release_manifest(each.release)).encode(), f"of {each.release}") for each in (a, b)
    )
    found = difference(a, before, b, after)
    if json:
        print_json(found)
        return
    if found.none:
        screen().print(f"{a.release} and {b.release} have the same content", soft_wrap=True, markup=False)
        return
    if found.networks:
        screen().print(_diff_table(found), crop=False)
    for change in found.encoders:
        screen().print(f"encoder {change.encoder}: {change.change}", soft_wrap=True, markup=False)
    sentences = {"accuracies": found.accuracies, "thresholds": found.thresholds, "classes": found.classes}
    for name, sentence in sentences.items():
        if sentence:
            screen().print(f"{name}: {sentence}", soft_wrap=True, markup=False)


@app.command()
@connected
def start(client: Client, release: Ref, trial: TrialOptions, follow: Follow = False, json: Json = False) -> None:
    """Try a release on a part of the end devices: it rolls out to all if the guards hold, and back if one fails."""
    rollout = client.start_release(release, **trial.fields())
    if follow or json:
        _finish(client, rollout, follow=follow, json=json)
        return
    guards = ", ".join(f"{guard.name}={limit_text(guard.name, guard.limit)}" for guard in rollout.guards)
    screen().print(
        f"{rollout.release} is tried on {percent(rollout.canary)} of the end devices for {span_text(rollout.for_s)}"
        f" ({guards})",
        soft_wrap=True,
        markup=False,
    )
    _note(f"see how it does: terrace models release show {rollout.release}")


@app.command()
@connected
def promote(client: Client, release: Ref, follow: Follow = False, json: Json = False) -> None:
    """Give a release to all nodes at once, without a trial."""
    _finish(client, client.promote_release(release), follow=follow, json=json)


@app.command()
@connected
def stop(client: Client, release: Ref, json: Json = False) -> None:
    """End the trial of a release; the present one answers everywhere."""
    _finish(client, client.stop_release(release), follow=False, json=json)


@app.command()
@connected
def rollback(
    client: Client,
    release: Annotated[
        str | None,
        typer.Argument(
            metavar="[RELEASE]",
            help="The release to leave. Default: the release that rolls out now, otherwise the release in force.",
            show_default=False,
        ),
    ] = None,
    follow: Follow = False,
    json: Json = False,
) -> None:
    """Return all nodes to the previous release."""
    _finish(client, client.roll_back(release), follow=follow, json=json)


@app.command()
@connected
def prune(
    client: Client,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    json: Json = False,
) -> None:
    """Remove releases and networks that nothing refers to; shows them first, and asks."""
    found = client.prune_releases(dry_run=True)
    if json:
        print_json(client.prune_releases(dry_run=False) if yes else found)
        return
    if not found.releases and not found.files:
        screen().print("nothing to remove")
        return
    if not yes:
        _show_pruned(found, "would remove")
        if not sys.stdin.isatty():
            _note("remove them with --yes")
            return
        typer.confirm("Remove them?", abort=True)
    _show_pruned(client.prune_releases(dry_run=False), "removed")


def _finish(client: Client, rollout: Rollout, *, follow: bool, json: bool) -> None:
    """Show what came of a change, at its end if it is followed."""
    followed = follow and not rollout.state.final
    if followed:
        try:
            rollout = follow_rollout(client, rollout, shown=not json)
        except KeyboardInterrupt:
            typer.echo(f"it continues without us: terrace models release show {rollout.release}", err=True)
            raise
    if json:
        print_json(rollout)
    else:
        screen().print(rollout_summary(rollout), crop=False)
    if followed and rollout.state is not RolloutState.DONE:
        raise typer.Exit(1)


def _latest(found: ReleaseList, release: str) -> Rollout | None:
    changes = (found.rollout, *found.history)
    return next((each for each in changes if each is not None and each.release == release), None)


def _show_pruned(pruned: Pruned, did: str) -> None:
    names = ", ".join(pruned.releases) or "no release"
    count = len(pruned.files)
    files = f"{count} {'network' if count == 1 else 'networks'} ({pruned.bytes / 1e6:.1f} MB)"
    screen().print(f"{did} {names}, and {files}", soft_wrap=True, markup=False)
    for sha256 in pruned.files:
        _note(sha256)


def _content_text(release: ReleaseNow) -> str:
    """Networks, classes and thresholds in a few words."""
    networks = len(release.networks)
    thresholds = ", tuned thresholds" if release.thresholds else ""
    return f"{networks} {'network' if networks == 1 else 'networks'}, {release.classes:,} classes{thresholds}"


def _networks_table(release: ReleaseNow) -> Listing:
    table = Listing(
        Column(title="tier", rank=2),
        Column(title="network"),
        Column(title="answers", rank=4),
        Column(title="sha256", rank=1),
        Column(title="MB", rank=5, right=True),
        Column(title="accuracy", rank=3, right=True),
        Column(title="nodes", rank=1, right=True),
    )
    for network in release.networks:
        table.add_row(
            tier_text(f"{network.tier} with a GPU" if network.gpu else network.tier, network.tier),
            network.name,
            network.target,
            network.sha256[:_SHORT],
            f"{network.size_bytes / 1e6:.1f}",
            _accuracy(network.accuracy, network.test_images),
            f"{network.nodes:,}",
        )
    return table


def _diff_table(found: Difference) -> Listing:
    table = Listing(
        Column(title="tier", rank=3),
        Column(title="network"),
        Column(title="change", rank=1),
        *(
            column
            for release in (found.a, found.b)
            for column in (
                Column(title=release, rank=2),
                Column(title="MB", rank=5, right=True),
                Column(title="accuracy", rank=4, right=True),
            )
        ),
    )
    for each in found.networks:
        table.add_row(tier_text(each.tier, each.tier), each.network, each.change, *_side(each.a), *_side(each.b))
    return table


def _side(facts: NetworkFacts | None) -> tuple[str, str, str]:
    if facts is None:
        return "", "", ""
    return facts.sha256[:_SHORT], f"{facts.size_bytes / 1e6:.1f}", _accuracy(facts.accuracy, facts.test_images)


def _accuracy(accuracy: float | None, images: int) -> str:
    """An accuracy, and the number of pictures on which it was measured."""
    return percent(accuracy) + (f" of {images:,}" if accuracy is not None and images else "")


def _note(text: str) -> None:
    screen().print(text, style="dim", markup=False, soft_wrap=True)
