"""The pages of jobs: the list as it changes, and one job from its first picture to its downloads."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from terrace import Client
from tests.browser.conftest import Fleet, OpenPage, faults

ENDS = ("end-1", "end-2")
BUDGET_S = 60
HOSTILE = {
    "markup": "<img src=x onerror=window.hit=1>.png",
    "RTL": "\u202egnp.\u2066evil\u202e.png",
    "long": "n" * 296 + ".png",
    "path": "../../zip/path.png",
}


def pictures(count: int) -> list[tuple[str, bytes]]:
    """Files that no other call makes, with their names."""
    files = []
    for number, pixels in enumerate(np.random.default_rng().integers(0, 256, (count, 32, 32, 3), np.uint8)):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append((f"picture-{number}.png", file.getvalue()))
    return files


def submitted(fleet: Fleet, files: list[tuple[str, bytes]], **fields: Any) -> str:
    """The id of a job."""
    form = [("images", file) for file in files]
    answer = httpx.post(f"{fleet.url}/v1/jobs", files=form, data=fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def finished(fleet: Fleet, files: list[tuple[str, bytes]], **fields: Any) -> str:
    job = submitted(fleet, files, **fields)
    with Client(fleet.url) as client:
        assert client.wait(job, budget_s=BUDGET_S).state == "completed"
    return job


@contextmanager
def held(fleet: Fleet) -> Iterator[None]:
    """No end device takes tasks."""
    with Client(fleet.url) as client:
        for node in ENDS:
            client.drain(node)
        try:
            yield
        finally:
            for node in ENDS:
                client.resume(node)


def row(page: Page, job: str) -> Any:
    return page.locator(f'[data-testid=job][data-job="{job}"]')


def test_a_new_job_shows_in_the_list_and_its_end_too(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/jobs")
    expect(page.get_by_label("State")).to_be_visible()
    with held(fleet):
        job = submitted(fleet, pictures(6), name="holiday")
        expect(row(page, job)).to_have_attribute("data-state", "queued")
        expect(row(page, job)).to_contain_text("holiday")
    expect(row(page, job)).to_have_attribute("data-state", "completed")
    expect(row(page, job).get_by_role("img")).to_have_attribute(
        "aria-label", "6 of 6 images have a coarse answer, 6 a fine one"
    )


def test_the_list_is_narrowed_by_state_and_by_text(fleet: Fleet, open_page: OpenPage) -> None:
    one = finished(fleet, pictures(1), name="Needle in the hay")
    with held(fleet):
        other = submitted(fleet, pictures(1), name="straw")
        page = open_page(f"{fleet.url}/ui/jobs")
        expect(row(page, other)).to_have_count(1)
        page.get_by_label("Find").fill("needle")
        expect(row(page, one)).to_have_count(1)
        expect(row(page, other)).to_have_count(0)
        page.get_by_label("Find").fill(other)
        expect(page.get_by_test_id("job")).to_have_count(1)
        page.get_by_label("Find").fill("")
        page.get_by_label("State").select_option("queued")
        expect(page.get_by_test_id("job")).to_have_count(1)
        expect(row(page, other)).to_have_count(1)
        page.get_by_label("State").select_option("cancelled")
        httpx.delete(f"{fleet.url}/v1/jobs/{other}")
        expect(row(page, other)).to_have_attribute("data-state", "cancelled")


def test_ten_thousand_jobs_are_a_few_rows_and_pages_of_older_ones(fleet: Fleet, open_page: OpenPage) -> None:
    finished(fleet, pictures(1))
    like = httpx.get(f"{fleet.url}/v1/jobs?limit=1").json()["jobs"][0]
    many = [like | {"id": f"{number:020x}", "name": f"old {number}"} for number in range(10_000)]
    answers = [{"jobs": [like], "next_cursor": like["id"]}, {"jobs": many[::-1], "next_cursor": None}]
    page = open_page(f"{fleet.url}/ui")
    page.route("**/v1/jobs?limit=*", lambda route: route.fulfill(json=answers.pop(0)))
    page.goto(f"{fleet.url}/ui/jobs")
    expect(page.get_by_test_id("job")).to_have_count(1)
    page.get_by_role("button", name="Show older").click()
    expect(row(page, many[-1]["id"])).to_have_count(1)
    expect(page.get_by_role("button", name="Show older")).to_be_hidden()
    assert page.get_by_test_id("job").count() < 100
    page.get_by_label("Find").fill("old 17")
    expect(row(page, many[1799]["id"])).to_have_count(1)


def test_a_job_is_seen_from_waiting_to_its_end_and_a_reload_loses_nothing(fleet: Fleet, open_page: OpenPage) -> None:
    with held(fleet):
        job = submitted(fleet, pictures(8), name="seen", batch_size=4, labels=json.dumps(["apple"] * 8))
        page = open_page(f"{fleet.url}/ui/jobs")
        row(page, job).get_by_role("link").click()
        expect(page.locator("h1")).to_have_text("seen")
        expect(page.get_by_test_id("job-head")).to_contain_text("queued")
        thumbnails = page.get_by_test_id("result").locator("img")
        expect(thumbnails).to_have_count(8)
        thumbnails.last.scroll_into_view_if_needed()
        for index in range(8):  # not by a script of ours, which the page's own policy may forbid
            expect(thumbnails.nth(index)).to_have_js_property("naturalWidth", 32)
        page.reload()
        expect(page.get_by_test_id("result").locator("img")).to_have_count(8)
    for _ in range(2):
        for index in range(8):
            result = page.locator(f'[data-testid=result][data-index="{index}"]')
            expect(result).to_have_attribute("data-coarse", answer(fleet, job, index, "coarse"))
            expect(result).to_have_attribute("data-fine", answer(fleet, job, index, "fine"))
            expect(result).to_contain_text(f"picture-{index}.png")
        expect(page.get_by_test_id("job-head")).to_contain_text("completed")
        expect(page.get_by_test_id("result").locator("img")).to_have_count(0)
        expect(page.get_by_test_id("of-results")).to_contain_text("pictures")
        expect(page.locator("[data-testid=attempts] .bars [data-outcome=ok]")).to_have_count(2)
        page.reload()


def answer(fleet: Fleet, job: str, index: int, stage: str) -> str:
    """What the API says of an image, once the job is over."""
    with Client(fleet.url) as client:
        client.wait(job, budget_s=BUDGET_S)
        found = client.results(job)
        result = next(each for each in found if each.index == index)
    given = result.coarse if stage == "coarse" else result.fine
    assert given is not None
    return given.label


def test_a_job_is_cancelled_by_keyboard_alone(fleet: Fleet, open_page: OpenPage) -> None:
    with held(fleet):
        job = submitted(fleet, pictures(3))
        page = open_page(f"{fleet.url}/ui/jobs/{job}")
        cancel = page.get_by_test_id("cancel")
        expect(cancel).to_be_visible()
        for _ in range(60):
            if page.evaluate("document.activeElement.dataset.testid") == "cancel":
                break
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("confirm")).to_contain_text(job)
        page.keyboard.press("Escape")
        expect(page.get_by_test_id("confirm")).to_have_count(0)
        expect(page.get_by_test_id("job-head")).to_contain_text("queued")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.get_by_test_id("job-head")).to_contain_text("cancelled")
        expect(cancel).to_be_hidden()
        expect(page.get_by_test_id("failure")).to_contain_text("not answered")
        expect(page.get_by_test_id("failure")).to_contain_text("3")


def test_both_downloads_have_all_images(fleet: Fleet, open_page: OpenPage) -> None:
    job = finished(fleet, pictures(7), batch_size=3)
    page = open_page(f"{fleet.url}/ui/jobs/{job}")
    lines = {}
    for form in ("jsonl", "csv"):
        with page.expect_download() as download:
            page.get_by_test_id(f"download-{form}").click()
        assert download.value.suggested_filename == f"{job}.{form}"
        lines[form] = download.value.path().read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines["jsonl"]] == list(range(7))
    assert len(lines["csv"]) == 8


def shown(text: str) -> str:
    """The text as the page shows it: nothing in it turns the direction of writing."""
    return re.sub("[\u202a-\u202e\u2066-\u2069]", "\ufffd", text)


@pytest.mark.parametrize("packed", [False, True], ids=["form", "zip"])
def test_hostile_names_are_text(packed: bool, fleet: Fleet, open_page: OpenPage) -> None:
    names = [name for kind, name in HOSTILE.items() if not (packed and kind == "path")] + ["deep/folder/a.png"]
    files = [(name, content) for name, (_, content) in zip(names, pictures(len(names)), strict=True)]
    if packed:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as into:
            for name, content in files:
                into.writestr(name, content)
        files = [("pictures.zip", archive.getvalue())]
    title = "<script>window.hit=1</script>\u202e<img src=x onerror=window.hit=1>"
    job = finished(fleet, files, name=title)
    known = [
        result["name"] for result in map(json.loads, httpx.get(f"{fleet.url}/v1/jobs/{job}/results").text.splitlines())
    ]
    assert len(known) == len(names)
    assert "<img src=x onerror=window.hit=1>.png" in known
    page = open_page(f"{fleet.url}/ui/jobs")
    expect(row(page, job).get_by_role("link")).to_have_text(shown(title))
    row(page, job).get_by_role("link").click()
    expect(page.locator("h1")).to_have_text(shown(title))
    for index, name in enumerate(known):
        expect(page.locator(f'[data-testid=result][data-index="{index}"] .name').first).to_have_text(shown(name))
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_pictures_that_cannot_be_read_are_listed(fleet: Fleet, open_page: OpenPage) -> None:
    files = [*pictures(2), ("<b>torn</b>.png", b"none")]
    job = finished(fleet, files, on_bad_input="skip")
    page = open_page(f"{fleet.url}/ui/jobs/{job}")
    expect(page.get_by_test_id("damaged")).to_contain_text("<b>torn</b>.png")
    expect(page.get_by_test_id("counts")).to_contain_text("1 of these cannot be read")
    expect(page.get_by_test_id("failure")).to_have_count(1)


def test_what_goes_up_a_tier_is_said(fleet: Fleet, open_page: OpenPage) -> None:
    job = finished(fleet, pictures(10), escalate="budget", escalate_from="end")
    page = open_page(f"{fleet.url}/ui/jobs/{job}")
    expect(page.get_by_test_id("escalation")).to_contain_text("edge")


def test_the_cloud_s_planned_and_actual_share_stand_beside_each_other(fleet: Fleet, open_page: OpenPage) -> None:
    job, other = (finished(fleet, pictures(10), scheme=scheme) for scheme in ("mapping", "end-cloud"))
    known = httpx.get(f"{fleet.url}/v1/jobs/{job}").json()
    planned, actual = (f"{100 * known[name]:.1f} %" for name in ("theta_cloud", "cloud_share"))
    page = open_page(f"{fleet.url}/ui/jobs/{job}")
    row = page.locator("div:has(> dt:text-is('Cloud'))")
    expect(row).to_contain_text(f"{planned} of the images planned (Eq. 5), {actual} in the end")
    page.goto(f"{fleet.url}/ui")
    figures = page.locator(".figures")
    expect(figures).to_contain_text("of the tasks planned for the cloud (Eq. 5)")
    expect(figures).to_contain_text("of the images went to the cloud")
    page.goto(f"{fleet.url}/ui/jobs/{other}")
    expect(page.get_by_test_id("counts")).to_contain_text("10 fine answers")
    expect(row).to_be_hidden()


def test_where_all_tiers_answer_the_same_classes_the_answers_have_other_names(
    fleet: Fleet, open_page: OpenPage
) -> None:
    job = finished(fleet, pictures(2))
    page = open_page(f"{fleet.url}/ui")
    page.route(f"**/v1/jobs/{job}", lambda route: route.fulfill(json=route.fetch().json() | {"flat": True}))
    page.goto(f"{fleet.url}/ui/jobs/{job}")
    expect(page.get_by_test_id("counts")).to_have_text("2 images · 2 first answers · 2 upper answers")
    expect(page.get_by_role("columnheader", name="Upper")).to_have_count(1)
    expect(page.get_by_role("columnheader", name="Fine")).to_have_count(0)


@pytest.mark.parametrize("job", ["00000000000000000000", "no-such-job", "%3Cimg%20src=x%3E"])
def test_a_job_that_is_not_there(job: str, fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/jobs/{job}", allowed=r"status of 404")
    expect(page.get_by_test_id("no-job")).to_be_visible()
    expect(page.locator("main").get_by_role("link", name="All jobs")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1440, "light")])
def test_both_pages_are_accessible(width: int, scheme: str, fleet: Fleet, open_page: OpenPage) -> None:
    job = finished(
        fleet, [*pictures(3), ("torn.png", b"none")], on_bad_input="skip", labels='["apple", "bear", null, null]'
    )
    page = open_page(f"{fleet.url}/ui/jobs", width=width, scheme=scheme)
    expect(row(page, job)).to_have_count(1)
    assert faults(page) == []
    page.goto(f"{fleet.url}/ui/jobs/{job}")
    expect(page.locator('[data-testid=result][data-index="2"][data-fine]')).to_have_count(1)
    expect(page.locator("[data-testid=attempts] .bars rect").first).to_be_attached()
    page.locator("summary").click()
    expect(page.get_by_test_id("attempt").first).to_be_visible()
    assert faults(page) == []


def test_an_attempt_that_failed_says_what_came_of_it(fleet: Fleet, open_page: OpenPage) -> None:
    job = finished(fleet, pictures(4))
    (good,) = httpx.get(f"{fleet.url}/v1/jobs/{job}/attempts").json()["attempts"]
    lost = good | {"attempt": 0, "node": "<b>end-0</b>", "outcome": "lost", "reason": "<i>silent</i>"}
    pages = [{"attempts": [lost, good], "next_cursor": None}, {"attempts": [lost], "next_cursor": "0-0"}]
    page = open_page(f"{fleet.url}/ui")
    page.route("**/attempts?limit=*", lambda route: route.fulfill(json=pages.pop(0)))
    page.goto(f"{fleet.url}/ui/jobs/{job}")
    bars = page.get_by_test_id("attempts").locator(".bars rect")
    expect(bars).to_have_count(2)
    expect(bars.and_(page.locator("[data-outcome=lost]")).locator("title")).to_contain_text("<i>silent</i>")
    expect(bars.and_(page.locator("[data-outcome=ok]")).locator("title")).to_contain_text("sent there")
    expect(page.get_by_test_id("failure")).to_contain_text("<i>silent</i>")
    page.locator("summary").click()
    expect(page.get_by_test_id("attempt").first).to_contain_text("<b>end-0</b>")
    expect(page.get_by_test_id("of-attempts")).to_contain_text("All 2")
    page.reload()
    expect(page.get_by_test_id("of-attempts")).to_contain_text("first 1 attempts")
