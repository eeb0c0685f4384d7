"""The audit of the encoders, as the scheduler gives it to its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from encryption.audit.kept import RECORD, keep_audit
from tests.unit.encryption.test_kept_audit import AUDIT, PICTURES

ROUTE = "/v1/privacy/audit"


def keep(parent: Path) -> None:
    keep_audit(parent / "privacy", AUDIT, PICTURES, [PICTURES, PICTURES])


async def test_the_audit_of_the_model_set_is_shown_and_one_of_the_state_folder_goes_before_it(
    kit: Any, settings: Any, tmp_path: Path
) -> None:
    models = tmp_path / "set"
    models.mkdir()
    (models / "manifest.json").write_bytes((settings.models / "manifest.json").read_bytes())
    async with kit.scheduler(settings.model_copy(update={"models": models})) as running:
        missing = await running.http.get(ROUTE)
        assert missing.status_code == 404
        assert "terrace privacy audit" in missing.json()["error"]
        assert (await running.http.get(f"{ROUTE}/0.png")).status_code == 404
        keep(models)
        answer = (await running.http.get(ROUTE)).json()
        # The manifest of these tests has no encoders: those of the audit are others.
        assert (answer["source"], answer["outdated"], len(answer["rows"])) == ("models", ["a.conv1"], 2)
        assert answer["rows"][1]["ssim"] == 0.2
        (models / "privacy" / RECORD).write_text("{")
        damaged = await running.http.get(ROUTE)
        assert damaged.status_code == 404
        assert "damaged" in damaged.json()["error"]
        keep(settings.state)
        assert (await running.http.get(ROUTE)).json()["source"] == "state"
        picture = await running.http.get(f"{ROUTE}/originals.png")
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
        assert picture.content == (settings.state / "privacy/originals.png").read_bytes()
        assert picture.headers["x-content-type-options"] == "nosniff"
        assert (await running.http.get(f"{ROUTE}/2.png")).status_code == 404


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fsecret",
        "%2e%2e/secret",
        "../secret",
        "audit.json%00",
        "-1",
        "1e0",
        "0001",
        "Originals",
        "%D9%A1",
        "0%0a",
    ],
)
async def test_no_other_file_is_given(name: str, scheduler: Any) -> None:
    keep(scheduler.settings.state)
    (scheduler.settings.state / "secret.png").write_bytes((scheduler.settings.state / "privacy/0.png").read_bytes())
    answer = await scheduler.http.get(f"{ROUTE}/{name}.png")
    assert answer.status_code in (400, 404, 422), answer.text
    assert list(answer.json()) == ["error"]
