"""Which services a fleet consists of: from counts for this machine, or from a fleet file for several machines.

A fleet file is the same on every machine; each starts its own part (`terrace up --fleet fleet.toml --host NAME`):

    scheduler = "http://10.0.0.5:8070"   # where every node registers

    [host.hub]
    address = "10.0.0.5"                 # services listen here; default 127.0.0.1
    scheduler = { port = 8070 }          # a table holds settings of the service
    edge = { provider = "cuda", port = 8072 }

    [host.pi]
    address = "10.0.0.7"
    token_file = "/etc/terrace/pi.token" # for all nodes of this machine; likewise tls_cert, tls_key and tls_ca
    end = 2                              # a number starts that many with default settings
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from tierkit.errors import SetupError
from tierkit.settings import HttpUrl
from tierkit.types import Tier
from tierkit.wire.messages import checked_node_id

__all__ = ["MAX_NODES", "SCHEDULER", "FleetPlan", "ServicePlan", "local_plan", "read_fleet_file"]

SCHEDULER = "scheduler"

MAX_NODES = 100
"""Nodes of one tier on one machine. Each is a process of some 100 MB."""

_LOOPBACK = "127.0.0.1"
_ON, _OFF = str(True), str(False)
_ALL_SERVICES = ("tls_cert", "tls_key", "tls_ca", "insecure")
"""Settings that a machine may state once for all its services; besides `tokens` for its scheduler, and `token_file` for
its nodes."""
_HOST_KEYS = ("address", "tokens", "token_file", *_ALL_SERVICES, SCHEDULER, *Tier)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """One process to start: `terrace <kind> --<setting> <value> ...`."""

    name: str
    """Prefix of its log lines; for a node also its node id."""
    kind: str
    settings: Mapping[str, str] = field(default_factory=dict)

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
    """A whole fleet on this machine: a scheduler and so many nodes of each tier, on ports that the system chooses.

    Args:
        scheduler: settings of the scheduler.
        node: settings of every node.
        tiers: settings of the nodes of a tier besides.
    """
    nodes = [
        ServicePlan(
            name=f"{tier}-{number}", kind=tier, settings=_texts({**(node or {}), **(tiers or {}).get(tier, {})})
        )
        for tier in Tier
        for number in range(1, counts.get(tier, 0) + 1)
    ]
    return FleetPlan(services=(ServicePlan(name=SCHEDULER, kind=SCHEDULER, settings=_texts(scheduler or {})), *nodes))


def read_fleet_file(path: Path, host: str | None = None) -> FleetPlan:
    """The part of one machine in a fleet file.

    Args:
        host: name of this machine in the file; may be left out where the file has only one.

    Raises:
        SetupError: the file cannot be read, says something unknown, or has no such host.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SetupError(f"cannot read the fleet file {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SetupError(f"the fleet file {path} is not valid TOML: {exc}") from exc
    _only(document, ("scheduler", "host"), f"the fleet file {path}")
    url, hosts = _scheduler_url(document.get("scheduler"), path), document.get("host")
    if not isinstance(hosts, dict) or not hosts or not all(isinstance(table, dict) for table in hosts.values()):
        raise SetupError(f"the fleet file {path} names no machine: add a table [host.NAME]")
    if host is None and len(hosts) > 1:
        raise SetupError(f"the fleet file {path} has several machines; say which this is: --host {'|'.join(hosts)}")
    name = host or next(iter(hosts))
    if name not in hosts:
        raise SetupError(f"the fleet file {path} has no machine {name!r}; it has {', '.join(hosts)}")
    # All of it is read on every machine: a mistake shows wherever it is tried first.
    plans = {
        each: FleetPlan(services=tuple(_host_services(each, table, path)), scheduler_url=url)
        for each, table in hosts.items()
    }
    homes = [each for each, plan in plans.items() if plan.scheduler is not None]
    if len(homes) > 1:
        raise SetupError(f"the fleet file {path} has a scheduler on {' and on '.join(homes)}: a fleet has one")
    for home in homes:
        plans[home] = _found_at(url, plans[home], f"the fleet file {path}, [host.{home}]")
    return plans[name]


def _scheduler_url(value: Any, path: Path) -> str:
    sentence = f'the fleet file {path} must say where nodes register: scheduler = "http://ADDRESS:PORT"'
    if value is None:
        raise SetupError(sentence)
    try:
        url: str = TypeAdapter(HttpUrl).validate_python(value)
    except ValidationError as exc:
        raise SetupError(f"{sentence}; it says {value!r}") from exc
    if urlsplit(url).path:
        raise SetupError(f"{sentence}, without a path; it says {value!r}")
    return url


def _found_at(url: str, plan: FleetPlan, where: str) -> FleetPlan:
    """The plan, whose scheduler takes the port of `url` where its settings leave that open.

    Raises:
        SetupError: it listens somewhere else.
    """
    parts = urlsplit(url)
    if plan.scheduler is None:
        return plan
    tls = "tls_cert" in plan.scheduler.settings
    if tls and parts.scheme == "http":
        raise SetupError(
            f"{where}: the scheduler has a tls_cert, so nodes must look for it at https://, and not at {url}"
        )
    if not tls and parts.scheme == "https":
        return plan  # another server may do TLS for it, at an address of its own
    port = str(parts.port or (443 if tls else 80))
    scheduler = replace(plan.scheduler, settings={"port": port, **plan.scheduler.settings})
    address, listens = scheduler.settings["host"], scheduler.settings["port"]
    if listens != port:
        raise SetupError(f"{where}: the scheduler listens on port {listens}, and nodes look for it at {url}")
    if not _may_be(parts.hostname or "", address):
        raise SetupError(
            f"{where}: the scheduler listens on {address}, and nodes look for it at {url}; set the address of this"
            " machine accordingly"
        )
    return replace(plan, services=(scheduler, *plan.nodes))


def _may_be(name: str, address: str) -> bool:
    """Whether a server that listens on `address` may be found under `name`; of names we know nothing."""
    listens = _ip(address)
    if listens is None or listens.is_unspecified:
        return True
    if name == "localhost":
        return listens.is_loopback
    found = _ip(name)
    return not listens.is_loopback if found is None else found == listens


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _host_services(host: str, table: Mapping[str, Any], path: Path) -> list[ServicePlan]:
    where = f"the fleet file {path}, [host.{host}]"
    _only(table, _HOST_KEYS, where)
    address = {"host": str(table.get("address", _LOOPBACK))}

    def shared(kind: str) -> dict[str, str]:
        own = "tokens" if kind == SCHEDULER else "token_file"
        return address | _texts({name: table.get(name) for name in (own, *_ALL_SERVICES)})

    services = []
    if SCHEDULER in table:
        if not isinstance(table[SCHEDULER], dict):
            raise SetupError(f"{where}: scheduler must be a table of its settings, such as {{ port = 8070 }}")
        services.append(
            ServicePlan(name=SCHEDULER, kind=SCHEDULER, settings=shared(SCHEDULER) | _texts(table[SCHEDULER]))
        )
    for tier in Tier:
        number = 0
        for count, settings in _groups(table.get(tier, 0), tier, where):
            if number + count > MAX_NODES:
                raise SetupError(f"{where}: {number + count} {tier} nodes; one machine may run {MAX_NODES} of a tier")
            for _ in range(count):
                number += 1
                name = settings.get("node_id", f"{host}-{tier}-{number}")
                try:
                    checked_node_id(name)
                except ValueError as exc:
                    raise SetupError(f"{where}: {name!r} is no node id: it {exc}") from exc
                services.append(ServicePlan(name=name, kind=tier, settings=shared(tier) | settings))
    names = [service.name for service in services]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SetupError(f"{where}: several nodes are called {', '.join(twice)}")
    if not services:
        raise SetupError(f"{where} starts nothing: add scheduler, end, edge or cloud")
    return services


def _groups(value: Any, tier: Tier, where: str) -> list[tuple[int, dict[str, str]]]:
    """(how many, settings) for a number, a table, or an array of tables."""
    groups = []
    for entry in value if isinstance(value, list) else [value]:
        table = {"count": entry} if isinstance(entry, int) else entry
        if not isinstance(table, dict):
            raise SetupError(f"{where}: {tier} must be a number, a table of settings, or an array of tables")
        count = table.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise SetupError(f"{where}: the count of {tier} must be a number that is not negative")
        groups.append((count, _texts({name: item for name, item in table.items() if name != "count"})))
    return groups


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as flags take them."""
    return {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for name, value in settings.items()
        if value is not None
    }


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := [key for key in table if key not in known]:
        raise SetupError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
