"""Checks of `terrace doctor`. Each finding has a verdict and, unless all is well, advice."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from models.data import read_cifar100, read_sample
from models.escalation import TUNING_NAME, load_tuning
from models.manifest import WeightsFile, load_manifest, weights_folder
from models.session import load_encoder, load_model, verify_file
from terrace import __version__
from terrace.console import node_order, percent
from terrace.findings import Check, CheckVerdict
from terrace.release_checks import FleetNetworks, check_networks_of, check_releases, check_set, networks_now
from tierkit.access import client_context, tls_trouble
from tierkit.client import Client, Device, SiteNow, SourcesReport
from tierkit.distribution import DISTRIBUTION, install_command
from tierkit.errors import (
    CertificateError,
    Forbidden,
    MissingExtra,
    NotFound,
    SetupError,
    Standby,
    TerraceError,
    Unauthenticated,
    UpstreamUnavailable,
)
from tierkit.extensions import broken, others
from tierkit.inference.upstreams import is_allowed
from tierkit.types import Health, Share, SiteHealth, Tier

__all__ = [
    "check_data",
    "check_extensions",
    "check_fleet",
    "check_installation",
    "check_port",
    "check_weights",
    "listens_here",
]

_FLEET = "fleet"
_REINSTALL = "install Terrace again, or fetch the repository anew with its large files"
_MAKE = "make it anew ('terrace models import' or 'quantize'), or name another set with --models"
_PROBE_S = 3.0
_SOON = timedelta(days=14)
"""Certificates and tokens that expire within this time get a note."""
_MOST_NAMED = 5


def check_installation() -> Iterator[Check]:
    """Python, the distribution's requirements, and ONNX Runtime with its execution providers."""
    group = "installation"
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check(group, "python", CheckVerdict.OK, detail)
    if missing := _missing_requirements():
        advice = f"install it again: {install_command()}"
        yield Check(group, "terrace", CheckVerdict.FAIL, f"{__version__}, without {', '.join(missing)}", advice)
    else:
        yield Check(group, "terrace", CheckVerdict.OK, f"{__version__}, with all it requires")
    try:
        import onnxruntime
    except ImportError as exc:
        advice = f"{install_command('cpu')}; with the extra 'gpu' instead for CUDA"
        yield Check(group, "onnxruntime", CheckVerdict.FAIL, f"not installed ({exc})", advice)
    else:
        usable = [name.removesuffix("ExecutionProvider") for name in onnxruntime.get_available_providers()]
        yield Check(group, "onnxruntime", CheckVerdict.OK, f"{onnxruntime.__version__}: {', '.join(usable)}")


def check_extensions() -> Iterator[Check]:
    """Extensions of other packages, and whether they can be imported."""
    group = "extensions"
    faulty = {(each.distribution, each.group, each.name): each.fault for each in broken()}
    for each in others():
        package = f"{each.distribution} {each.version}"
        place = f"{each.group} of {package}" if each.group else package
        name = each.name or each.distribution
        fault = faulty.get((each.distribution, each.group, each.name))
        if fault and fault.startswith(MissingExtra.__name__):
            yield Check(group, name, CheckVerdict.NOTE, f"{place}: {fault}", "without the extra, do not use it here")
        elif fault:
            advice = f"update or uninstall {each.distribution}; everything else works without it"
            yield Check(group, name, CheckVerdict.FAIL, f"{place}: {fault}", advice)
        else:
            yield Check(group, name, CheckVerdict.OK, place)


def check_weights(models: Path | None = None) -> Iterator[Check]:
    """Check the digest and the loading of each network and encoder of a model set, and its thresholds if it has any.

    Args:
        models: folder of the set; None for the bundled one.
    """
    group = "models"
    folder = models or weights_folder()
    advice = _REINSTALL if models is None else _MAKE
    try:
        manifest = load_manifest(models)
    except SetupError as exc:
        yield Check(group, "manifest", CheckVerdict.FAIL, str(exc), advice)
        return
    if models is not None:
        yield Check(group, "set", CheckVerdict.OK, str(models))
    for entry in manifest.models:
        load = partial(load_model, entry, folder, labels=manifest.labels(entry))
        right = f"{percent(entry.accuracy)} of {entry.classes:,} classes, " if entry.accuracy is not None else ""
        tier = f"{entry.tier} with a GPU" if entry.gpu else entry.tier
        yield _loadable(entry, folder, load, advice, f"{tier}, {right}")
    for encoder in manifest.encoders:
        network = manifest.entry(encoder.network)
        # A tail that is part of a network's file has been checked with it.
        for side in encoder.own_files:
            load = partial(load_encoder, encoder, network, side, folder, labels=manifest.labels(network))
            yield _loadable(encoder.weights(side), folder, load, advice)
    if (folder / TUNING_NAME).exists():
        try:
            load_tuning(folder).check(manifest)
            yield Check(group, "thresholds", CheckVerdict.OK, "of these networks")
        except SetupError as exc:
            yield Check(group, "thresholds", CheckVerdict.NOTE, str(exc), "without them only --escalate always works")


def _loadable(file: WeightsFile, folder: Path, load: Callable[[], object], advice: str, facts: str = "") -> Check:
    try:
        try:
            load()
        except MissingExtra:  # told by the check of the installation
            verify_file(file, folder)
    except SetupError as exc:
        return Check("models", file.name, CheckVerdict.FAIL, str(exc), advice)
    return Check(
        "models", file.name, CheckVerdict.OK, f"{facts}{file.size_bytes / 1e6:.1f} MB, sha256 {file.sha256[:12]}…"
    )


def check_data(root: Path | None) -> Iterator[Check]:
    """The bundled sample, and CIFAR-100 where the user has said where it is."""
    group = "data"
    try:
        yield Check(group, "sample", CheckVerdict.OK, f"{len(read_sample()):,} images")
    except TerraceError as exc:
        yield Check(group, "sample", CheckVerdict.FAIL, str(exc), _REINSTALL)
    if root is None:
        detail = "TERRACE_DATA is not set; only cifar100:test and cifar100:train need it"
        yield Check(group, "cifar100", CheckVerdict.NOTE, detail)
        return
    try:
        count = len(read_cifar100("test", root))
        yield Check(group, "cifar100", CheckVerdict.OK, f"{count:,} test images in {root}")
    except TerraceError as exc:
        advice = "point TERRACE_DATA at the folder that holds cifar-100-python"
        yield Check(group, "cifar100", CheckVerdict.FAIL, str(exc), advice)


def listens_here(url: str, port: int) -> bool:
    """Return True if a service at this URL uses that port of this machine."""
    parts = urlsplit(url)
    if (parts.port or {"http": 80, "https": 443}.get(parts.scheme)) != port:
        return False
    try:
        for family, kind, _, _, address in socket.getaddrinfo(parts.hostname, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                # Only an own address can be bound.
                probe.bind(address)
    except OSError:
        return False
    return True


def check_port(port: int, *, expect_scheduler: bool) -> Iterator[Check]:
    """Check that `terrace up` could listen on this machine.

    Args:
        expect_scheduler: a scheduler answers there, so a port in use is correct.
    """
    with socket.socket() as probe:
        # As the services do: connections of an earlier service that still linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            if expect_scheduler:
                yield Check("ports", str(port), CheckVerdict.OK, "in use by the scheduler")
            else:
                advice = "terrace up --port 0 takes a free one"
                yield Check("ports", str(port), CheckVerdict.FAIL, exc.strerror or str(exc), advice)
        else:
            yield Check("ports", str(port), CheckVerdict.OK, "free")


def check_fleet(
    client: Client, *, asked_for: bool, models: Path | None = None, tls_ca: Path | None = None
) -> Iterator[Check]:
    """Check the scheduler, its standbys, and each node that it lists: reachable, ready, leased, of this version.

    Args:
        asked_for: the user has named this scheduler. Otherwise it is not a fault if no scheduler is at the default
            address.
        models: the model set that should answer; None if the user has not named one.
        tls_ca: file with the certificates to trust; None for the public authorities.
    """
    try:
        yield from _check_token(client)
        info, networks, sites = client.info(), networks_now(client), client.sites()
        devices = sorted(client.devices(), key=lambda device: node_order(device.tier, device.node_id))
    except UpstreamUnavailable:
        verdict = CheckVerdict.FAIL if asked_for else CheckVerdict.NOTE
        advice = "start a fleet with 'terrace up', or say where its scheduler listens: --scheduler URL"
        yield Check(_FLEET, "scheduler", verdict, f"no service answers at {', '.join(client.urls)}", advice)
        return
    except Standby as exc:
        advice = "look at the log of the scheduler that should lead, and name all of them: --scheduler URL,URL"
        yield Check(_FLEET, "scheduler", CheckVerdict.FAIL, str(exc), advice)
        return
    except (Unauthenticated, Forbidden) as exc:
        advice = "show the token of a user with --token-file FILE or in TERRACE_TOKEN; 'terrace token create' makes one"
        yield Check(_FLEET, "token", CheckVerdict.FAIL, str(exc), advice)
        return
    except CertificateError as exc:
        yield Check(_FLEET, "certificate", CheckVerdict.FAIL, str(exc))
        return
    except TerraceError as exc:
        yield Check(_FLEET, "scheduler", CheckVerdict.FAIL, str(exc), "name the scheduler with --scheduler URL")
        return
    yield _versioned("scheduler", client.url, str(info.get("version")))
    yield from _check_certificate("scheduler", client.url, tls_ca)
    for url in client.urls:
        if url != client.url:
            yield _check_standby(url, tls_ca)
            yield from _check_certificate("standby", url, tls_ca)
    if models is not None:
        yield from check_set(networks, models)
    yield from check_releases(networks)
    for device in devices:
        yield _check_node(device, networks, tls_ca)
        if device.health is Health.ALIVE:
            yield from _check_certificate(device.node_id, device.url, tls_ca)
    yield from _check_lists(devices)
    yield from _check_sites(sites, devices, info.get("share", ()))
    yield from _check_sources(client, devices)
    yield from _check_sinks(client)
    if not any(device.tier is Tier.END and device.health is Health.ALIVE for device in devices):
        advice = f"start one: terrace end --scheduler {','.join(client.urls)}"
        yield Check(_FLEET, "end nodes", CheckVerdict.FAIL, "none is alive, so no job can run", advice)


def _check_lists(devices: Sequence[Device]) -> Iterator[Check]:
    """Show the upstream nodes that end devices with their own list may ask."""
    uppers = [device for device in devices if device.tier is not Tier.END and device.health is Health.ALIVE]
    for end in devices:
        if end.tier is not Tier.END or end.health is not Health.ALIVE or not end.allowed_upstreams or not uppers:
            continue
        asked = [upper.node_id for upper in uppers if is_allowed(upper.url, end.allowed_upstreams)]
        name, detail = f"{end.node_id}, list", f"may ask {', '.join(asked) or 'none'} of {len(uppers)} upstream nodes"
        if asked:
            yield Check(_FLEET, name, CheckVerdict.OK, detail)
        else:
            known = ",".join(end.allowed_upstreams)
            advice = f"its answers stay coarse; if that is not wanted, add URLs to --allowed-upstreams (now {known})"
            yield Check(_FLEET, name, CheckVerdict.NOTE, detail, advice)


def _check_sites(sites: Sequence[SiteNow], devices: Sequence[Device], share: Sequence[str]) -> Iterator[Check]:
    """Sites that lack something, end devices without one, and rules for sites without nodes.

    Args:
        share: the rules of the scheduler, such as "cloud" and "shop-7=none".
    """
    advices = {
        SiteHealth.DOWN: "see to its nodes; if the site is gone for good: terrace sites remove {site} --forget",
        SiteHealth.DRAINED: "terrace sites resume {site}",
    }
    for site in sites:
        verdict = CheckVerdict.OK if site.health is SiteHealth.OK else CheckVerdict.NOTE
        if site.health is SiteHealth.COARSE:
            verdict = CheckVerdict.FAIL
        detail = f"{site.health}, share {site.share}" + (f": {site.reason}" if site.reason else "")
        advice = advices.get(site.health, "").format(site=site.site)
        if site.health is SiteHealth.COARSE:
            kept = site.share is Share.NONE
            other = "let its pictures leave it (`share` of the scheduler)" if kept else "a cloud node without a site"
            advice = f"start an edge node there, or {other}"
        yield Check(_FLEET, f"site {site.site}", verdict, detail, advice)
    stray = [device.node_id for device in devices if device.tier is Tier.END and device.site is None]
    if sites and stray:
        named = ", ".join(stray[:_MOST_NAMED]) + (f" and {len(stray) - _MOST_NAMED} more" * (len(stray) > _MOST_NAMED))
        advice = "give them --site, or the token of one; they may ask upstream nodes without a site only"
        yield Check(_FLEET, "end nodes without a site", CheckVerdict.NOTE, named, advice)
    known = {site.site for site in sites}
    for rule in share:
        name, equals, _ = rule.rpartition("=")
        if equals and name not in known:
            advice = "correct the name in `share` of the scheduler, or start its nodes with this --site"
            yield Check(_FLEET, f"site {name}", CheckVerdict.NOTE, f"has the rule {rule} and no node", advice)


def _check_sinks(client: Client) -> Iterator[Check]:
    """Receivers that do not take events, and events that they did not take. Only admins may see these."""
    try:
        sinks = client.sinks().sinks
    except (Forbidden, NotFound):
        return
    for sink in sinks:
        lost = [f"{sink.dead:,} dead letters"] if sink.dead else []
        lost += [f"{sink.dropped:,} events dropped"] if sink.dropped else []
        detail = ", ".join([f"{sink.kind}, {sink.state}" + (f": {sink.reason}" if sink.reason else ""), *lost])
        advice = ""
        if sink.state == "failing":
            advice = f"see to the receiver; 'terrace sinks test {sink.name}' tries it at once"
        elif sink.state == "paused":
            advice = f"terrace sinks resume {sink.name}"
        elif sink.dead:
            advice = f"terrace sinks dead {sink.name}, then terrace sinks replay {sink.name}"
        verdict = CheckVerdict.NOTE if advice or lost else CheckVerdict.OK
        yield Check(_FLEET, f"sink {sink.name}", verdict, detail, advice)


def _check_sources(client: Client, devices: Sequence[Device]) -> Iterator[Check]:
    """Sources that do not run, and pictures and answers that devices have lost."""
    for device in devices:
        if not device.sources or device.health in (Health.DEAD, Health.REMOVED):
            continue  # reported by the check of the node
        name = f"{device.node_id}, sources"
        try:
            report = client.node_sources(device.node_id)
        except TerraceError as exc:
            advice = "look at its log, and at the firewall between the scheduler and the device"
            yield Check(_FLEET, name, CheckVerdict.NOTE, f"cannot be listed: {exc}", advice)
            continue
        running = 0
        for source in report.sources:
            if source.state not in ("waiting", "paused"):
                running += source.state != "finished"
                continue
            detail = f"{source.kind} {source.state}" + (f": {source.reason}" if source.reason else "")
            paused = source.state == "paused"
            advice = (
                f"terrace sources resume {device.node_id} {source.name}" if paused else "look at its url and its log"
            )
            verdict = CheckVerdict.NOTE if paused else CheckVerdict.FAIL
            yield Check(_FLEET, f"{device.node_id}, {source.name}", verdict, detail, advice)
        yield _check_spool(name, f"{running} of {len(report.sources)} run", report)


def _check_spool(name: str, running: str, report: SourcesReport) -> Check:
    if (spool := report.spool) is None:
        return Check(_FLEET, name, CheckVerdict.OK, running)
    if spool.set_aside:
        advice = "its observations can only be read with SQLite tools; delete the folder if nobody needs them"
        detail = f"{running}; a damaged spool was set aside: {spool.set_aside}"
        return Check(_FLEET, name, CheckVerdict.FAIL, detail, advice)
    if spool.dropped_pictures or spool.lost_answers:
        detail = f"{running}; {spool.dropped_pictures:,} pictures dropped, {spool.lost_answers:,} answers lost"
        advice = (
            f"its spool was full ({spool.size_bytes:,} bytes): give it more (spool.size), or let more leave the device"
        )
        return Check(_FLEET, name, CheckVerdict.NOTE, detail, advice)
    waiting = f"{spool.waiting_answers:,} answers and {spool.waiting_pictures:,} pictures wait"
    return Check(_FLEET, name, CheckVerdict.OK, f"{running}; {waiting}")


def _check_node(device: Device, networks: FleetNetworks, tls_ca: Path | None) -> Check:
    right = "" if device.accuracy is None else f" ({percent(device.accuracy)})"
    serves = f", serves {device.network}{right}" if device.network else ""
    place = f"{device.tier} at {device.url}{serves}"
    if device.health in (Health.DRAINING, Health.REMOVED):
        advice = f"terrace devices resume {device.node_id}"
        return Check(_FLEET, device.node_id, CheckVerdict.NOTE, f"{place}: {device.reason}", advice)
    if device.health is not Health.ALIVE:
        advice = "see to the reason first; a restart helps if it does not run"
        if device.health is Health.DEAD:
            advice += f"; if it is gone for good: terrace devices forget {device.node_id}"
        return Check(_FLEET, device.node_id, CheckVerdict.FAIL, f"{place}: {device.health}: {device.reason}", advice)
    if (differing := check_networks_of(device, networks)) is not None:
        return differing
    try:
        ready = _health(device.url, tls_ca).is_success
        trouble, advice = ("", "") if ready else ("says that it is not ready", "look at its log")
    except httpx.HTTPError as exc:
        trouble, advice = tls_trouble(exc, "it") or "", ""  # which says what to do
        if not trouble:
            trouble = f"cannot be reached from here ({type(exc).__name__})"
            host = urlsplit(device.url).hostname
            advice = f"look at its log, and at the firewall between here and {host}; its --advertise-url may be wrong"
    if trouble:
        return Check(_FLEET, device.node_id, CheckVerdict.FAIL, f"{place}: {trouble}", advice)
    return _versioned(device.node_id, place, device.version)


def _check_standby(url: str, tls_ca: Path | None) -> Check:
    """Check a scheduler that the client knows in addition to the leader."""
    try:
        answer = _health(url, tls_ca)
        if answer.is_success:
            advice = "give both the same --database; leave one of them out if they are of different fleets"
            return Check(_FLEET, "standby", CheckVerdict.FAIL, f"{url} leads as well", advice)
        said = str(answer.json()["status"])
    except httpx.HTTPError as exc:
        said = tls_trouble(exc, "it") or f"cannot be reached from here ({type(exc).__name__})"
    except (ValueError, KeyError, TypeError, RecursionError):
        said = "no scheduler"
    if said == "standby":
        return Check(_FLEET, "standby", CheckVerdict.OK, f"{url}, ready to lead")
    advice = "look at its log: until it is back, nothing takes the place of the scheduler"
    return Check(_FLEET, "standby", CheckVerdict.FAIL, f"{url}: {said}", advice)


def _health(url: str, tls_ca: Path | None) -> httpx.Response:
    tls = client_context(tls_ca) if url.startswith("https://") else False
    return httpx.get(f"{url}/readyz", timeout=_PROBE_S, trust_env=False, verify=tls)


def _check_token(client: Client) -> Iterator[Check]:
    """Show the name, the role and the validity of the token; nothing if the scheduler asks for none."""
    who = client.whoami()
    if who.get("name") is None:
        return
    detail = f"of {who['name']}, role {who['role']}"
    if who.get("expires") is None:
        yield Check(_FLEET, "token", CheckVerdict.OK, f"{detail}, does not expire")
        return
    left = datetime.fromisoformat(who["expires"]) - datetime.now(UTC)
    yield _expiring("token", f"{detail}, expires", left, "ask for a new one: terrace token rotate")


def _check_certificate(name: str, url: str, tls_ca: Path | None) -> Iterator[Check]:
    """Show the validity of a service's certificate; nothing if it has none, or cannot be reached."""
    parts = urlsplit(url)
    if parts.scheme != "https" or parts.hostname is None:
        return
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 443), timeout=_PROBE_S) as plain,
            client_context(tls_ca).wrap_socket(plain, server_hostname=parts.hostname) as secured,
        ):
            certificate = secured.getpeercert() or {}
    except OSError:
        return  # told by the check of the service itself
    until = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    advice = "renew it; the service reads the new files within seconds"
    yield _expiring(f"{name}, TLS", "certificate expires", until - datetime.now(UTC), advice)


def _expiring(name: str, what: str, left: timedelta, advice: str) -> Check:
    shown = f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.0f} h"
    if left < _SOON:
        return Check(_FLEET, name, CheckVerdict.NOTE, f"{what} in {shown}", advice)
    return Check(_FLEET, name, CheckVerdict.OK, f"{what} in {shown}")


def _versioned(name: str, place: str, version: str | None) -> Check:
    if version == __version__:
        return Check(_FLEET, name, CheckVerdict.OK, f"{place}, ready, version {version}")
    detail = f"{place}, ready, but version {version} and not {__version__}"
    return Check(_FLEET, name, CheckVerdict.NOTE, detail, "bring all machines to the same version")


def _missing_requirements() -> list[str]:
    """Names of required distributions that are not installed; extras do not count."""
    missing = []
    for requirement in importlib.metadata.requires(DISTRIBUTION) or []:
        name, _, condition = requirement.partition(";")
        found = re.match(r"[A-Za-z0-9._-]+", name)
        if found is None or "extra" in condition:
            continue
        try:
            importlib.metadata.version(found[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(found[0])
    return missing
