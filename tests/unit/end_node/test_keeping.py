"""The kept sample of a node: which answers are refused, and what a broken disk does."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from end_node.keeping import Keeping, kept_picture
from end_node.spool import Held
from end_node.uplink.rules import is_audited
from models.kept.store import KeptStore
from tests.integration.end_node.aids import HIERARCHY
from tierkit.testing import FakeClock
from tierkit.types import Tier
from tierkit.wire.events import Sent
from tierkit.wire.messages import DeviceRoute, Stage
from tierkit.wire.observations import FinerAnswer, LocalAnswer, Observation

MB = 2**20


def held(sequence: int = 1, *, label: int = 0, unsure: bool = True) -> Held:
    local = LocalAnswer(model="coarse", sha256="a" * 64, label=label, confidence=0.7)
    seen = Observation(source="gate", sequence=sequence, age_s=0.0, local=local, release=3, unsure=unsure)
    return Held(key=sequence, observation=seen, margin=0.4, size=5)


def finer(**values: Any) -> FinerAnswer:
    given = {"label": 3, "confidence": 0.9, "coarse_label": 1, "coarse_confidence": 0.95}
    return FinerAnswer(node_id="edge-1", tier=Tier.EDGE, model="fine", sha256="b" * 64, **given | values)


async def test_a_sample_grows_and_is_there_again(tmp_path: Path) -> None:
    first = Keeping(tmp_path, MB, HIERARCHY)
    assert await first.keep(held(), b"bytes", finer())
    assert (first.state.pictures, first.state.differs) == (1, 1)
    await first.close()
    second = Keeping(tmp_path, MB, HIERARCHY)
    await second.open()
    assert second.state == first.state
    await second.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"confidence": float("nan")},
        {"coarse_confidence": float("inf")},
        {"confidence": 1.5},
        {"label": 4},
        {"coarse_label": 2},
    ],
    ids=repr,
)
async def test_answers_that_cannot_be_learned_from_are_counted(wrong: dict[str, Any], tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, MB, HIERARCHY)
    assert not await keeping.keep(held(), b"bytes", finer(**wrong))
    assert (keeping.refused, keeping.state.pictures, keeping.state.reason) == (1, 0, "")
    await keeping.close()


async def test_a_disk_that_fails_is_tried_again_after_a_while(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "kept").write_bytes(b"in the way")
    keeping = Keeping(tmp_path / "kept", MB, HIERARCHY, clock=clock)
    assert not await keeping.keep(held(), b"bytes", finer())
    assert keeping.state.reason
    (tmp_path / "kept").unlink()
    assert not await keeping.keep(held(), b"bytes", finer()), "the pause is not over"
    clock.advance(31.0)
    assert await keeping.keep(held(), b"bytes", finer())
    assert (keeping.state.pictures, keeping.state.reason) == (1, "")
    await keeping.close()


async def test_a_damaged_sample_is_set_aside(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, MB, HIERARCHY)
    await keeping.keep(held(), b"bytes", finer())
    await keeping.close()
    (tmp_path / "kept.db").write_bytes(b"\xff" * 9000)
    again = Keeping(tmp_path, MB, HIERARCHY)
    assert await again.keep(held(2), b"bytes", finer())
    assert again.state.pictures == 1
    await again.close()
    assert (tmp_path / "damaged-kept.db").exists()


async def test_pictures_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, MB, HIERARCHY)
    await asyncio.gather(*(keeping.keep(held(number), b"bytes", finer()) for number in range(1, 9)))
    await keeping.close()
    store = KeptStore.reading(tmp_path)
    assert sorted(picture.sequence for _, picture, _ in store.read()) == list(range(1, 9))
    store.close()


@pytest.mark.parametrize(
    ("label", "unsure", "kind"), [(0, True, "differs"), (0, False, "differs"), (1, True, "unsure"), (1, False, "sure")]
)
def test_the_kind_of_a_picture(label: int, unsure: bool, kind: str) -> None:
    found = kept_picture(held(label=label, unsure=unsure), b"x", finer(), HIERARCHY.digest)
    assert found.kind == kind


@pytest.mark.parametrize(("form", "expected"), [("pixels", "pixels"), ("conv1", "features"), (None, "features")])
def test_only_what_is_known_to_have_travelled_as_pixels_counts_as_pixels(form: str | None, expected: str) -> None:
    sent = None if form is None else Sent(form=form, upload_bytes=5)
    assert kept_picture(held(), b"x", finer(sent=sent), HIERARCHY.digest).form == expected


@pytest.mark.parametrize(
    ("margin", "learn", "below", "share", "chance", "audited"),
    [
        (0.9, True, 0.3, 0.1, 0.05, True),
        (0.9, True, 0.3, 0.1, 0.1, False),
        (0.9, True, 0.3, 0.0, 0.0, False),
        (0.2, True, 0.3, 1.0, 0.0, False),  # unsure: it goes up in any case
        (0.9, False, 0.3, 1.0, 0.0, False),
        (0.9, True, None, 1.0, 0.0, False),
    ],
)
def test_which_pictures_are_audited(
    margin: float, learn: bool, below: float | None, share: float, chance: float, audited: bool
) -> None:
    route = DeviceRoute(version="0" * 16, upstreams=(), stages=(Stage(tier=Tier.EDGE, below=below),), learn=learn)
    assert is_audited(route, margin=margin, share=share, chance=chance) is audited
    assert not is_audited(None, margin=margin, share=share, chance=chance)
