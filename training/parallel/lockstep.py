"""All ranks of a run in one process, on virtual time. Their programs are unchanged and compute real gradients. The time
of steps and exchanges follows from machines and links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tierkit.errors import InvalidInput
from training.parallel.exchange import Broadcast, Done, Gather, Mean, Program, Request, Swap
from training.units import Flat
from training.virtual import Link

__all__ = ["Ranks", "Stepped", "run_ranks"]

_NOTHING = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The machines of a simulated run."""

    step_s: Sequence[float]
    """Seconds per step of each rank."""
    link: Link = field(default_factory=Link)
    """Link from each rank to each other one, the same in both directions."""
    cheat: Callable[[Flat], Flat] | None = None
    """Makes of the vectors of the last rank what it sends to the others; None for an honest rank."""


@dataclass(slots=True)
class Stepped:
    """Outcome of a run."""

    virtual_seconds: float = 0.0
    """Virtual seconds until the last rank had finished."""
    bytes_sent: int = 0
    """Bytes sent by all ranks."""
    steps: int = 0
    """Steps of each rank."""
    step_bytes: float = 0.0
    """Mean bytes that a rank sends per step."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of the rule; see `training.parallel.exchange.Program`."""


def run_ranks(
    programs: Sequence[Program], machines: Ranks, watch: Callable[[int, float], None] = lambda step, now: None
) -> Stepped:
    """Run the programs of all ranks to their end.

    Args:
        watch: called after each step of all ranks with its number and the virtual time.

    Raises:
        InvalidInput: the programs are of different rules.
    """
    found, ranks, link = Stepped(), len(programs), machines.link
    clocks = [0.0] * ranks
    answers: list[Flat | None] = [None] * ranks
    while True:
        asked: list[Request] = []
        for program, answer in zip(programs, answers, strict=True):
            try:
                asked.append(program.send(answer))  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                found.figures = end.value
        if not asked:
            break
        if len(asked) != ranks or len({type(each) for each in asked}) > 1:
            raise InvalidInput("the programs of the ranks do not fit together: they ask for different exchanges")
        if isinstance(asked[0], Done):
            clocks = [now + step_s for now, step_s in zip(clocks, machines.step_s, strict=True)]
            answers = [_NOTHING] * ranks
            found.steps += 1
            found.step_bytes = found.bytes_sent / ranks / found.steps
            watch(asked[0].step, max(clocks))
            continue
        if machines.cheat is not None and not isinstance(last := asked[-1], Done):
            asked[-1] = replace(last, values=machines.cheat(last.values))
        answers = [*answered(asked)]
        sizes = [each.values.nbytes for each in asked if not isinstance(each, Done)]
        if isinstance(asked[0], Swap):
            away = [isinstance(each, Swap) and each.to != rank for rank, each in enumerate(asked)]
            found.bytes_sent += sum(size for size, sends in zip(sizes, away, strict=True) if sends)
            sources = [each.source if isinstance(each, Swap) else rank for rank, each in enumerate(asked)]
            clocks = [
                now if source == rank else max(now, clocks[source]) + link.seconds(sizes[source])
                for rank, (now, source) in enumerate(zip(clocks, sources, strict=True))
            ]
        else:
            seconds, sent = _cost(asked[0], ranks, sizes[0], link)
            found.bytes_sent += sent
            clocks = [max(clocks) + seconds] * ranks
    found.virtual_seconds = max(clocks)
    return found


def answered(asked: Sequence[Request]) -> list[Flat]:
    """The answers to the requests of all ranks, which are of one kind and not `Done`."""
    match asked[0]:
        case Mean():
            mean: Flat = np.mean([each.values for each in asked if isinstance(each, Mean)], axis=0, dtype=np.float32)
            return [mean.copy() for _ in asked]
        case Swap():
            return [asked[each.source].values.copy() for each in asked if isinstance(each, Swap)]  # type: ignore[union-attr]
        case Gather():
            everything = np.concatenate([each.values for each in asked if isinstance(each, Gather)])
            return [everything.copy() for _ in asked]
        case Broadcast(source=source):
            return [asked[source].values.copy() for _ in asked]  # type: ignore[union-attr]
    raise AssertionError(asked[0])


def _cost(request: Request, ranks: int, size: int, link: Link) -> tuple[float, int]:
    """Seconds of a collective exchange, and bytes that all ranks send: all-reduce and all-gather around a ring, a
    broadcast along a tree."""
    match request:
        case Mean():
            return 2 * (ranks - 1) * link.seconds(size // ranks), 2 * (ranks - 1) * size
        case Gather():
            return (ranks - 1) * link.seconds(size), ranks * (ranks - 1) * size
        case _:
            return (ranks - 1).bit_length() * link.seconds(size), (ranks - 1) * size
