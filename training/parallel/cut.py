"""Networks as chains of blocks, and cuts between them that give each rank about the same work. Decisions follow from
shapes, never from timing, so they are the same at all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tierkit.errors import InvalidInput

__all__ = ["BlockCost", "balanced", "chain_of", "measure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """Cost of a block of a network, of one image."""

    work: int
    """Floating-point operations of the forward pass."""
    kept_bytes: int
    """Outputs of all layers, which the backward pass needs."""
    output: Tensor
    """Shape and type of its output, `[1, ...]`, without storage."""


def chain_of(network: nn.Module, name: str) -> list[nn.Module]:
    """Blocks whose composition is the network.

    Raises:
        InvalidInput: it cannot be cut.
    """
    chain = getattr(network, "chain", None)
    if chain is None:
        raise InvalidInput(
            f"the network {name!r} cannot be cut into stages, because its blocks do not follow one another"
        )
    blocks: list[nn.Module] = chain()
    return blocks


def measure(blocks: Sequence[nn.Module], image: Tensor) -> list[BlockCost]:
    """The cost of each block.

    Args:
        image: float `[1, c, h, w]`.
    """
    kept = 0

    def count(_layer: nn.Module, _given: Any, found: Tensor) -> None:
        nonlocal kept
        kept += found.nbytes

    found, value = [], image
    with torch.no_grad():
        for block in blocks:
            kept = 0
            layers = [each for each in block.modules() if not any(each.children())]
            hooks = [each.register_forward_hook(count) for each in layers]
            with FlopCounterMode(display=False) as counter:
                value = block.eval()(value)
            for hook in hooks:
                hook.remove()
            found.append(BlockCost(work=counter.get_total_flops(), kept_bytes=kept, output=value.to("meta")))
    return found


def balanced(work: Sequence[int], parts: int) -> list[range]:
    """Cut a chain into parts so that the one with the most work has as little as possible.

    Args:
        work: work of each block.
        parts: at most as many as blocks; each gets one or more.
    """
    low, high = max(work), sum(work)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(work, middle)) > parts:
            low = middle + 1
        else:
            high = middle
    found = _filled(work, low)
    while len(found) < parts:
        widest = max(found, key=len)
        place, middle = found.index(widest), (widest.start + widest.stop) // 2
        found[place : place + 1] = [range(widest.start, middle), range(middle, widest.stop)]
    return found


def _filled(work: Sequence[int], most: int) -> list[range]:
    """Cut into as few parts as possible. None has more work than `most`."""
    starts, total = [0], 0
    for place, each in enumerate(work):
        if total + each > most and place:
            starts.append(place)
            total = 0
        total += each
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(work)], strict=True)]
