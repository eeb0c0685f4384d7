"""Checks of `terrace doctor` on releases: whether the right networks answer, and why not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from models.manifest import load_manifest
from terrace.findings import Check, CheckVerdict, short_digest
from terrace.rollouts import span_text
from tierkit.client import Client, Device, ReleaseList, ReleaseNow, Rollout
from tierkit.errors import NotFound, SetupError
from tierkit.wire.releases import ReleaseState

__all__ = ["FleetNetworks", "check_networks_of", "check_releases", "check_set", "networks_now"]

_GROUP = "fleet"
_RECENTLY = timedelta(days=1)
_HANGS_AFTER = timedelta(minutes=15)
_UNDER_WAY = (ReleaseState.CANARY, ReleaseState.ROLLING)

_ADVICE = {
    "room": "free some of its disk, or give it another --cache; it tries again by itself",
    "unusable": "see the reason in its log; terrace models release rollback returns to the release before",
    "unreachable": "look at its log, and at the network between it and the scheduler; it tries again by itself",
    "differs": "its hardware or its runtime computes something else, so it gets no work: look at its log, restart it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNetworks:
    """Networks that a fleet may serve."""

    offered: Mapping[str, str]
    """sha256 by name: networks and encoders' tails of the release in force."""
    releases: ReleaseList | None
    """None for a scheduler of an older version."""

    @property
    def in_force(self) -> str:
        """Name of the release in force."""
        return self.releases.in_force if self.releases else "the scheduler's set"

    @property
    def known(self) -> set[str]:
        """sha256 of all networks of all releases."""
        releases = self.releases.releases if self.releases else ()
        return {*self.offered.values(), *(network.sha256 for each in releases for network in each.networks)}


def networks_now(client: Client) -> FleetNetworks:
    """Ask a scheduler for its networks and releases."""
    offered = _names_and_digests(client.models())
    try:
        return FleetNetworks(offered=offered, releases=client.releases())
    except NotFound:
        return FleetNetworks(offered=offered, releases=None)


def _names_and_digests(manifest: Mapping[str, Any]) -> dict[str, str]:
    """sha256 by name of the networks and encoders' tails of a manifest."""
    tails = {f"{one['network']}.{one['kind']}": one["tail"]["sha256"] for one in manifest.get("encoders", ())}
    return tails | {one["name"]: one["sha256"] for one in manifest["models"]}


def check_set(networks: FleetNetworks, models: Path) -> Iterator[Check]:
    """Compare the release in force with a model set."""
    try:
        manifest = load_manifest(models)
    except SetupError:
        return  # reported by the check of the set
    offered, there = networks.offered, _names_and_digests(manifest.content())
    differing = sorted(name for name in offered.keys() | there.keys() if offered.get(name) != there.get(name))
    if not differing:
        detail = f"{networks.in_force} has the networks of {models}"
        yield Check(_GROUP, "model set", CheckVerdict.OK, detail)
        return
    detail = "; ".join(
        f"{name}: {short_digest(offered.get(name))} in {networks.in_force}, {short_digest(there.get(name))} in {models}"
        for name in differing
    )
    if networks.releases is None:
        yield Check(_GROUP, "model set", CheckVerdict.FAIL, detail, "restart the scheduler to serve this set")
        return
    wanted = {entry.name: entry.sha256 for entry in manifest.models}
    release = next((each for each in networks.releases.releases if _content(each) == wanted), None)
    if release is None:
        name = networks.in_force.rpartition("@")[0] or "NAME"
        advice = f"make a release of it: terrace models release create {name} --models {shlex.quote(str(models))}"
        yield Check(_GROUP, "model set", CheckVerdict.FAIL, detail, advice)
    elif release.state in _UNDER_WAY:
        detail += f"; {release.release} ({release.state}) has them"
        yield Check(_GROUP, "model set", CheckVerdict.NOTE, detail, _see(release.release))
    else:
        yield Check(_GROUP, "model set", CheckVerdict.FAIL, detail, _bring(release.release))


def _content(release: ReleaseNow) -> dict[str, str]:
    return {network.name: network.sha256 for network in release.networks}


def _bring(release: str) -> str:
    return (
        f"terrace models release start {release} tries it on a part of the fleet; "
        f"terrace models release promote {release} gives it to all"
    )


def _see(release: str) -> str:
    return f"terrace models release show {release}"


def check_releases(networks: FleetNetworks) -> Iterator[Check]:
    """The release in force, the change under way, what failed lately, and nodes that cannot hold a release."""
    found = networks.releases
    if found is None:
        return
    by_name = {each.release: each for each in found.releases}
    in_force = by_name.get(found.in_force)
    if in_force is not None:
        detail = f"{in_force.release} in force, held by {in_force.nodes:,} {'node' if in_force.nodes == 1 else 'nodes'}"
        yield Check(_GROUP, "release", CheckVerdict.OK, detail)
        yield from _check_waiting(found, in_force)
    if found.rollout is not None:
        yield _check_change(found.rollout)
    for ended in found.history:
        if ended.state == "rolled back" and ended.ended_at and datetime.now(UTC) - ended.ended_at < _RECENTLY:
            age = span_text((datetime.now(UTC) - ended.ended_at).total_seconds())
            detail = f"rolled back {age} ago: {ended.reason}"
            yield Check(_GROUP, ended.release, CheckVerdict.NOTE, detail, _see(ended.release))
    concerned = dict.fromkeys([found.in_force, *([found.rollout.release] if found.rollout else [])])
    for release in (by_name[name] for name in concerned if name in by_name):
        for trouble in release.troubles:
            name = f"{trouble.node_id}, {release.release}"
            yield Check(
                _GROUP,
                name,
                CheckVerdict.NOTE,
                f"{trouble.kind}: {trouble.detail}",
                _ADVICE.get(trouble.kind, "look at its log"),
            )


def _check_waiting(found: ReleaseList, in_force: ReleaseNow) -> Iterator[Check]:
    """The newest release of the scheduler's own folder, if it was never started."""
    waiting = next((each for each in found.releases if each.origin and each.number > in_force.number), None)
    if waiting is not None and waiting.state is ReleaseState.READY:
        detail = f"waits: it was made of {waiting.origin}, and has never been started"
        yield Check(_GROUP, waiting.release, CheckVerdict.NOTE, detail, _bring(waiting.release))


def _check_change(rollout: Rollout) -> Check:
    detail = f"{rollout.state}, {rollout.ready} of {rollout.wanted} nodes hold it"
    if rollout.reason:
        detail += f": {rollout.reason}"
    age = datetime.now(UTC) - rollout.started_at
    if rollout.ready < rollout.wanted and age > _HANGS_AFTER:
        detail += f" (since {span_text(age.total_seconds())})"
        advice = f"{_see(rollout.release)} names the nodes that have trouble; see to those, or stop the change"
        return Check(_GROUP, rollout.release, CheckVerdict.NOTE, detail, advice)
    return Check(_GROUP, rollout.release, CheckVerdict.OK, detail)


def check_networks_of(device: Device, networks: FleetNetworks) -> Check | None:
    """A finding if a node does not hold the release in force; None if it does."""
    models = [(str(model["name"]), str(model["sha256"])) for model in device.models]
    if not models or any(networks.offered.get(name) == sha256 for name, sha256 in models):
        return None
    name, sha256 = models[0]
    detail = (
        f"{device.tier} at {device.url}: does not hold {networks.in_force}: its {name} is {short_digest(sha256)}, "
        f"expected {short_digest(networks.offered.get(name))}"
    )
    if not any(each in networks.known for _, each in models):
        advice = "no release has its networks, so it gets no work: restart it without --models"
        return Check(_GROUP, device.node_id, CheckVerdict.FAIL, detail, advice)
    advice = "it loads the networks by itself within a minute; if it does not, look at its log"
    return Check(_GROUP, device.node_id, CheckVerdict.NOTE, detail, advice)
