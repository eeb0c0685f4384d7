"""The page of one source: what it saw, what was amended, who may see it, and how it is paused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from anyio.from_thread import BlockingPortal
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage, faults
from tests.browser.hub import ALICE, BOB, PI, Hub
from tests.browser.test_sign_in import UNSIGNED, sign_in
from tests.browser.watching import HOSTILE, PLAYS_EVENTS, PlayedNode, history, jpeg, row, tile, turn
from tierkit.testing import service_process


def numbers(page: Page) -> list[int]:
    shown = page.get_by_test_id("observation").evaluate_all("(rows) => rows.map((row) => row.dataset.number)")
    return [int(each) for each in shown]


def test_the_answer_of_the_device_and_the_better_one_stand_side_by_side(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(
        node.seen(1, "trees", 0.3, unsure=True, waits=True),
        node.seen(2, "fish", 0.4, unsure=True, reason="no route to an upstream node"),
        {"source": "gate", "sequence": 3, "age_s": 1.0, "reason": "the file is truncated"},
        node.seen(4, "people", 0.9),
    )
    node.send_picture(1, jpeg(1))
    page = open_page(history(watched_url, node))
    expect(row(page, 1)).to_contain_text("trees 30 %")
    expect(row(page, 1)).to_contain_text("it waits for one")
    expect(row(page, 1).get_by_role("img", name="Picture 1")).to_be_visible()
    expect(row(page, 2)).to_contain_text("no route to an upstream node")
    expect(row(page, 3)).to_contain_text("the file is truncated")
    assert numbers(page) == [4, 3, 2, 1]
    picture = row(page, 1).get_by_role("link").get_attribute("href")
    assert httpx.get(urljoin(watched_url, str(picture))).content == jpeg(1)
    node.send(
        node.seen(1, "trees", 0.3, unsure=True, revision=1, finer=node.finer("oak_tree", 0.8)),
        node.seen(2, "fish", 0.4, unsure=True, revision=1, finer=node.finer("rocket", 0.7)),
        node.seen(5, "insects"),
    )
    for words in ("trees 30 %", "oak tree 80 %", "confirmed", "cloud-0"):
        expect(row(page, 1)).to_contain_text(words)
    for words in ("fish 40 %", "rocket 70 %", "corrected"):
        expect(row(page, 2)).to_contain_text(words)
    expect(row(page, 5)).to_contain_text("insects")
    assert numbers(page) == [5, 4, 3, 2, 1]


def test_observations_are_chosen_by_class_confidence_and_amendment(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(
        node.seen(1, "trees", 0.3, finer=node.finer("oak_tree", 0.8)),
        node.seen(2, "trees", 0.45),
        node.seen(3, "fish", 0.6),
        node.seen(4, "fish", 0.2, revision=1, finer=node.finer("shark", 0.4)),
    )
    page = open_page(history(watched_url, node), allowed="status of 404")
    label, sure = page.get_by_label("Class"), page.get_by_label("Less sure than")
    expect(page.get_by_test_id("observation")).to_have_count(4)
    label.fill("trees")
    label.press("Enter")
    expect(page.get_by_test_id("observation")).to_have_count(2)
    assert numbers(page) == [2, 1]
    label.fill("oak tree")
    label.press("Enter")
    expect(page.get_by_test_id("observation")).to_have_count(1)
    assert numbers(page) == [1]
    label.fill("")
    label.press("Enter")
    sure.select_option("50 %")
    expect(page.get_by_test_id("observation")).to_have_count(2)
    assert numbers(page) == [4, 2]
    for format_ in ("jsonl", "csv"):
        file = httpx.get(
            urljoin(watched_url, str(page.get_by_test_id(f"download-{format_}").get_attribute("href")))
        ).text
        lines = file.splitlines() if format_ == "jsonl" else file.splitlines()[1:]
        assert len(lines) == 2
    page.get_by_label("Only amended").check()
    expect(page.get_by_test_id("observation")).to_have_count(1)
    assert numbers(page) == [4]
    # What comes by itself is chosen too, and what no longer fits goes.
    node.send(node.seen(5, "fish", 0.1), node.seen(2, "trees", 0.45, revision=1))
    expect(row(page, 2)).to_have_count(1)
    assert numbers(page) == [4, 2]
    node.send(node.seen(4, "fish", 0.2, revision=2, finer=node.finer("shark", 0.9)))
    expect(row(page, 4)).to_have_count(0)
    label.fill("no such class")
    label.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("no such class")
    expect(page.get_by_test_id("observation")).to_have_count(0)


def test_older_observations_are_shown_page_by_page(watched_url: str, node: PlayedNode, open_page: OpenPage) -> None:
    node.send(*(node.seen(number, age_s=500.0 - number) for number in range(1, 451)))
    page = open_page(history(watched_url, node))
    older = page.get_by_role("button", name="Show older")
    for shown in (200, 400, 450):
        expect(page.get_by_test_id("shown-of")).to_have_text(f"{shown} shown")
        if shown < 450:
            older.click()
    expect(older).to_be_hidden()
    assert numbers(page)[0] == 450
    assert len(numbers(page)) < 100
    page.get_by_role("region", name="Observations").evaluate("(region) => region.scrollTo(0, region.scrollHeight)")
    expect(row(page, 1)).to_have_count(1)


def test_a_stream_that_was_away_leaves_no_hole(watched_url: str, node: PlayedNode, open_page: OpenPage) -> None:
    node.send(node.seen(1, age_s=600.0))
    page = open_page(history(watched_url, node))
    expect(row(page, 1)).to_have_count(1)
    turn(page, hidden=True)
    node.send(*(node.seen(number, age_s=500.0 - number) for number in range(2, 302)))
    turn(page, hidden=False)
    expect(row(page, 301)).to_have_count(1)
    page.get_by_role("button", name="Show older").click()
    expect(page.get_by_test_id("shown-of")).to_have_text("301 shown")


def test_twenty_thousand_rows_stay_smooth(watched_url: str, node: PlayedNode, open_page: OpenPage) -> None:
    node.send(node.seen(1))
    like = httpx.get(f"{watched_url}/v1/observations", params={"node": node.node_id}).json()["observations"][0]
    many = [like | {"sequence": number} for number in range(20_000, 0, -1)]

    def before(page: Page) -> None:
        page.add_init_script(PLAYS_EVENTS)
        page.route(
            "**/v1/observations?*", lambda route: route.fulfill(json={"observations": many, "next_cursor": "more"})
        )

    page = open_page(history(watched_url, node), before=before)
    expect(page.get_by_test_id("shown-of")).to_contain_text("The newest 20,000 are shown")
    expect(page.get_by_role("button", name="Show older")).to_be_hidden()
    assert len(numbers(page)) < 100
    page.evaluate("(seen) => tell('/v1/observations/events', 'observation', seen)", like | {"sequence": 20_001})
    expect(row(page, 20_001)).to_have_count(1)
    page.get_by_role("region", name="Observations").evaluate("(region) => region.scrollTo(0, region.scrollHeight)")
    expect(row(page, 2)).to_have_count(1)
    expect(row(page, 1)).to_have_count(0)
    assert len(numbers(page)) < 100


def test_a_row_that_is_read_stays_in_its_place_while_others_come(
    watched_url: str, node: PlayedNode, open_page: OpenPage
) -> None:
    node.send(*(node.seen(number, age_s=500.0 - number) for number in range(1, 201)))
    page = open_page(history(watched_url, node))
    region = page.get_by_role("region", name="Observations")
    expect(row(page, 200)).to_be_visible()
    region.evaluate("(region) => region.scrollTo(0, 2000)")
    expect(row(page, 150)).to_be_visible()
    before = row(page, 150).bounding_box()
    node.send(*(node.seen(number) for number in range(201, 211)))
    expect(page.get_by_test_id("shown-of")).to_have_text("210 shown")
    assert row(page, 150).bounding_box() == before


@pytest.fixture
def real(watched_url: str, portal: BlockingPortal, tmp_path: Path) -> Iterator[Path]:
    """The folder that a real end device, `cam`, has as its source `inbox`."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    (tmp_path / "cam.toml").write_text(
        f'[end]\nnode_id = "cam"\nport = 0\nscheduler = "{watched_url}"\nremote_sources = true\n\n'
        f'[spool]\nfolder = "{tmp_path / "spool"}"\n\n'
        f'[[source]]\nname = "inbox"\nurl = "{folder}"\n\n[uplink]\npictures_to_scheduler = "all"\n'
    )
    options = ["-m", "terrace", "end", "--config", str(tmp_path / "cam.toml")]
    with portal.wrap_async_context_manager(service_process(options, ready_file=tmp_path / "ready")):
        yield folder


def test_a_source_of_a_real_device_is_seen_paused_and_resumed(
    watched_url: str, real: Path, open_page: OpenPage
) -> None:
    (real / "tree.jpg").write_bytes(jpeg(5, 64, 64))
    page = open_page(f"{watched_url}/ui/live")
    page.get_by_label("Find").fill("inbox")
    inbox = page.locator('[data-testid=tile][data-node=cam][data-source="inbox"]')
    expect(inbox).to_contain_text("running")
    expect(inbox.locator("img")).to_be_visible()
    inbox.get_by_role("link").click()
    expect(row(page, 1)).to_contain_text("tree.jpg")
    page.get_by_role("button", name="Pause").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(inbox).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_an_error_of_the_device_is_shown(watched_url: str, node: PlayedNode, open_page: OpenPage) -> None:
    node.send(node.seen(1))
    page = open_page(history(watched_url, node), allowed=r"status of 5\d\d")
    page.get_by_role("button", name="Pause").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Pause").click()
    expect(page.get_by_role("alert")).to_contain_text(node.node_id)


def test_an_owner_chooses_readers_and_others_see_nothing(hub: Hub, open_page: OpenPage) -> None:
    with closing(PlayedNode(hub.url, "pi-gate", PI)) as node:
        node.send(node.seen(1, "trees"))
        page = open_page(f"{hub.url}/ui/live", allowed=UNSIGNED)
        sign_in(page, BOB)
        expect(page.get_by_test_id("no-sources")).to_contain_text("An operator can make you")
        alice = open_page(history(hub.url, node), allowed=UNSIGNED)
        sign_in(alice, ALICE)
        alice.get_by_test_id("rights").locator("summary").click()
        alice.get_by_label("Owner").fill("bob")
        alice.get_by_role("button", name="Save").click()
        expect(alice.get_by_test_id("rights").get_by_role("status")).to_have_text("Saved.")
        expect(tile(page, node)).to_contain_text("of bob")
        tile(page, node).get_by_role("link").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        page.get_by_test_id("rights").locator("summary").click()
        expect(page.get_by_label("Owner")).to_be_disabled()
        page.get_by_label("Readers").fill("alice, carol")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_test_id("rights").get_by_role("status")).to_have_text("Saved.")
        expect(page.get_by_text("alice, carol")).to_be_visible()
        seen = httpx.get(f"{hub.url}/v1/sources", headers={"authorization": f"Bearer {ALICE}"}).json()["sources"]
        assert [(each["owner"], each["readers"]) for each in seen] == [("bob", ["alice", "carol"])]


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_hostile_texts_are_shown_as_text(
    watched_url: str, node: PlayedNode, open_page: OpenPage, width: int, scheme: Any
) -> None:
    source = "s" * 63
    node.send(
        node.seen(1, "trees", source=source, name=HOSTILE, reason=HOSTILE),
        {"source": source, "sequence": 2, "age_s": 1.0, "reason": HOSTILE, "name": HOSTILE},
    )
    node.says((source, "waiting"), reason=HOSTILE)
    page = open_page(f"{watched_url}/ui/live", width=width, scheme=scheme)
    page.get_by_label("Find").fill(node.node_id)
    expect(tile(page, node, source)).to_contain_text("onerror=window.hit=1")
    assert faults(page) == []
    page.goto(history(watched_url, node, source))
    expect(row(page, 1)).to_contain_text("onerror=window.hit=1")
    expect(row(page, 2)).to_contain_text("onerror=window.hit=1")
    assert faults(page) == []
    assert page.evaluate("window.hit") is None


def test_a_source_that_nobody_knows_is_said_to_be_unknown(watched_url: str, open_page: OpenPage) -> None:
    page = open_page(f"{watched_url}/ui/live/nowhere/nothing", allowed=r"status of 404")
    expect(page.get_by_test_id("no-source")).to_be_visible()
