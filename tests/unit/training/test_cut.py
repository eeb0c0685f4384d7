"""Networks as chains, and cuts of about the same work."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as some

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

import torch

from models.training.networks import build_network
from tierkit.errors import InvalidInput
from training.parallel.cut import balanced, chain_of, measure

pytestmark = pytest.mark.train


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mlp", {"inputs": 3072, "hidden": [5, 7]}),
        ("mlp", {"inputs": 3072, "hidden": []}),
        ("wide-resnet", {"depth": 10, "width": 1}),
        ("mobilenet-v1", {"alpha": 0.125}),
        ("resnet-34", {"stem_kernel": 7, "stem_pool": True}),
    ],
)
def test_the_blocks_of_a_chain_are_the_network(kind: str, options: dict[str, Any]) -> None:
    if kind == "resnet-34":
        pytest.importorskip("torchvision")
    network = build_network(kind, 4, options).eval()
    names = set(network.state_dict())
    blocks = chain_of(network, kind)
    image = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        value = image
        for block in blocks:
            value = block(value)
        assert torch.equal(value, network(image))
    assert set(network.state_dict()) == names
    held = [id(each) for block in blocks for each in block.parameters()]
    assert sorted(held) == sorted(map(id, network.parameters()))


def test_a_network_with_two_exits_is_no_chain() -> None:
    with pytest.raises(InvalidInput, match="'ddnn' cannot be cut into stages"):
        chain_of(build_network("early-exit", 4, {}), "ddnn")


def test_the_work_of_a_block_follows_from_its_shapes() -> None:
    network = build_network("mlp", 4, {"inputs": 12, "hidden": [5, 7]})
    found = measure(chain_of(network, "net"), torch.zeros(1, 3, 2, 2))
    assert [each.work for each in found] == [2 * 12 * 5, 2 * 5 * 7, 2 * 7 * 4]
    assert [tuple(each.output.shape) for each in found] == [(1, 5), (1, 7), (1, 4)]
    # Flattened images, the linear layer, its activation, and dropout that leaves nothing out.
    assert found[0].kept_bytes == 4 * (12 + 5 + 5 + 5)


@given(some.lists(some.integers(0, 50), min_size=1, max_size=9), some.data())
def test_the_largest_part_is_as_small_as_it_can_be(work: list[int], data: some.DataObject) -> None:
    parts = data.draw(some.integers(1, len(work)))
    found = balanced(work, parts)
    assert [place for cut in found for place in cut] == list(range(len(work)))
    assert len(found) == parts
    assert all(found)

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(work[start:stop]) for start, stop in pairwise((0, *cuts, len(work))))

    best = min(largest(cuts) for cuts in combinations(range(1, len(work)), parts - 1))
    assert max(sum(work[place] for place in cut) for cut in found) == best
