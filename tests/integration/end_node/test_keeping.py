"""Pictures that a device keeps to learn from: only where device, source and fleet allow it, and never in the way."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.kept.sample import KeptPicture
from models.kept.store import KeptStore
from tests.integration.end_node.aids import HIERARCHY, PixelModel, RunningUpper, serve_upper, to
from tests.integration.end_node.observing import SaidScheduler, observing, png, said_scheduler
from tierkit.errors import SpoolUnavailable
from tierkit.testing import wait_for
from tierkit.wire.learning import LabelOfPerson

LEARNING: dict[str, Any] = {
    "learn": {"size": "4MB"},
    "source": [{"name": "gate", "kind": "push", "learn": True}],
}


@pytest.fixture
async def hub() -> AsyncIterator[tuple[SaidScheduler, str]]:
    async with said_scheduler() as running:
        yield running


@pytest.fixture
async def upper() -> AsyncIterator[RunningUpper]:
    async with serve_upper(PixelModel("fine", 4)) as running:
        running.model.ran.clear()  # its own warm-up
        yield running


def routed(scheduler: SaidScheduler, upper: RunningUpper, *, below: float = 0.8, learn: bool = True) -> None:
    scheduler.routed(to(upper.url), below=below)
    scheduler.route = scheduler.route.model_copy(update={"learn": learn})


def settled(scheduler: SaidScheduler, count: int) -> Any:
    """Waits until the scheduler has these observations with their last answer."""

    def complete() -> bool:
        found = scheduler.observations.values()
        return len(found) == count and not any(each.waits for each in found)

    return wait_for(complete, what=f"{count} observations")


def kept(folder: Path) -> list[tuple[KeptPicture, bytes]]:
    if not (folder / "kept").exists():
        return []
    store = KeptStore.reading(folder / "kept")
    try:
        return [(picture, content) for _, picture, content in store.read()]
    finally:
        store.close()


async def test_an_unsure_picture_is_kept_with_both_answers(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    routed(scheduler, upper)
    async with observing(tmp_path, http, url, **LEARNING) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await settled(scheduler, 1)
        await wait_for(lambda: scheduler.devices[-1].kept is not None and scheduler.devices[-1].kept.pictures == 1)
        shown = (await http.get(f"{node.url}/v1/kept")).json()
    [(picture, content)] = kept(tmp_path)
    seen = scheduler.observations["gate", 1]
    assert seen.local is not None
    assert seen.finer is not None
    assert content == png(3)
    assert (picture.source, picture.sequence, picture.form) == ("gate", 1, "pixels")
    assert (picture.local, picture.local_sha256) == (seen.local.label, seen.local.sha256)
    assert (picture.label, picture.coarse_label) == (seen.finer.label, seen.finer.coarse_label)
    assert (picture.tier, picture.node_id, picture.classes) == ("edge", "edge-1", HIERARCHY.digest)
    assert picture.margin == pytest.approx(0.4)
    assert (shown["pictures"], shown[picture.kind], shown["reason"]) == (1, 1, "")


@pytest.mark.parametrize(
    ("values", "learn"),
    [
        (LEARNING, False),
        ({"learn": LEARNING["learn"]}, True),
        ({"source": LEARNING["source"]}, True),
    ],
    ids=["fleet", "source", "device"],
)
async def test_nothing_is_kept_without_the_word_of_all_three(
    values: dict[str, Any],
    learn: bool,
    tmp_path: Path,
    http: httpx.AsyncClient,
    hub: tuple[SaidScheduler, str],
    upper: RunningUpper,
) -> None:
    scheduler, url = hub
    routed(scheduler, upper, learn=learn)
    async with observing(tmp_path, http, url, **values) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await settled(scheduler, 1)
    assert scheduler.observations["gate", 1].finer is not None
    assert kept(tmp_path) == []


@pytest.mark.parametrize(("share", "learn", "ran"), [(1.0, True, [3]), (0.0, True, []), (1.0, False, [])])
async def test_a_share_of_the_sure_pictures_goes_up(
    share: float,
    learn: bool,
    ran: list[int],
    tmp_path: Path,
    http: httpx.AsyncClient,
    hub: tuple[SaidScheduler, str],
    upper: RunningUpper,
) -> None:
    scheduler, url = hub
    routed(scheduler, upper, below=0.3, learn=learn)
    values = LEARNING | {"learn": {"size": "4MB", "audit_share": share}}
    async with observing(tmp_path, http, url, **values) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await settled(scheduler, 1)
    seen = scheduler.observations["gate", 1]
    assert upper.model.ran == ran
    assert (seen.audit, seen.unsure, seen.finer is not None) == (bool(ran), False, bool(ran))
    assert len(kept(tmp_path)) == len(ran)


async def test_a_full_disk_disturbs_no_answer(
    tmp_path: Path,
    http: httpx.AsyncClient,
    hub: tuple[SaidScheduler, str],
    upper: RunningUpper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> bool:
        raise SpoolUnavailable("the disk is full")

    scheduler, url = hub
    routed(scheduler, upper)
    monkeypatch.setattr(KeptStore, "keep", full)
    async with observing(tmp_path, http, url, **LEARNING) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        for label in (1, 2, 3):
            await node.push(png(label))
        await settled(scheduler, 3)
        await wait_for(lambda: scheduler.devices[-1].kept is not None and scheduler.devices[-1].kept.reason != "")
    assert all(seen.finer is not None for seen in scheduler.observations.values())
    assert kept(tmp_path) == []


async def test_a_node_that_keeps_nothing_says_so(tmp_path: Path, http: httpx.AsyncClient) -> None:
    async with observing(tmp_path, http) as node:
        answer = await http.get(f"{node.url}/v1/kept")
    assert answer.status_code == 404


def labelled(number: int, sequence: int, label: int | None, *, classes: str = HIERARCHY.digest) -> LabelOfPerson:
    return LabelOfPerson(
        number=number, source="gate", sequence=sequence, label=label, classes=classes, by="anna", at=1e9
    )


async def test_labels_of_people_reach_the_kept_pictures(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    routed(scheduler, upper)
    async with observing(tmp_path, http, url, **LEARNING) as node:
        await wait_for(lambda: node.node.uplink.route is not None)
        for label in (1, 2, 3):
            await node.push(png(label))
        await settled(scheduler, 3)
        keeping = node.node.keeping
        assert keeping is not None
        await wait_for(lambda: keeping.state.pictures == 3)
        scheduler.labels = [
            labelled(1, 1, 0),
            labelled(2, 2, 0, classes="0" * 64),  # other classes
            labelled(3, 2, 99),  # no class
            labelled(4, 77, 0),  # a picture that is gone
            labelled(5, 3, 2),
        ]
        await wait_for(lambda: keeping.state.labelled == 2)
    found = {picture.sequence: (picture.person, picture.person_name) for picture, _ in kept(tmp_path)}
    assert found == {1: (0, "anna"), 2: (None, None), 3: (2, "anna")}


async def test_pictures_whose_numbers_belong_to_others_are_forgotten(
    tmp_path: Path, http: httpx.AsyncClient, hub: tuple[SaidScheduler, str], upper: RunningUpper
) -> None:
    scheduler, url = hub
    routed(scheduler, upper)
    async with observing(tmp_path, http, url, **LEARNING) as node:
        keeping = node.node.keeping
        assert keeping is not None
        await wait_for(lambda: node.node.uplink.route is not None)
        await node.push(png(3))
        await settled(scheduler, 1)
        await wait_for(lambda: keeping.state.pictures == 1)
        await node.node.renumbered("gate", 2)
        assert keeping.state.pictures == 1
        await node.node.renumbered("gate", 1)
        assert keeping.state.pictures == 0
