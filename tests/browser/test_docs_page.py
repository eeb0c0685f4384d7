"""The page on the API in a browser: it works offline, and calls can be tried out on it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tierkit.testing import service_process

playwright = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium")
BUDGET_MS = 30_000
"""For whatever a test waits for; far more than it takes."""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)")
async def test_calls_are_tried_out_on_the_docs_page(tmp_path: Path) -> None:
    wrong: list[str] = []
    command = ["-m", "scheduler", "--port", "0", "--state", str(tmp_path / "state")]
    async with (
        service_process(command, ready_file=tmp_path / "ready") as service,
        playwright.async_playwright() as driver,
    ):
        url = service.ready["url"]
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        page.set_default_timeout(BUDGET_MS)
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else wrong.append(request.url))
        await page.goto(f"{url}/docs")
        devices = page.locator("#operations-fleet-list_devices_v1_devices_get")
        submission = page.locator("#operations-jobs-submit_v1_jobs_post")
        for operation in (devices, submission):
            await operation.locator(".opblock-summary-control").click()
            await operation.get_by_role("button", name="Try it out").click()
        await submission.locator("input[type=file]").first.set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": png()}
        )
        for operation, status in ((devices, "200"), (submission, "202")):
            await operation.get_by_role("button", name="Execute").click()
            shown = operation.locator(".live-responses-table tbody .response-col_status")
            await playwright.expect(shown).to_have_text(status)
        await browser.close()
    assert wrong == []


def png() -> bytes:
    """A grey picture of 32 x 32 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), "grey").save(file, "PNG")
    return file.getvalue()
