"""Hosts on one switch, each in a network namespace of its own, and what can happen to their links.

Needs root and iproute2. The switch has a namespace as well, so that addresses and packet filters of this machine do not
matter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Host", "Network", "missing"]

_PREFIX = "terrace-"
_NAMESPACES = Path("/run/netns")
_SUBNET = "198.18.0"  # set aside for tests of networks (RFC 2544)
_NOBODY = "02:00:00:00:00:00"
_CLONE_NEWNET = 0x40000000


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


@dataclass(kw_only=True)
class Host:
    """A machine with one network interface, `eth0`."""

    name: str
    namespace: str
    address: str = ""

    @property
    def inside(self) -> tuple[str, ...]:
        """What comes before a command that runs there."""
        return ("ip", "netns", "exec", self.namespace)

    def ip(self, *arguments: str) -> None:
        _run("ip", "-netns", self.namespace, *arguments)


class Network:
    """All hosts and the switch. Leave its context to remove them; what still runs inside is killed."""

    def __init__(self) -> None:
        self._prefix = f"{_PREFIX}{os.getpid()}-"
        self._switch = f"{self._prefix}switch"
        self._hosts: dict[str, Host] = {}
        self._assigned = 0

    def __enter__(self) -> Self:
        _remove_left_over()
        try:
            _run("ip", "netns", "add", self._switch)
            self._switch_ip("link", "add", "br0", "type", "bridge")
            self._switch_ip("link", "set", "br0", "up")
        except BaseException:
            _remove(f"{self._prefix}*")
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _remove(f"{self._prefix}*")

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def add(self, name: str, *, address: str | None = None) -> Host:
        """A new host, with a fresh address or with that of a host that is gone.

        The address of its card follows from that, as that of a virtual router (VRRP) does: whoever takes the place of
        another is found at once.
        """
        host = self._hosts[name] = Host(name=name, namespace=self._prefix + name)
        address = address or self._fresh()
        card = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        _run("ip", "netns", "add", host.namespace)
        peer = ("peer", "name", "eth0", "address", card, "netns", host.namespace)
        self._switch_ip("link", "add", "name", name, "type", "veth", *peer)
        self._add_address(host, address)
        self._switch_ip("link", "set", "dev", name, "master", "br0", "up")
        host.ip("link", "set", "lo", "up")
        host.ip("link", "set", "eth0", "up")
        return host

    def switch_off(self, host: Host) -> None:
        """The machine has no power any more: what runs there ends, and tells nobody."""
        self._switch_ip("link", "del", "dev", host.name)  # a namespace goes later than its removal says
        _remove(host.namespace)
        del self._hosts[host.name]

    @contextlib.contextmanager
    def cut(self, host: Host) -> Iterator[None]:
        """Meanwhile nothing comes to the host, nor from it; its own interface stays up."""
        self._switch_ip("link", "set", "dev", host.name, "nomaster")
        try:
            yield
        finally:
            self._switch_ip("link", "set", "dev", host.name, "master", "br0")

    @contextlib.contextmanager
    def lost(self, sender: Host, receiver: Host) -> Iterator[None]:
        """Meanwhile nothing that `sender` sends reaches `receiver`: it goes to a card that nobody has."""
        sender.ip("neigh", "replace", receiver.address, "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")
        try:
            yield
        finally:
            sender.ip("neigh", "del", receiver.address, "dev", "eth0")

    @contextlib.contextmanager
    def slow(self, host: Host, rate: str, *, queue_ms: int = 100) -> Iterator[None]:
        """Meanwhile the host's link carries no more than this, such as "1mbit", in each direction.

        Args:
            queue_ms: for which a packet may wait before the link; beyond that it is dropped.
        """
        ends = ((host.namespace, "eth0"), (self._switch, host.name))
        for namespace, interface in ends:
            limit = ("tbf", "rate", rate, "burst", "16kb", "latency", f"{queue_ms}ms")
            _run("tc", "-netns", namespace, "qdisc", "add", "dev", interface, "root", *limit)
        try:
            yield
        finally:
            for namespace, interface in ends:
                _run("tc", "-netns", namespace, "qdisc", "del", "dev", interface, "root")

    def move(self, host: Host) -> None:
        """The host loses its address and gets a fresh one."""
        host.ip("address", "del", f"{host.address}/24", "dev", "eth0")
        self._add_address(host, self._fresh())

    @contextlib.contextmanager
    def here(self, host: Host) -> Iterator[None]:
        """The sockets that this thread makes, and threads and processes that it starts, belong to the host."""
        with Path("/proc/thread-self/ns/net").open() as before:
            with (_NAMESPACES / host.namespace).open() as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def _fresh(self) -> str:
        self._assigned += 1
        return f"{_SUBNET}.{self._assigned}"

    def _add_address(self, host: Host, address: str) -> None:
        host.ip("address", "add", f"{address}/24", "dev", "eth0")
        host.address = address

    def _switch_ip(self, *arguments: str) -> None:
        _run("ip", "-netns", self._switch, *arguments)


def missing() -> str:
    """What this machine lacks for such networks; "" if they work."""
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(lacking)} (Debian: apt-get install iproute2)"
    try:
        with Network() as network:
            host, other = network.add("a"), network.add("b")
            with network.slow(host, "1mbit"), network.lost(host, other), network.cut(host), network.here(host):
                pass
    except OSError as exc:
        return f"needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN) and a kernel with namespaces, veth, bridge and tbf: {exc}"
    return ""


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")


def _remove_left_over() -> None:
    """Of test processes that were killed."""
    for path in _NAMESPACES.glob(f"{_PREFIX}*-*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            _remove(f"{_PREFIX}{owner}-*")


def _remove(pattern: str) -> None:
    for path in _NAMESPACES.glob(pattern):
        inside = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True, check=False)
        for pid in map(int, inside.stdout.split()):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            _run("ip", "netns", "del", path.name)
