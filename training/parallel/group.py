"""The other ranks of this process, by torch.distributed: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tierkit.errors import UpstreamUnavailable
from training.parallel.exchange import Broadcast, Done, Gather, Mean, Program, Request, Swap
from training.units import Flat

__all__ = ["Group", "first_line", "run_program"]


@dataclass(slots=True)
class Group:
    """The ranks of a run, of which this process is one; torch.distributed has been initialised."""

    rank: int
    ranks: int
    device: torch.device
    bytes_sent: int = field(default=0, init=False)
    """Bytes that this rank sends with the usual algorithm: all-reduce around a ring."""
    bytes_received: int = field(default=0, init=False)
    waited_s: float = field(default=0.0, init=False)
    """Seconds spent in exchanges."""

    def answer(self, request: Request) -> Flat:
        """Exchange with the others.

        Raises:
            UpstreamUnavailable: one of them does not answer, or has ended.
        """
        if isinstance(request, Done):
            return np.zeros(0, np.float32)
        began = time.perf_counter()
        with self.with_others():
            found = self._exchanged(request)
        self.waited_s += time.perf_counter() - began
        return found

    @contextmanager
    def with_others(self) -> Iterator[None]:
        """Names the errors of torch that come from the other ranks.

        Raises:
            UpstreamUnavailable: one of them does not answer, or has ended.
        """
        try:
            yield
        except RuntimeError as error:
            # Errors of gloo have no class.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            raise UpstreamUnavailable(
                f"rank {self.rank} lost another one of {self.ranks} in the middle of an exchange: {first_line(error)}"
            ) from error

    def _exchanged(self, request: Mean | Swap | Gather | Broadcast) -> Flat:
        own, size, others = self._tensor(request.values), request.values.nbytes, self.ranks - 1
        match request:
            case Mean():
                dist.all_reduce(own)
                self.count(2 * others * size // self.ranks, 2 * others * size // self.ranks)
                return _flat(own / self.ranks)
            case Swap(to=to, source=source):
                if to == self.rank and source == self.rank:
                    return request.values
                came = torch.empty_like(own)
                for each in dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, came, source)]
                ):
                    each.wait()
                self.count(size, size)
                return _flat(came)
            case Gather():
                parts = [torch.empty_like(own) for _ in range(self.ranks)]
                dist.all_gather(parts, own)
                self.count(others * size, others * size)
                return _flat(torch.cat(parts))
            case Broadcast(source=source):
                dist.broadcast(own, source)
                self.count(others * size if source == self.rank else 0, 0 if source == self.rank else size)
                return _flat(own)

    def count(self, sent: int, received: int) -> None:
        """Count bytes."""
        self.bytes_sent += sent
        self.bytes_received += received

    def _tensor(self, values: Flat) -> Tensor:
        return torch.from_numpy(values.copy()).to(self.device)


def run_program(
    program: Program, answer: Callable[[Request], Flat], done: Callable[[Done], None] = lambda done: None
) -> dict[str, float]:
    """Run one rank's program to its end; the figures of its rule.

    Args:
        answer: exchanges with the others: `Group.answer`.
        done: called after each step; what it raises ends the program.
    """
    given: Any = None
    while True:
        try:
            request = program.send(given)
        except StopIteration as end:
            figures: dict[str, float] = end.value
            return figures
        if isinstance(request, Done):
            done(request)
        given = answer(request)


def _flat(tensor: Tensor) -> Flat:
    found: Flat = tensor.cpu().numpy()
    return found


def first_line(error: Exception) -> str:
    """Message of an error of torch, without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
