"""The page of releases: what answers, a trial with its guards, and what an operator may do.

The answers of the scheduler are made here, but for the last test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from benchmarks.releases.experiment import other_set
from models.data import read_sample
from scheduler.core.guards import ReleaseFigures, Trial, judge
from tests.browser.conftest import Fleet, OpenPage, faults
from tests.browser.watching import HOSTILE, PLAYS_EVENTS, streams
from tierkit.client import Client
from tierkit.types import Tier
from tierkit.wire.releases import (
    DEFAULT_GUARDS,
    GuardNow,
    ReleaseList,
    ReleaseNetwork,
    ReleaseNow,
    ReleaseState,
    Rollout,
    RolloutState,
    TroubleNow,
)

NOW = datetime(2026, 11, 27, 8, 0, tzinfo=UTC)
TIMES = "\N{MULTIPLICATION SIGN}"
LONG = "a-release-with-a-name-that-is-as-long-as-the-name-of-any-may-be@123456789"


def network(tier: Tier, name: str, digit: str, **changes: Any) -> ReleaseNetwork:
    target = "coarse" if tier is Tier.END else "fine"
    made = ReleaseNetwork(
        name=name, tier=tier, sha256=digit * 64, target=target, size_bytes=3_400_000, accuracy=0.71, nodes=2
    )
    return made.model_copy(update=changes)


def release(ref: str, state: ReleaseState, end: str = "a", **changes: Any) -> ReleaseNow:
    name, _, number = ref.partition("@")
    made = ReleaseNow(
        release=ref,
        name=name,
        number=int(number),
        state=state,
        digest="d" * 64,
        created_at=NOW,
        created_by="alice",
        classes=100,
        networks=(
            network(Tier.CLOUD, "wide", "c"),
            network(Tier.END, "small", end),
            network(Tier.EDGE, "deep", "e"),
        ),
        probes=3,
        nodes=4,
    )
    return made.model_copy(update=changes)


def figures(share: float, failed: int, ms: float) -> ReleaseFigures:
    made = ReleaseFigures()
    for number in range(400):
        made.agrees(round(10 * share), 10)
        made.attempted(number >= failed)
        made.took("coarse", ms)
    return made


def guards(share: float = 0.9, failed: int = 0, ms: float = 1.0) -> tuple[GuardNow, ...]:
    trial = Trial()
    trial.new, trial.old_here = figures(share, failed, ms), figures(0.9, 0, 1.0)
    return tuple(judge(name, limit, trial) for name, limit in DEFAULT_GUARDS.items())


def rollout(ref: str, **changes: Any) -> Rollout:
    made = Rollout(
        release=ref,
        previous="flowers@7",
        kind="canary",
        state=RolloutState.CANARY,
        share=0.1,
        canary=0.1,
        guards=guards(),
        for_s=7200,
        elapsed_s=1800,
        devices=("end-1", "end-4"),
        device_count=2,
        wanted=5,
        ready=4,
        started_at=NOW,
        started_by="alice",
        reason="All guards have samples.",
    )
    return made.model_copy(update=changes)


def steady(**changes: Any) -> ReleaseList:
    """A release that answers, one before it, and one that waits."""
    made = ReleaseList(
        in_force="flowers@7",
        previous="cifar@3",
        releases=(
            release("flowers@8", ReleaseState.READY, "b", nodes=0),
            release("flowers@7", ReleaseState.IN_FORCE, jobs=12),
            release("cifar@3", ReleaseState.RETIRED, "9", classes=10, created_by="", origin="/srv/models"),
        ),
    )
    return made.model_copy(update=changes)


def trial(**changes: Any) -> ReleaseList:
    """The same while one of them is tried."""
    before = steady()
    tried = release("flowers@8", ReleaseState.CANARY, "b")
    return before.model_copy(
        update={"rollout": rollout("flowers@8", **changes), "releases": (tried, *before.releases[1:])}
    )


class PlayedReleases:
    """The page with a scheduler that is played: `tell` changes what it answers."""

    def __init__(self, page: Page, now: ReleaseList, role: str | None) -> None:
        self.page, self.now = page, now
        self.asked: list[tuple[str, Any]] = []
        """Changes that the page asked for: path and content."""
        self.refusal: str | None = None
        page.add_init_script(PLAYS_EVENTS)
        page.route("**/v1/releases", lambda route: route.fulfill(json=json.loads(self.now.model_dump_json())))
        page.route("**/v1/releases/**", self._change)
        if role is not None:
            who: dict[str, Any] = {"name": "bob", "role": role, "expires": None, "sites": []}
            page.route("**/v1/whoami", lambda route: route.fulfill(json=who))

    def _change(self, route: Route) -> None:
        self.asked.append((route.request.url.partition("/v1/releases/")[2], route.request.post_data_json))
        if self.refusal:
            route.fulfill(status=409, json={"error": self.refusal})
        else:
            route.fulfill(json={})

    def tell(self, now: ReleaseList) -> None:
        self.now = now
        streams(self.page, "/v1/fleet/events")
        self.page.evaluate("tell('/v1/fleet/events', 'snapshot', {})")


Plays = Callable[..., PlayedReleases]


@pytest.fixture
def plays(watched_url: str, open_page: OpenPage) -> Plays:
    """Opens the page of releases."""

    def opened(now: ReleaseList, *, role: str | None = None, fragment: str = "", **options: Any) -> PlayedReleases:
        made: list[PlayedReleases] = []
        open_page(
            f"{watched_url}/ui/releases{fragment}",
            before=lambda page: made.append(PlayedReleases(page, now, role)),
            **options,
        )
        return made[0]

    return opened


def row(page: Page, ref: str) -> Any:
    return page.locator(f'[data-testid=release][data-release="{ref}"]')


def test_the_release_that_answers_and_all_others(plays: Plays) -> None:
    page = plays(steady()).page
    expect(row(page, "flowers@7")).to_contain_text("in force")
    expect(page.locator(".figure", has_text="answers now")).to_contain_text("flowers@7")
    expect(page.locator(".figure", has_text="unfinished jobs")).to_contain_text("12")
    expect(page.get_by_test_id("rollout")).to_be_hidden()
    expect(page.get_by_test_id("release")).to_have_count(3)
    expect(row(page, "flowers@8")).to_contain_text(
        "end small bbbbbbbbbbbb, edge deep eeeeeeeeeeee, cloud wide cccccccccccc"
    )
    expect(row(page, "cifar@3")).to_contain_text("/srv/models")
    networks = page.get_by_test_id("network")
    expect(networks).to_have_count(3)
    expect(networks.first).to_contain_text("aaaaaaaaaaaa")
    assert networks.first.locator("[title]").last.get_attribute("title") == "a" * 64


def test_two_releases_are_compared(plays: Plays) -> None:
    page = plays(steady()).page
    row(page, "flowers@8").get_by_role("link").click()
    expect(page.get_by_label("Of", exact=True)).to_have_value("flowers@8")
    page.get_by_label("compared with").select_option("flowers@7")
    small = page.locator("[data-network=small]")
    expect(small).to_contain_text("changed, was aaaaaaaaaaaa")
    expect(page.locator("[data-network=wide]")).to_contain_text("the same")
    page.get_by_label("compared with").select_option("cifar@3")
    expect(page.get_by_test_id("about")).to_contain_text("cifar@3 has 10 classes")
    page.get_by_label("Of", exact=True).select_option("cifar@3")
    assert page.url.endswith("#release=cifar%403")
    page.go_back()
    expect(page.get_by_label("Of", exact=True)).to_have_value("flowers@8")


def test_networks_that_are_new_or_gone(plays: Plays) -> None:
    now = steady()
    other = release("flowers@8", ReleaseState.READY, networks=(network(Tier.END, "tiny", "5"),))
    page = plays(now.model_copy(update={"releases": (other, *now.releases[1:])}), fragment="#release=flowers@8").page
    page.get_by_label("compared with").select_option("flowers@7")
    expect(page.locator("[data-network=tiny]")).to_contain_text("new")
    for gone in ("small", "deep", "wide"):
        expect(page.locator(f"[data-network={gone}]")).to_contain_text("gone")


def test_a_trial_is_seen_with_its_guards(plays: Plays) -> None:
    played = plays(steady())
    page = played.page
    played.tell(trial())
    change = page.get_by_test_id("rollout")
    expect(change).to_contain_text("flowers@8 instead of flowers@7")
    counts = page.get_by_test_id("counts")
    expect(counts).to_contain_text("10.0 % of the end devices (2) use it")
    expect(counts).to_contain_text("4 of 5 nodes hold it")
    expect(counts).to_contain_text("1 h 30 min left")
    expect(change.get_by_text("end-1, end-4")).to_be_hidden()
    change.get_by_text("Its end devices").click()
    expect(change.get_by_text("end-1, end-4")).to_be_visible()
    agreement = page.locator("[data-guard=agreement]")
    expect(agreement).to_have_attribute("data-verdict", "holds")
    expect(agreement.get_by_role("img")).to_have_attribute(
        "aria-label", f"agreement: 1{TIMES} (0.976{TIMES} to 1.02{TIMES}); at least 0.97{TIMES}"
    )
    expect(agreement).to_contain_text("4,000 and 4,000")
    change.get_by_text("The figures in words").click()
    expect(page.get_by_test_id("in-words")).to_contain_text("p99: 99 % of 400 coarse answers of the new release")
    played.tell(trial(extended=True, elapsed_s=7205, guards=guards(0.1, 30, 9.0)))
    expect(counts).to_contain_text("2 h left, extended once")
    for name in DEFAULT_GUARDS:
        expect(page.locator(f"[data-guard={name}]")).to_have_attribute("data-verdict", "fails")
    played.tell(trial(guards=tuple(judge(name, limit, Trial()) for name, limit in DEFAULT_GUARDS.items())))
    expect(page.locator("[data-guard=p99]")).to_contain_text("nothing to compare yet")
    rolling = trial(state=RolloutState.ROLLING, share=0.4, device_count=8)
    played.tell(rolling)
    expect(change.locator(".health").first).to_have_text("rolling out")
    expect(counts).to_contain_text("40.0 % of the end devices (8) use it")
    ended = rollout(
        "flowers@8",
        state=RolloutState.ROLLED_BACK,
        ended_at=NOW + timedelta(minutes=31),
        reason="p99: beyond its limit.",
    )
    played.tell(steady(history=(ended,)))
    expect(change).to_be_hidden()
    past = page.get_by_test_id("past")
    for words in ("rolled back", "trial on 10.0 %", "31 min", "p99: beyond its limit."):
        expect(past).to_contain_text(words)


def test_a_trial_is_started_from_a_form(plays: Plays) -> None:
    played = plays(steady(), role="operator", allowed="409")
    page = played.page
    expect(row(page, "flowers@7").get_by_role("button")).to_have_text(["Roll back"])
    row(page, "flowers@8").get_by_role("button", name="Try flowers@8").click()
    form = page.get_by_test_id("trial-form")
    page.keyboard.press("Escape")
    expect(form).to_have_count(0)
    assert played.asked == []
    row(page, "flowers@8").get_by_role("button", name="Try flowers@8").click()
    form.get_by_label("End devices that try it").fill("0")
    form.get_by_role("button", name="Start the trial").click()
    expect(form).to_be_visible()
    form.get_by_label("End devices that try it").fill("25")
    form.get_by_label("Length of the trial").fill("0.5")
    form.get_by_label("Failed attempts").fill("1")
    with page.expect_response("**/v1/releases/*/start"):
        form.get_by_role("button", name="Start the trial").click()
    expect(form).to_have_count(0)
    guards_ = {"agreement": 0.97, "p99": 1.3, "errors": 0.01}
    assert played.asked == [("flowers%408/start", {"canary": 0.25, "guards": guards_, "for_s": 1800})]
    played.refusal = "another roll-out is under way: flowers@9"
    row(page, "flowers@8").get_by_role("button", name="Try flowers@8").click()
    form.get_by_role("button", name="Start the trial").click()
    expect(page.get_by_role("alert")).to_contain_text("another roll-out is under way: flowers@9")


@pytest.mark.parametrize(
    ("now", "place", "button", "asked"),
    [
        (steady(), "flowers@8", "Promote", "flowers%408/promote"),
        (steady(), "flowers@7", "Roll back", "flowers%407/rollback"),
        (trial(), None, "Promote", "flowers%408/promote"),
        (trial(), None, "Stop", "flowers%408/stop"),
        (trial(state=RolloutState.ROLLING), None, "Roll back", "flowers%408/rollback"),
    ],
)
def test_an_operator_is_asked_before_a_change(
    plays: Plays, now: ReleaseList, place: str | None, button: str, asked: str
) -> None:
    if now.rollout and now.rollout.state is RolloutState.ROLLING:
        rolling = now.releases[0].model_copy(update={"state": ReleaseState.ROLLING})
        now = now.model_copy(update={"releases": (rolling, *now.releases[1:])})
    played = plays(now, role="operator")
    page = played.page
    where = row(page, place) if place else page.get_by_test_id("change-orders")
    where.get_by_role("button", name=button).click()
    question = page.get_by_test_id("confirm")
    question.get_by_role("button", name="Cancel").click()
    assert played.asked == []
    where.get_by_role("button", name=button).click()
    with page.expect_response(f"**/v1/releases/{asked}"):
        question.get_by_role("button", name=button).click()
    assert played.asked == [(asked, None)]


def test_a_user_sees_no_buttons(plays: Plays) -> None:
    page = plays(trial(), role="user").page
    expect(page.get_by_test_id("release")).to_have_count(3)
    expect(page.locator("main button:visible:not(.quiet)")).to_have_count(0)


def full(text: str) -> ReleaseList:
    """All parts of the page, with one text wherever a text may be."""
    ref = LONG
    tried = release(
        ref,
        ReleaseState.CANARY,
        networks=(network(Tier.END, text, "1"), network(Tier.CLOUD, text, "2", gpu=True, accuracy=None)),
        created_by=text,
        encoders=(text, text),
        troubles=(TroubleNow(node_id=text, kind="room", detail=text),),
    )
    bad = tuple(each.model_copy(update={"detail": text}) for each in guards(0.1, 30, 9.0))
    change = rollout(
        ref, previous=text, guards=bad, devices=(text,) * 100, device_count=300, reason=text, started_by=text
    )
    past = rollout(ref, previous=text, state=RolloutState.STOPPED, ended_at=NOW, reason=text, started_by=text)
    now = steady()
    return now.model_copy(update={"rollout": change, "releases": (tried, *now.releases), "history": (past,)})


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (1440, "light"), (1440, "dark")])
def test_no_serious_fault(plays: Plays, width: int, scheme: str) -> None:
    page = plays(full("x" * 200), fragment=f"#release={LONG}", width=width, scheme=scheme).page
    expect(page.get_by_test_id("trouble")).to_have_count(1)
    page.get_by_label("compared with").select_option("flowers@7")
    page.get_by_text("Its end devices").click()
    page.get_by_text("The figures in words").click()
    wrong = {"all": faults(page)}
    page.get_by_role("button", name="Stop").first.click()
    wrong["a question"] = faults(page)
    page.keyboard.press("Escape")
    played = plays(steady(), width=width, scheme=scheme)
    played.page.get_by_role("button", name="Try flowers@8").click()
    wrong["the form"] = faults(played.page)
    assert {name: found for name, found in wrong.items() if found} == {}


def test_texts_stay_texts(plays: Plays) -> None:
    page = plays(full(HOSTILE), fragment=f"#release={LONG}").page
    expect(page.get_by_test_id("trouble")).to_contain_text("<img src=x onerror=window.hit=1> \ufffdgnp.\ufffdevil")
    expect(page.get_by_test_id("reason")).to_contain_text("<img src=x")
    read = page.evaluate(
        "[...document.querySelectorAll('main, main *')].flatMap((each) => [each.title, each.ariaLabel, each.innerText])"
    )
    assert not any("\u202e" in each for each in read if each)
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.hit") is None


def test_everything_is_reached_by_keyboard(plays: Plays) -> None:
    played = plays(steady())
    page = played.page
    row(page, "flowers@8").get_by_role("button", name="Try flowers@8").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("End devices that try it")).to_be_focused()
    with page.expect_response("**/v1/releases/*/start"):
        page.keyboard.press("Enter")
    expect(page.get_by_test_id("trial-form")).to_have_count(0)
    expect(row(page, "flowers@8").get_by_role("button", name="Try flowers@8")).to_be_focused()
    assert [path for path, _ in played.asked] == ["flowers%408/start"]


def test_a_real_release_is_tried_stopped_promoted_and_rolled_back(
    fleet: Fleet, open_page: OpenPage, tmp_path: Path
) -> None:
    with Client(fleet.url) as client:
        before = client.releases().in_force
        new = client.create_release("other", other_set(tmp_path / "set", 1)).release
        page = open_page(f"{fleet.url}/ui/releases")
        change = page.get_by_test_id("rollout")
        row(page, new).get_by_role("button", name=f"Try {new}").click()
        page.get_by_label("End devices that try it").fill("40")
        page.get_by_role("button", name="Start the trial").click()
        expect(change).to_contain_text(f"{new} instead of {before}")
        expect(change.locator("[data-guard]")).to_have_count(3)
        expect(change).to_contain_text("3 of 3 nodes hold it")
        page.get_by_test_id("change-orders").get_by_role("button", name=f"Stop {new}").click()
        page.get_by_test_id("confirm").get_by_role("button", name="Stop").click()
        expect(page.get_by_test_id("past").first).to_contain_text("stopped")
        row(page, new).get_by_role("button", name=f"Promote {new}").click()
        page.get_by_test_id("confirm").get_by_role("button", name="Promote").click()
        expect(page.locator(".figure", has_text="answers now")).to_contain_text(new)
        expect(row(page, new)).to_contain_text("in force")
        job = client.wait(client.submit(read_sample().images[:10], scheme="end-edge"))
        page.goto(f"{fleet.url}/ui/jobs/{job.id}")
        page.get_by_role("link", name=new).click()
        expect(page.get_by_label("Of", exact=True)).to_have_value(new)
        row(page, new).get_by_role("button", name=f"Roll back {new}").click()
        page.get_by_test_id("confirm").get_by_role("button", name="Roll back").click()
        expect(page.locator(".figure", has_text="answers now")).to_contain_text(before)
        expect(row(page, new)).to_contain_text("rolled back")
