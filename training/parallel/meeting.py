"""Ranks find each other: a store that rank 0 keeps, a check that all train the same, and the group of
torch.distributed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from tierkit.errors import Conflict, DeadlineExceeded, PortInUse, SetupError, Unavailable, UpstreamUnavailable
from tierkit.http.address import reachable_url
from training.parallel.group import Group, first_line

__all__ = ["Meeting", "RankPlace", "address_towards", "choose_interface", "common_step", "differences"]

_LOOK_S = 0.05
_CONNECT_S = 5.0
_FAREWELL_S = 1.5
"""Seconds for the other ranks to read what rank 0 keeps, before it ends. If the run was stopped, they have longer."""
_GRACE_S = 5.0
"""Seconds for torch to notice by itself that a wait is too long."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank's place among the ranks, as torchrun, Ray Train and `terrace train run` give it in the environment."""

    rank: int
    ranks: int
    address: str
    """Address of rank 0."""
    port: int
    local_rank: int
    """Among the ranks of this machine."""
    attempt: str
    """Number of this start of the ranks; torchrun starts all again after a failure."""
    hosted: bool
    """True if another process keeps the store at this address."""

    @classmethod
    def of_environment(cls) -> RankPlace:
        """Raises SetupError where the environment has none, or one that cannot be."""
        given = os.environ
        try:
            place = cls(
                rank=int(given["RANK"]),
                ranks=int(given["WORLD_SIZE"]),
                address=given["MASTER_ADDR"],
                port=int(given["MASTER_PORT"]),
                local_rank=int(given.get("LOCAL_RANK", 0)),
                attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0"),
                hosted=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or dist.is_initialized(),
            )
        except KeyError as error:
            raise SetupError(
                f"the environment lacks {error.args[0]}: start the ranks with 'terrace train run' on one machine, or "
                "with torchrun or Ray Train on several"
            ) from error
        except ValueError as error:
            raise SetupError(f"RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT must be whole numbers: {error}") from error
        if not 0 <= place.rank < place.ranks:
            raise SetupError(f"RANK is {place.rank} and WORLD_SIZE {place.ranks}: ranks are counted from 0")
        return place


class Meeting:
    """The ranks of a run, as one of them sees them; see `met`."""

    def __init__(self, place: RankPlace, store: dist.Store, patience_s: float) -> None:
        self.place = place
        self._store, self._patience_s = store, patience_s

    @classmethod
    @contextlib.contextmanager
    def met(cls, place: RankPlace, facts: Mapping[str, object], patience_s: float) -> Iterator[Meeting]:
        """Wait for all ranks, and check that their facts are the same. Leave the context once nothing is to be said.

        Args:
            facts: short values that must be the same at all ranks, by a name for people.
            patience_s: budget for this, and for each later wait.

        Raises:
            PortInUse, DeadlineExceeded, UpstreamUnavailable: some did not come, or cannot be reached.
            Conflict: they are of different runs, or two have the same number.
        """
        meeting = cls(place, _store(place, patience_s), patience_s)
        try:
            with meeting._keeper():
                twice = meeting._store.add(f"came/{place.rank}", 1) > 1
            if twice:
                raise Conflict(
                    f"another process is rank {place.rank} of this run already: give each its own RANK, and each run "
                    "its own MASTER_PORT"
                )
            meeting.tell("facts", dict(facts))
            if different := differences(meeting.all_told("facts")):
                raise Conflict(f"the ranks do not fit together: {different}")
            yield meeting
        finally:
            meeting._leave()

    def tell(self, what: str, value: object) -> None:
        """Publish a value for the other ranks."""
        with self._keeper():
            self._store.set(f"{what}/{self.place.rank}", json.dumps(value))

    def all_told(self, what: str) -> list[Any]:
        """Wait for a value of all ranks, and return the values in their order.

        Raises:
            DeadlineExceeded: some ranks have not published theirs within the budget.
        """
        deadline, missing = time.monotonic() + self._patience_s, set(range(self.place.ranks))
        with self._keeper():
            while missing := {rank for rank in missing if not self._store.check([f"{what}/{rank}"])}:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(_absent(missing, self.place.ranks, self._patience_s))
                time.sleep(_LOOK_S)
            return [json.loads(self._store.get(f"{what}/{rank}")) for rank in range(self.place.ranks)]

    def stop(self) -> None:
        """Ask all ranks to end the run now."""
        with self._keeper():
            self._store.set("stop", "1")

    def stopped(self) -> bool:
        """True if a rank has asked for that."""
        with self._keeper():
            return bool(self._store.check(["stop"]))

    @contextlib.contextmanager
    def group(self, device: torch.device) -> Iterator[Group]:
        """Context with the group of torch.distributed. An existing group, such as Ray Train's, is used.

        Raises:
            UpstreamUnavailable: a rank cannot be reached.
        """
        own = not dist.is_initialized()
        if own:
            self._check_ways()
            backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
            choose_interface(self.place.address)
            try:
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("group", self._store),
                    rank=self.place.rank,
                    world_size=self.place.ranks,
                    timeout=timedelta(seconds=self._patience_s),
                )
            except RuntimeError as error:
                raise UpstreamUnavailable(
                    f"rank {self.place.rank} cannot connect to all of the other {self.place.ranks - 1} within "
                    f"{self._patience_s:g} s: {first_line(error)}"
                ) from error
        try:
            # Of CUDA tensors gloo can only take the mean.
            exchanged = torch.device("cpu") if dist.get_backend() == "gloo" else device
            yield Group(self.place.rank, self.place.ranks, exchanged)
        finally:
            if own:
                dist.destroy_process_group()

    def _check_ways(self) -> None:
        """Raises UpstreamUnavailable with the pairs of ranks that cannot connect; gloo would name none, and later."""
        own = self.place.rank
        here = address_towards(f"http://{self.place.address}")
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        with socket.create_server((here, 0), family=family, backlog=self.place.ranks) as door:
            self.tell("door", door.getsockname()[:2])
            doors, budget_s = self.all_told("door"), min(_CONNECT_S, self._patience_s / 2)
            lost = []
            for other, (host, port) in list(enumerate(doors))[own + 1 :]:
                try:
                    socket.create_connection((host, port), timeout=budget_s).close()
                except OSError:
                    lost.append(f"rank {own} cannot reach rank {other} at {host}")
            self.tell("lost", lost)
            if all_lost := [each for found in self.all_told("lost") for each in found]:
                raise UpstreamUnavailable(
                    f"{'; '.join(all_lost)}: each must reach each other one, on any TCP port; look for a firewall"
                )

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[None]:
        try:
            with _bounded(self.place, self._patience_s):
                yield
        except dist.DistError as error:
            raise UpstreamUnavailable(
                f"rank {self.place.rank} has lost rank 0, which keeps what the ranks tell each other: "
                f"{first_line(error)}"
            ) from error

    def _leave(self) -> None:
        """Rank 0 waits for the others, since the store ends with it: some seconds, or the budget if all are to end."""
        with contextlib.suppress(dist.DistError), _bounded(self.place, self._patience_s + _FAREWELL_S):
            self._store.add("left", 1)
            if self.place.rank or self.place.hosted:
                return
            came = sum(self._store.check([f"came/{rank}"]) for rank in range(self.place.ranks))
            deadline = time.monotonic() + (self._patience_s if self._store.check(["stop"]) else _FAREWELL_S)
            while self._store.add("left", 0) < came and time.monotonic() < deadline:
                time.sleep(_LOOK_S)


def differences(facts: Sequence[Mapping[str, object]]) -> str:
    """Ranks that differ from most others, and in what, in words; "" if none does."""
    found = []
    for name in facts[0]:
        values = [each.get(name) for each in facts]
        most = max(values, key=values.count)
        found += [
            f"rank {rank} has the {name} {value}, others {most}" for rank, value in enumerate(values) if value != most
        ]
    return "; ".join(found)


def common_step(kept: Sequence[Collection[int] | str]) -> int:
    """The newest step from which all ranks can continue.

    Args:
        kept: the steps that each has on its disk, none for a rank that has nothing; or why a rank cannot use its files.

    Raises:
        SetupError: a rank cannot use its files.
        Conflict: they have no step in common.
    """
    for rank, each in enumerate(kept):
        if isinstance(each, str):
            raise SetupError(f"rank {rank}: {each}")
    steps = [set[int](each) for each in kept if not isinstance(each, str)]
    if not any(steps):
        return 0
    common = set[int].intersection(*steps)
    if not common:
        newest = ", ".join(f"rank {rank} {max(each, default='nothing')}" for rank, each in enumerate(steps))
        raise Conflict(
            f"the ranks cannot continue from the same step; the newest that each has: {newest}. Bring back the "
            "missing files of --folder from a copy, or give another --folder"
        )
    return max(common)


def address_towards(url: str) -> str:
    """This machine's address on the way to a URL.

    Raises:
        UpstreamUnavailable: no route leads there.
    """
    return urlsplit(reachable_url("http://0.0.0.0", peer=url)).hostname or ""


def choose_interface(address: str) -> None:
    """Have gloo listen where the way to this address begins; it would take what the machine's own name leads to."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError, Unavailable), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        here = address_towards(f"http://{address}")
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                asked = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(asked[20:24]) == here:
                    os.environ["GLOO_SOCKET_IFNAME"] = name


@contextlib.contextmanager
def _bounded(place: RankPlace, seconds: float) -> Iterator[None]:
    """Ends this process if what follows takes longer: torch's store waits without end for one that says nothing."""

    def end() -> None:
        sys.stderr.write(
            f"terrace rank {place.rank}: rank 0 at {place.address}:{place.port} says nothing for {seconds:g} s: it "
            "hangs, another program listens there, or the network is cut\n"
        )
        sys.stderr.flush()
        os._exit(os.EX_TEMPFAIL)

    timer = threading.Timer(seconds + _GRACE_S, end)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as error:
        raise SetupError(f"rank {place.rank} cannot start a thread: raise its limits of memory and threads") from error
    try:
        yield
    finally:
        timer.cancel()


def _store(place: RankPlace, patience_s: float) -> dist.Store:
    keeps = place.rank == 0 and not place.hosted
    try:
        with _bounded(place, patience_s):
            store = dist.TCPStore(
                place.address,
                place.port,
                is_master=keeps,
                wait_for_workers=False,
                timeout=timedelta(seconds=patience_s),
            )
    except RuntimeError as error:
        if keeps and "EADDRINUSE" in str(error):
            raise PortInUse(
                f"port {place.port} of this machine is in use: give the ranks another MASTER_PORT"
            ) from error
        raise UpstreamUnavailable(
            f"rank {place.rank} cannot reach rank 0 at {place.address}:{place.port} within {patience_s:g} s: "
            f"{first_line(error)}"
        ) from error
    return dist.PrefixStore(f"terrace/{place.attempt}", store)


def _absent(missing: Collection[int], ranks: int, patience_s: float) -> str:
    names = ", ".join(map(str, sorted(missing)))
    return (
        f"{ranks - len(missing)} of {ranks} ranks came within {patience_s:g} s, and not {names}: start "
        f"{'it' if len(missing) == 1 else 'them'}, or set WORLD_SIZE to the number of ranks"
    )
