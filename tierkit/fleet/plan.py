"""The services of a fleet: from counts for this machine, or from a fleet file for several machines.

A fleet file is the same on every machine; each starts its own part (`terrace up --fleet fleet.toml --host NAME`):

    scheduler = "http://10.0.0.5:8070"   # where every node registers; a list if others stand by to take its place

    [host.hub]
    address = "10.0.0.5"                 # services listen here; default 127.0.0.1
    scheduler = { port = 8070 }          # a table holds settings of the service
    edge = { provider = "cuda", port = 8072 }

    [host.pi]
    address = "10.0.0.7"
    token_file = "/etc/terrace/pi.token" # for all nodes of this machine; so are site, tls_cert, tls_key and tls_ca
    end = 2                              # a number starts that many with default settings

    [host.cam]
    end = { spool = { size = "1GB" }, source = [{ name = "door", url = "rtsp://10.0.0.9/1" }] }
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictInt

from tierkit.documents import read_document
from tierkit.errors import SetupError
from tierkit.fleet.tables import tables_in
from tierkit.settings import CommaSeparated
from tierkit.types import Tier
from tierkit.wire.messages import NodeId, SiteName, checked_node_id, checked_url

__all__ = ["MAX_NODES", "SCHEDULER", "FleetPlan", "ServicePlan", "local_plan", "read_fleet_file"]

SCHEDULER = "scheduler"

MAX_NODES = 100
"""Most nodes of one tier on one machine. Each is a process of about 100 MB."""

_ON, _OFF = str(True), str(False)
_ALL_SERVICES = {"tls_cert", "tls_key", "tls_ca", "insecure"}
"""Settings that a machine may state once for all its services. It may also state `tokens` for its scheduler, and
`token_file` and `site` for its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """One process to start: `terrace <kind> --<setting> <value> ...`."""

    name: str
    """Prefix of its log lines; for a node also its node id."""
    kind: str
    settings: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    """Settings that no flag takes; they go to a file."""

    def arguments(self) -> list[str]:
        """The command line after `terrace`."""
        words = [self.kind]
        for name, value in self.settings.items():
            flag = f"--{name.replace('_', '-')}"
            # A switch has no value; off is its default.
            words += [flag] * (value == _ON) if value in (_ON, _OFF) else [flag, value]
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The services of one machine. Nodes register with this machine's scheduler or, without one, at `scheduler_url`."""

    services: tuple[ServicePlan, ...]
    scheduler_url: str | None = None
    """URL of the scheduler; of several schedulers, the URLs of all, comma-separated."""

    @property
    def scheduler(self) -> ServicePlan | None:
        return next((service for service in self.services if service.kind == SCHEDULER), None)

    @property
    def nodes(self) -> tuple[ServicePlan, ...]:
        return tuple(service for service in self.services if service.kind != SCHEDULER)

    def with_defaults(self, settings: Mapping[str, Any]) -> FleetPlan:
        """The same plan, where each service that says nothing of these settings takes them."""
        defaults = _texts(settings)
        return replace(
            self, services=tuple(replace(one, settings=defaults | dict(one.settings)) for one in self.services)
        )


def local_plan(
    counts: Mapping[Tier, int],
    *,
    scheduler: Mapping[str, Any] | None = None,
    node: Mapping[str, Any] | None = None,
    tiers: Mapping[str, Mapping[str, Any]] | None = None,
) -> FleetPlan:
    """Return the plan of a whole fleet on this machine: a scheduler and the given number of nodes of each tier, on free
    ports.

    Args:
        scheduler: settings of the scheduler.
        node: settings of every node.
        tiers: further settings of the nodes of a tier.
    """
    nodes = [
        ServicePlan(
            name=f"{tier}-{number}", kind=tier, settings=_texts({**(node or {}), **(tiers or {}).get(tier, {})})
        )
        for tier in Tier
        for number in range(1, counts.get(tier, 0) + 1)
    ]
    return FleetPlan(services=(ServicePlan(name=SCHEDULER, kind=SCHEDULER, settings=_texts(scheduler or {})), *nodes))


class _Group(BaseModel):
    """Nodes of one tier that have the same settings, which pydantic keeps in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    count: Annotated[StrictInt, Field(ge=0, le=MAX_NODES)] = 1
    node_id: NodeId | None = None
    site: SiteName | None = None


def _as_groups(value: object) -> object:
    """Make groups from a number, a table, or an array of tables."""
    entries = value if isinstance(value, list) else [value]
    return [entry if isinstance(entry, dict) else {"count": entry} for entry in entries]


_Groups = Annotated[tuple[_Group, ...], BeforeValidator(_as_groups)]


class _Host(BaseModel):
    """One machine."""

    model_config = ConfigDict(extra="forbid")

    address: str = "127.0.0.1"
    tokens: str | None = None
    token_file: str | None = None
    site: SiteName | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    insecure: bool | None = None
    scheduler: dict[str, Any] | None = None
    end: _Groups = ()
    edge: _Groups = ()
    cloud: _Groups = ()

    def services(self, host: str, urls: Sequence[str]) -> list[ServicePlan]:
        """Return the services of the machine of this name, whose nodes register at `urls`.

        Raises:
            ValueError: the settings contradict each other.
        """
        shared = {"host": self.address} | _texts(self.model_dump(include=_ALL_SERVICES))
        services = []
        if self.scheduler is not None:
            tables_in(SCHEDULER, self.scheduler)
            settings = _found_at(urls, shared | _texts({"tokens": self.tokens} | self.scheduler))
            services.append(ServicePlan(name=SCHEDULER, kind=SCHEDULER, settings=settings))
        for tier in Tier:
            groups: tuple[_Group, ...] = getattr(self, tier)
            each = [group for group in groups for _ in range(group.count)]
            if len(each) > MAX_NODES:
                raise ValueError(f"{len(each)} {tier} nodes; one machine may run {MAX_NODES} of a tier")
            for number, group in enumerate(each, 1):
                name = checked_node_id(group.node_id or f"{host}-{tier}-{number}")
                named = {"token_file": self.token_file, "node_id": group.node_id, "site": group.site or self.site}
                given = group.model_extra or {}
                tables = tables_in(tier, given)
                own = _texts(named | {key: value for key, value in given.items() if key not in tables})
                services.append(ServicePlan(name=name, kind=tier, settings=shared | own, tables=tables))
        names = [service.name for service in services]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several nodes are called {', '.join(twice)}")
        if not services:
            raise ValueError("it starts nothing: add scheduler, end, edge or cloud")
        return services


def _without_path(urls: tuple[str, ...]) -> tuple[str, ...]:
    checked = tuple(map(checked_url, urls))
    if any(urlsplit(url).path for url in checked):
        raise ValueError("must be without a path")
    if not checked:
        raise ValueError("must name a URL")
    return checked


class _FleetFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    scheduler: Annotated[CommaSeparated, AfterValidator(_without_path)]
    """Address at which nodes register, such as "http://10.0.0.5:8070"; of several schedulers, a list of all URLs."""
    host: Annotated[dict[str, _Host], Field(min_length=1)]
    """Tables [host.NAME], one for each machine."""


def read_fleet_file(path: Path, host: str | None = None) -> FleetPlan:
    """The part of one machine in a fleet file.

    Args:
        host: name of this machine in the file; may be left out where the file has only one.

    Raises:
        SetupError: the file cannot be read, says something unknown, or has no such host.
    """
    file = read_document(path, _FleetFile, what="fleet file")
    if host is None and len(file.host) > 1:
        several = "|".join(file.host)
        raise SetupError(f"the fleet file {path} has several machines; name this one: --host {several}")
    own = host or next(iter(file.host))
    if own not in file.host:
        raise SetupError(f"the fleet file {path} has no machine {own!r}; it has {', '.join(file.host)}")
    homes = [name for name, machine in file.host.items() if machine.scheduler is not None]
    if len(homes) > len(file.scheduler):
        few = "a fleet has one" if len(file.scheduler) == 1 else f"and {len(file.scheduler)} URLs of schedulers"
        raise SetupError(f"the fleet file {path} has a scheduler on {' and on '.join(homes)}: {few}")
    # All of it is checked on every machine: a mistake shows wherever it is tried first.
    services = {}
    for name, machine in file.host.items():
        try:
            services[name] = machine.services(name, file.scheduler)
        except ValueError as exc:
            raise SetupError(f"the fleet file {path}, [host.{name}]: {exc}") from exc
    return FleetPlan(services=tuple(services[own]), scheduler_url=",".join(file.scheduler))


def _found_at(urls: Sequence[str], settings: dict[str, str]) -> dict[str, str]:
    """Settings of a scheduler, with the port of its URL, the first that fits, where they leave that open.

    Raises:
        ValueError: it listens somewhere else.
    """
    faults = []
    for url in urls:
        try:
            return _listening(url, settings)
        except ValueError as exc:
            faults.append(str(exc))
    raise ValueError("; ".join(faults))


def _listening(url: str, settings: dict[str, str]) -> dict[str, str]:
    parts, tls = urlsplit(url), "tls_cert" in settings
    if tls and parts.scheme == "http":
        raise ValueError(f"the scheduler has a tls_cert, so nodes must look for it at https://, and not at {url}")
    if not tls and parts.scheme == "https":
        return settings  # another server may do TLS for it, at an address of its own
    port = str(parts.port or (443 if tls else 80))
    settings = {"port": port} | settings
    if settings["port"] != port:
        raise ValueError(f"the scheduler listens on port {settings['port']}, and nodes look for it at {url}")
    if not _may_be(parts.hostname or "", settings["host"]):
        raise ValueError(
            f"the scheduler listens on {settings['host']}, and nodes look for it at {url}; set the address of this "
            "machine accordingly"
        )
    return settings


def _may_be(name: str, address: str) -> bool:
    """True if a server that listens on `address` may be found under `name`; of names we know nothing."""
    listens, found = _ip(address), _ip(name)
    if listens is None or listens.is_unspecified:
        return True
    return listens == found if found else listens.is_loopback == (name == "localhost")


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as flags take them."""
    return {
        # Each part of `also` is a scheduler, whose standbys have commas between them.
        name: (" " if name == "also" else ",").join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in settings.items()
        if value is not None
    }
