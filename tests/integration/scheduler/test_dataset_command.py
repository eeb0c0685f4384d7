"""`terrace datasets export` with a real scheduler."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from models.dataset import Dataset
from models.folders import read_labelled
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest
from tests.integration.scheduler.test_learning import send_pictures
from tests.integration.scheduler.test_observation_commands import Command, terrace as terrace
from tests.integration.scheduler.test_observations import Camera, camera, finer, local, seen
from tierkit.client import AsyncClient

FINE = bundled_hierarchy().fine


@pytest.fixture
async def gate(scheduler: Any, kit: Any) -> Camera:
    """Three pictures with labels, one with a sure answer, one with an unsure one, and one without."""
    device = await camera(scheduler, kit, lease_s=600.0)
    await send_pictures(
        device,
        *(seen(number, local=local(), finer=finer(9)) for number in (1, 2, 3, 4)),
        seen(50, local=local(), finer={**finer(9), "confidence": 0.75}),
        seen(60, local=local(), finer={**finer(9), "confidence": 0.65}),
        seen(70, local=local()),
    )
    async with AsyncClient(device.running.url) as client:
        for number in (1, 2, 3):
            await client.label("end-0", "gate", number, FINE[number])
    return device


def rows(folder: str) -> dict[int, dict[str, str]]:
    with Path(folder, "labels.csv").open(newline="", encoding="utf-8") as file:
        return {int(row["sequence"]): row for row in csv.DictReader(file)}


async def test_labelled_pictures_become_a_data_set(gate: Camera, terrace: Command) -> None:
    code, out, err = await terrace("datasets", "export", "flowers", "--test-share", "1", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["pictures"], found["by_person"], found["by_answer"]) == (3, 3, 0)
    assert set(found["without_pictures"]["train"]) >= {FINE[4], FINE[9]}
    dataset = Dataset.open("flowers", None)
    entry = load_manifest().default_for("end")
    load_manifest().check_hierarchy(dataset.hierarchy)
    images = dataset.read_for(entry, "test")
    assert images.fine is not None
    assert (images.fine.tolist(), images.images[:].shape) == ([1, 2, 3], (3, 32, 32, 3))
    validation = read_labelled(Path("flowers/test"), dataset.hierarchy, entry)
    assert validation.fine.tolist() == [1, 2, 3]
    code, _, err = await terrace("datasets", "export", "flowers")
    assert (code, "flowers" in err) == (2, True)


async def test_sure_answers_are_added(gate: Camera, terrace: Command) -> None:
    code, out, err = await terrace("datasets", "export", "more", "--answers", "--least-confidence", "0.8")
    assert (code, "4 images" in out) == (0, True), err
    assert "train" in err  # classes without pictures
    table = rows("more")
    assert {number: (row["class"], row["said_by"]) for number, row in table.items()} == {
        1: (FINE[1], "person"),
        2: (FINE[2], "person"),
        3: (FINE[3], "person"),
        4: (FINE[9], "answer"),
    }
    assert (table[1]["upper_label"], table[1]["person_at"] > "2026") == (FINE[9], True)
    assert (table[4]["upper_tier"], table[4]["upper_network"], table[4]["node"]) == ("cloud", "2" * 64, "end-0")
    code, out, _ = await terrace("datasets", "export", "default", "--answers", "--json")
    assert (code, json.loads(out)["by_answer"]) == (0, 2)


async def test_nothing_is_written_without_pictures(gate: Camera, terrace: Command) -> None:
    code, _, err = await terrace("datasets", "export", "none", "--node", "end-9")
    assert (code, bool(err)) == (2, True)
    assert list(Path.cwd().iterdir()) == []
