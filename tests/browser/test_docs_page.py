"""The page on the API: it works offline, and calls can be tried out on it."""

from __future__ import annotations

import io

from PIL import Image
from playwright.sync_api import expect

from tests.browser.conftest import Fleet, OpenPage


def test_calls_are_tried_out_on_the_docs_page(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/docs")
    devices = page.locator("#operations-fleet-list_devices_v1_devices_get")
    submission = page.locator("#operations-jobs-submit_v1_jobs_post")
    for operation in (devices, submission):
        operation.locator(".opblock-summary-control").click()
        operation.get_by_role("button", name="Try it out").click()
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), "grey").save(picture, "PNG")
    submission.locator("input[type=file]").first.set_input_files(
        {"name": "a.png", "mimeType": "image/png", "buffer": picture.getvalue()}
    )
    for operation, status in ((devices, "200"), (submission, "202")):
        operation.get_by_role("button", name="Execute").click()
        expect(operation.locator(".live-responses-table tbody .response-col_status")).to_have_text(status)
