"""`terrace learning` and `terrace observations --disagree` with a real scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.hierarchy import bundled_hierarchy
from terrace.commands import learning
from tests.integration.scheduler.test_learning import ID, improvement, send_pictures
from tests.integration.scheduler.test_observation_commands import Command, terrace as terrace
from tests.integration.scheduler.test_observations import Camera, camera, finer, local, seen
from tierkit.client import AsyncClient
from tierkit.errors import InvalidInput, NotFound

FINE = bundled_hierarchy().fine


@pytest.fixture
async def gate(scheduler: Any, kit: Any) -> Camera:
    return await camera(scheduler, kit, lease_s=600.0)


async def test_disagreements_are_listed_and_labelled(gate: Camera, terrace: Command) -> None:
    code, out, _ = await terrace("observations", "--disagree")
    assert (code, out) == (0, "no observations\n")
    await send_pictures(gate, *(seen(number, local=local(3, number / 10), finer=finer()) for number in (1, 2, 3)))
    code, out, _ = await terrace("observations", "--disagree", "--json")
    assert (code, [json.loads(line)["sequence"] for line in out.splitlines()]) == (0, [3, 2, 1])
    code, out, _ = await terrace("observations", "--disagree", "--limit", "1", "--node", "end-0")
    assert (code, out.count("gate")) == (0, 1)
    async with AsyncClient(gate.running.url) as client:
        await client.label("end-0", "gate", 2, FINE[5])
        with pytest.raises(InvalidInput, match=FINE[5]):
            await client.label("end-0", "gate", 2, FINE[5][:-1] + "x")
        with pytest.raises(NotFound):
            await client.label("end-0", "gate", 9, FINE[5])
        (picture,) = (await client.picture_page("labelled")).observations
        assert (picture.sequence, picture.person, picture.person_by) == (2, FINE[5], None)
    code, out, _ = await terrace("observations", "--disagree", "--json")
    assert [json.loads(line)["sequence"] for line in out.splitlines()] == [3, 1]
    async with AsyncClient(gate.running.url) as client:
        await client.take_label_back("end-0", "gate", 2)
        assert (await client.picture_page("labelled")).observations == ()


@pytest.mark.parametrize(
    "words",
    [("--follow",), ("--amended",), ("--below", "0.5"), ("--since", "2h"), ("--label", "x"), ("--out", "x.csv")],
)
async def test_disagreements_take_no_other_filter(gate: Camera, terrace: Command, words: tuple[str, ...]) -> None:
    code, _, err = await terrace("observations", "--disagree", *words)
    assert (code, "--disagree" in err) == (2, True)


async def test_what_is_kept_and_how_far_tiers_agree(
    gate: Camera, terrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = await terrace("learning")
    assert (code, len(out.splitlines())) == (0, 1)
    kept: dict[str, Any] = {
        "pictures": 1234,
        "differs": 200,
        "unsure": 1000,
        "sure": 34,
        "bytes": 4_000_000,
        "size_bytes": 5_000_000,
    }
    audited = seen(1, local=local(4, 0.9), finer=finer(), audit=True)
    kept |= {"reason": "no room on the disk", "personal": True, "personal_reason": "the head is damaged"}
    await gate.send(audited, device={"kept": kept})
    assert (await gate.running.http.put(f"/v1/improvements/{ID}", json=improvement())).status_code == 200
    code, out, _ = await terrace("learning")
    assert code == 0
    for words in ("end-0", "1,234", "no room on the disk", "head is damaged", " own ", "flowers@7", "training"):
        assert words in out
    assert "silent" not in out
    monkeypatch.setattr(learning, "_SILENT_S", 0.0)
    assert "training, silent" in " ".join((await terrace("learning"))[1].split())
    code, out, _ = await terrace("learning", "--json")
    found = json.loads(out)
    assert (found["agreement"], found["audited"], found["improvements"][0]["id"]) == (1.0, 1, ID)
    assert found["nodes"][0]["kept"] == {**kept, "labelled": 0}
