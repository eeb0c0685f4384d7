"""The page of sinks: what each receiver has, its dead letters, and what admins may do.

The answers of the scheduler are made here, but for the last test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Fleet, OpenPage, faults
from tests.browser.watching import HOSTILE, PLAYS_EVENTS, streams
from tierkit.wire.sinks import DeadLetterNow, DeadLetterPage, SentEvent, SinkFilter, SinkList, SinkNow

NOW = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)


def sink(name: str, **changes: Any) -> SinkNow:
    made = SinkNow(
        name=name,
        kind="webhook",
        options={"url": f"https://{name}.example/in"},
        created_at=NOW,
        state="ok",
        delivered=1200,
    )
    return made.model_copy(update=changes)


def letter(number: int, **changes: Any) -> DeadLetterNow:
    event = SentEvent(id=f"evt_{number}", type="observation.added", timestamp=NOW, data={"label": "fish"})
    made = DeadLetterNow(number=number, reason="the receiver answered 422", attempts=1, at=NOW, event=event)
    return made.model_copy(update=changes)


HALL = sink("hall")
HOUSE = sink(
    "house",
    kind="mqtt",
    options={"host": "broker.example", "port": 8883},
    filter=SinkFilter(events=("observation.*",), sources=("gate",), labels=("dog", "cat"), confidence=0.8),
    state="failing",
    reason="the MQTT broker at broker.example:8883: Connection refused",
    waiting=17,
    lag_s=90,
    dead=2,
    dropped=3,
)
NIGHT = sink("night", state="paused", reason="paused by alice")
LETTERS = [letter(4), letter(9, replaying=True)]


class PlayedSinks:
    """The page with a scheduler that is played: `tell` changes what it answers."""

    def __init__(self, page: Page, now: list[SinkNow], letters: list[DeadLetterNow], role: str | None) -> None:
        self.page, self.now, self.letters = page, now, letters
        self.asked: list[tuple[str, str, Any]] = []
        """Changes that the page asked for: method, path and content."""
        self.refusal: str | None = None
        page.add_init_script(PLAYS_EVENTS)
        page.route("**/v1/sinks", lambda route: self._answer(route, SinkList(sinks=tuple(self.now))))
        page.route("**/v1/sinks/**", self._of_one)
        if role is not None:
            who: dict[str, Any] = {"name": "bob", "role": role, "expires": None, "sites": []}
            page.route("**/v1/whoami", lambda route: route.fulfill(json=who))

    @staticmethod
    def _answer(route: Route, value: SinkList | DeadLetterPage) -> None:
        route.fulfill(json=json.loads(value.model_dump_json()))

    def _of_one(self, route: Route) -> None:
        request, path = route.request, route.request.url.partition("/v1/sinks/")[2]
        if request.method == "GET":
            after = int(path.partition("after=")[2])
            found = [each for each in self.letters if each.number > after] if path.startswith("house/") else []
            page = DeadLetterPage(letters=tuple(found[:2]), next=found[1].number if len(found) > 2 else None)
            self._answer(route, page)
            return
        self.asked.append((request.method, path, request.post_data_json))
        if self.refusal:
            route.fulfill(status=502, json={"error": self.refusal})
        else:
            route.fulfill(json={"seconds": 0.012, "count": 2})

    def tell(self, *now: SinkNow) -> None:
        self.now = list(now)
        streams(self.page, "/v1/fleet/events")
        self.page.evaluate("tell('/v1/fleet/events', 'snapshot', {})")


Plays = Callable[..., PlayedSinks]


@pytest.fixture
def plays(watched_url: str, open_page: OpenPage) -> Plays:
    """Opens the page of sinks."""

    def opened(*now: SinkNow, role: str | None = None, letters: Any = LETTERS, **options: Any) -> PlayedSinks:
        made: list[PlayedSinks] = []
        open_page(
            f"{watched_url}/ui/sinks{options.pop('fragment', '')}",
            before=lambda page: made.append(PlayedSinks(page, list(now), letters, role)),
            **options,
        )
        return made[0]

    return opened


def row(page: Page, name: str) -> Any:
    return page.locator(f'[data-testid=sink][data-sink="{name}"]')


def test_each_sink_with_its_state_and_its_figures(plays: Plays) -> None:
    played = plays(HALL, HOUSE, NIGHT)
    page = played.page
    expect(page.get_by_test_id("sink")).to_have_count(3)
    expect(row(page, "hall")).to_contain_text("https://hall.example/in")
    expect(row(page, "hall")).to_contain_text("all events")
    for words in (
        "failing",
        "broker.example:8883",
        "observation.* · sources gate · labels dog, cat · confidence ≥ 0.8",
        "17",
        "2 min",
        "1,200",
        "Connection refused",
    ):
        expect(row(page, "house")).to_contain_text(words)
    expect(row(page, "night")).to_contain_text("paused by alice")
    expect(page.locator(".figure", has_text="failing or paused")).to_contain_text("2")
    expect(page.locator(".figure", has_text="events wait")).to_contain_text("17")
    played.tell(HALL.model_copy(update={"state": "failing", "reason": "no answer in time"}), HOUSE, NIGHT)
    expect(row(page, "hall")).to_contain_text("no answer in time")
    expect(page.locator(".figure", has_text="failing or paused")).to_contain_text("3")


def test_without_sinks_the_page_names_the_command(plays: Plays) -> None:
    page = plays().page
    expect(page.get_by_test_id("no-sinks")).to_contain_text("terrace sinks add")
    expect(page.get_by_test_id("dead")).to_be_hidden()


def test_dead_letters_are_shown_and_delivered_again(plays: Plays) -> None:
    played = plays(HALL, HOUSE, letters=[*LETTERS, letter(12)])
    page = played.page
    letters = page.get_by_test_id("letter")
    expect(page.get_by_label("Of", exact=True)).to_have_value("house")  # the first one with dead letters
    expect(letters).to_have_count(2)
    expect(letters.first).to_contain_text("the receiver answered 422")
    expect(letters.first).to_contain_text('{"label":"fish"}')
    expect(page.get_by_role("button", name="Replay evt_9")).to_be_disabled()
    page.get_by_role("button", name="Show more").click()
    expect(letters).to_have_count(3)
    page.get_by_role("button", name="Replay evt_4").click()
    expect(page.get_by_test_id("said")).to_contain_text("delivered to house again")
    page.get_by_test_id("replay-all").click()
    expect(page.get_by_test_id("said")).to_contain_text("2 events are delivered to house again")
    assert played.asked == [
        ("POST", "house/replay", {"numbers": [4]}),
        ("POST", "house/replay", {"numbers": None}),
    ]
    page.get_by_label("Of", exact=True).select_option("hall")
    expect(letters).to_have_count(0)
    expect(page).to_have_url(f"{page.url.partition('#')[0]}#sink=hall")
    expect(page.get_by_test_id("replay-all")).to_be_hidden()
    row(page, "house").get_by_role("link").click()
    expect(letters).to_have_count(2)


@pytest.mark.parametrize(
    ("name", "button", "asks", "method", "path"),
    [
        ("hall", "Test", False, "POST", "hall/test"),
        ("hall", "Pause", True, "POST", "hall/pause"),
        ("night", "Resume", False, "DELETE", "night/pause"),
        ("hall", "Remove", True, "DELETE", "hall"),
    ],
)
def test_what_an_admin_does(plays: Plays, name: str, button: str, asks: bool, method: str, path: str) -> None:
    played = plays(HALL, HOUSE, NIGHT, role="admin")
    page = played.page
    row(page, name).get_by_role("button", name=f"{button} {name}").click()
    if asks:
        question = page.get_by_test_id("confirm")
        question.get_by_role("button", name="Cancel").click()
        assert played.asked == []
        row(page, name).get_by_role("button", name=f"{button} {name}").click()
        with page.expect_response(f"**/v1/sinks/{path}"):
            question.get_by_role("button", name=button).click()
    else:
        expect(row(page, name)).to_be_visible()
    if button == "Test":
        expect(page.get_by_test_id("said")).to_contain_text("hall took a test event in 12 ms")
    page.wait_for_load_state()
    assert [each[:2] for each in played.asked] == [(method, path)]


def test_a_test_that_fails_says_why(plays: Plays) -> None:
    played = plays(HALL, allowed="status of 502")
    played.refusal = "the receiver answered 500"
    page = played.page
    page.get_by_role("button", name="Test hall").click()
    expect(page.get_by_role("alert")).to_contain_text("the receiver answered 500")
    expect(page.get_by_test_id("said")).to_have_text("")


@pytest.mark.parametrize("role", ["user", "operator"])
def test_others_see_nothing(plays: Plays, role: str) -> None:
    page = plays(HALL, role=role).page
    expect(page.get_by_test_id("forbidden")).to_contain_text("Only admins")
    expect(page.get_by_test_id("sink")).to_have_count(0)


def full(words: str) -> tuple[list[SinkNow], list[DeadLetterNow]]:
    """All parts of the page, with one text wherever a text may be."""
    conditions = SinkFilter(events=(words,), sources=(words,), labels=(words, words), confidence=0.25)
    bad = sink(
        "house",
        kind=words[:63],
        options={"url": words},
        filter=conditions,
        state="failing",
        reason=words,
        waiting=10**6,
        dead=2,
    )
    event = SentEvent(id="evt_1", type=words, timestamp=NOW, data={words: words})
    return [bad, sink("s" * 63)], [letter(1, reason=words, event=event), letter(2, replaying=True)]


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1440, "light"), (1440, "dark")])
def test_no_serious_fault(plays: Plays, width: int, scheme: str, tmp_path: Path) -> None:
    sinks, letters = full("x" * 200)
    page = plays(*sinks, letters=letters, width=width, scheme=scheme).page
    expect(page.get_by_test_id("letter")).to_have_count(2)
    page.screenshot(path=tmp_path / "full.png", full_page=True)
    wrong = {"all": faults(page)}
    page.get_by_role("button", name="Pause house").click()
    wrong["a question"] = faults(page)
    page = plays(HALL, HOUSE, NIGHT, width=width, scheme=scheme).page
    expect(page.get_by_test_id("letter")).to_have_count(2)
    page.screenshot(path=tmp_path / "sinks.png", full_page=True)
    wrong["plain"] = faults(page)
    assert {name: found for name, found in wrong.items() if found} == {}


def test_texts_stay_texts(plays: Plays) -> None:
    sinks, letters = full(HOSTILE)
    page = plays(*sinks, letters=letters).page
    expect(page.get_by_test_id("letter").first).to_contain_text("<img src=x onerror=window.hit=1> \ufffdgnp.\ufffdevil")
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None


def test_nothing_moves_when_figures_change(plays: Plays) -> None:
    played = plays(HALL, HOUSE, NIGHT)
    page = played.page
    expect(page.get_by_test_id("letter")).to_have_count(2)
    before = page.get_by_test_id("dead").bounding_box()
    played.tell(HALL, HOUSE.model_copy(update={"waiting": 18, "delivered": 1201}), NIGHT)
    expect(row(page, "house")).to_contain_text("18")
    assert page.get_by_test_id("dead").bounding_box() == before
    page.get_by_role("button", name="Test hall").click()
    expect(page.get_by_test_id("said")).to_contain_text("12 ms")
    assert page.get_by_test_id("dead").bounding_box() == before


def test_a_real_sink_is_shown_tested_paused_and_removed(fleet: Fleet, open_page: OpenPage) -> None:
    options = {"url": "http://127.0.0.1:9/in"}
    httpx.post(f"{fleet.url}/v1/sinks", json={"name": "hall", "kind": "webhook", "options": options}).raise_for_status()
    page = open_page(f"{fleet.url}/ui/sinks", allowed="status of (403|502)")
    page.get_by_role("button", name="Test hall").click()
    expect(page.get_by_role("alert")).to_contain_text("private address")
    page.get_by_role("button", name="Pause hall").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Pause").click()
    expect(row(page, "hall")).to_contain_text("paused")
    page.get_by_role("button", name="Remove hall").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Remove").click()
    expect(page.get_by_test_id("no-sinks")).to_be_visible()
