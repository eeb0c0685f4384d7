"""A segment that spreads over machines on virtual time, by the tree that hosts use. Pure but for its clock."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from tierkit.virtual_time import VirtualLoop
from training.data.tree import HOST, Came, Failed, Got, Left, Passed, Start, Stop, Tree

__all__ = ["Spread", "formula_s", "spread"]

_FOREVER_S = 1e9
_LOOK_S = 1.0


@dataclass(slots=True, kw_only=True)
class Spread:
    """What came of it."""

    seconds: float = 0.0
    """Until the last machine had all."""
    mean_s: float = 0.0
    """Over the machines."""
    got: int = 0
    killed: int = 0
    copies: int = 0
    """That were begun, some of them to go on from where another one ended."""
    sent_by_host: float = 0.0
    """Whole segments."""


@dataclass(slots=True)
class _Machine:
    have: int
    """Chunks, its first ones."""
    task: asyncio.Task[None] | None = None
    dead: bool = False
    free_at: float = 0.0
    """When what it sends has left."""
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def changed(self) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()


def formula_s(receivers: int, *, deepest: int, chunks: int, segment_s: float) -> float:
    """What it takes when each step makes `deepest + 1` holders of one: a step is a segment, and a chunk for each
    machine of a chain but the first."""
    steps = math.ceil(math.log(receivers + 1) / math.log(deepest + 1) - 1e-9)
    return steps * segment_s * (1 + (deepest - 1) / chunks)


def spread(
    receivers: int,
    *,
    chunks: int,
    segment_s: float,
    deepest: int,
    serve: bool = True,
    kill_at_s: float | None = None,
    notice_s: float = 0.0,
) -> Spread:
    """Spread one segment from a host.

    Args:
        chunks: of the segment, all of one size.
        segment_s: what a machine takes to send it; each sends as fast as all others, and receives as fast.
        deepest: see `training.data.tree.Tree`.
        serve: whether machines pass on what they get.
        kill_at_s: when every other machine that is sending dies, without a word.
        notice_s: until a receiver notices that its source is dead.
    """
    loop, result = VirtualLoop(), Spread()  # type: ignore[abstract]  # no I/O
    # Nobody is silent here, and the turns of the virtual machines are all of one length.
    tree = Tree(deepest=deepest, silent_s=_FOREVER_S, busy_s=_FOREVER_S, turn_s=_FOREVER_S)
    machines = {HOST: _Machine(chunks)}
    machines |= {f"w{number}": _Machine(0) for number in range(receivers)}
    chunk_s = segment_s / chunks
    ended: dict[str, float] = {}

    def do(effects: list[Start | Stop]) -> None:
        for effect in effects:
            task = machines[effect.worker].task
            if task is not None:
                task.cancel()
            if isinstance(effect, Start) and not machines[effect.worker].dead:
                result.copies += 1
                copying = copy(effect.worker, effect.source)
                machines[effect.worker].task = loop.create_task(copying)

    async def copy(name: str, source: str) -> None:
        own, theirs = machines[name], machines[source]
        while own.have < chunks:
            if theirs.dead:
                await loop.until(loop.time() + notice_s)
                own.task = None
                do(tree.on(Failed(worker=name, reason="gone"), loop.time()))
                return
            if theirs.have <= own.have:
                theirs.waiting.append(loop.create_future())
                await theirs.waiting[-1]
                continue
            theirs.free_at = max(theirs.free_at, loop.time()) + chunk_s
            await loop.until(theirs.free_at)
            if theirs.dead:
                continue
            own.have += 1
            result.sent_by_host += (source == HOST) / chunks
            own.changed()
        own.task = None
        ended[name] = loop.time()
        do(tree.on(Got(worker=name, segment=0, bytes_per_s=1.0), loop.time()))

    async def kill() -> None:
        assert kill_at_s is not None
        await loop.until(kill_at_s)
        copies = [tree.copy_of(name) for name in tree]
        sending = sorted({each.source for each in copies if each is not None} - {HOST})
        for name in sending[::2]:
            result.killed += 1
            machine = machines[name]
            machine.dead = True
            if machine.task is not None:
                machine.task.cancel()
            machine.changed()
            ended.pop(name, None)
        await loop.until(loop.time() + notice_s)
        for name in sending[::2]:
            do(tree.on(Left(worker=name), loop.time()))

    async def main() -> None:
        killing = None if kill_at_s is None else loop.create_task(kill())
        for name in machines:
            if name != HOST:
                came = Came(worker=name, serves=serve, wanted=frozenset({0}), holds=frozenset())
                do(tree.on(came, loop.time()))
        while any(machine.have < chunks and not machine.dead for machine in machines.values()):
            await loop.until(loop.time() + min(_LOOK_S, segment_s / 10))
            do(tree.on(Passed(), loop.time()))
        if killing is not None:
            await killing

    loop.run(main())
    result.got = len(ended)
    result.seconds = max(ended.values())
    result.mean_s = math.fsum(ended.values()) / len(ended)
    return result
