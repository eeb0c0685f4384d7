"""The pages of training runs: the list, and one run from its first report to its end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from scheduler.runs.state import SILENT_S
from tests.browser.conftest import Fleet, OpenPage
from tests.training_runs import report, start, worker


def begun(fleet: Fleet, **changes: Any) -> str:
    """The id of a run."""
    answer = httpx.post(f"{fleet.url}/v1/runs", json=start(**changes))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def reported(fleet: Fleet, run: str, **changes: Any) -> bool:
    answer = httpx.put(f"{fleet.url}/v1/runs/{run}/report", json=report(**changes))
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["stop"])


def row(page: Page, run: str) -> Any:
    return page.locator(f'[data-testid=run][data-run="{run}"]')


def state(page: Page) -> Any:
    return page.get_by_test_id("run-head").locator("[data-state]")


def test_runs_come_into_the_list_and_change_there(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/training")
    expect(page.locator("[data-testid=no-runs]:visible, [data-testid=run]").first).to_be_visible()
    run = begun(fleet, network="digits")
    expect(row(page, run)).to_have_attribute("data-state", "running")
    reported(fleet, run, done=250, accuracy=0.5)
    expect(row(page, run)).to_contain_text("50.0 %")
    expect(row(page, run).get_by_role("img")).to_have_attribute("aria-label", "250 of 1,000 steps are done (25.0 %)")
    reported(fleet, run, state="finished", done=1000)
    expect(row(page, run)).to_have_attribute("data-state", "finished")
    page.get_by_role("link", name="digits").first.click()
    expect(page).to_have_url(f"{fleet.url}/ui/training/{run}")


def test_older_runs_are_a_page_away(fleet: Fleet, open_page: OpenPage) -> None:
    runs = [begun(fleet) for _ in range(3)]
    for run in runs:
        reported(fleet, run, state="finished")
    page = open_page(f"{fleet.url}/ui")
    page.route("**/v1/runs?limit=100*", lambda route: route.continue_(url=route.request.url.replace("=100", "=2")))
    page.goto(f"{fleet.url}/ui/training")
    expect(row(page, runs[1])).to_have_count(1)
    expect(row(page, runs[0])).to_have_count(0)
    page.get_by_role("button", name="Show older").click()
    expect(row(page, runs[0])).to_have_count(1)
    new = begun(fleet)
    expect(row(page, new)).to_have_count(1)
    expect(row(page, runs[0])).to_have_count(1)
    reported(fleet, new, state="finished")


def test_a_run_is_seen_live_until_its_end(fleet: Fleet, open_page: OpenPage) -> None:
    run = begun(fleet)
    page = open_page(f"{fleet.url}/ui/training/{run}")
    expect(state(page)).to_have_text("running")
    expect(page.get_by_role("heading", name="mnist-100 with downpour")).to_be_visible()
    expect(page.get_by_test_id("join")).to_have_text(f"terrace train work --scheduler {fleet.url} --run {run}")
    for done in (100, 200, 300):
        reported(fleet, run, done=done, loss=1.25, accuracy=0.5, workers=[worker("pi", staleness=1.5), worker("desk")])
        expect(page.get_by_test_id("counts")).to_contain_text(f"{done} of 1,000 steps")
    # Before the host counts as silent, when the whole run is sent anew.
    expect(page.get_by_test_id("curves")).to_have_attribute("data-points", "3", timeout=800 * SILENT_S)
    expect(page.locator("[data-worker=pi]")).to_contain_text("1.5")
    expect(page.locator("[data-worker=pi]")).to_contain_text("4 MB")
    charts = page.get_by_test_id("curves").locator(".card")
    expect(charts).to_have_count(4)
    expect(charts.first).to_contain_text("Time")
    page.get_by_test_id("over-updates").check()
    expect(charts.first).to_contain_text("Updates")
    reported(fleet, run, state="finished", done=1000, workers=[], result={"accuracy": 0.97})
    expect(state(page)).to_have_text("finished")
    expect(page.get_by_test_id("result")).to_contain_text("0.97")
    for gone in ("join", "stop"):
        expect(page.get_by_test_id(gone)).to_be_hidden()
    page.reload()
    expect(state(page)).to_have_text("finished")
    expect(page.get_by_test_id("curves")).to_have_attribute("data-points", "4")


def test_a_run_shows_how_many_of_its_group_are_ready(fleet: Fleet, open_page: OpenPage) -> None:
    run = begun(fleet, wants={"workers": 4, "start_at": 3})
    reported(fleet, run, done=0, missing=2)
    page = open_page(f"{fleet.url}/ui/training/{run}")
    expect(page.get_by_test_id("counts")).to_have_text("Waits for workers: 1 of 3 ready")
    reported(fleet, run, done=10)
    expect(page.get_by_test_id("counts")).to_contain_text("10 of 1,000 steps")
    reported(fleet, run, state="finished", done=1000)


def test_a_run_is_stopped_after_a_question(fleet: Fleet, open_page: OpenPage) -> None:
    run = begun(fleet)
    page = open_page(f"{fleet.url}/ui/training/{run}")
    page.get_by_test_id("stop").click()
    page.get_by_role("button", name="Let it run").click()
    assert reported(fleet, run) is False
    page.get_by_test_id("stop").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Stop the run").click()
    expect(state(page)).to_have_text("stopping")
    assert reported(fleet, run) is True
    reported(fleet, run, state="finished", done=20)
    expect(state(page)).to_have_text("stopped")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"share_data": True}, " --fetch own"),
        ({"share_data": False}, ""),
        ({"share_data": "<b>"}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_who_joins_fetches_its_images_where_the_run_gives_them_away(
    fleet: Fleet, open_page: OpenPage, config: dict[str, Any], expected: str
) -> None:
    run = begun(fleet, config=config)
    page = open_page(f"{fleet.url}/ui/training/{run}")
    expect(page.get_by_test_id("join")).to_have_text(
        f"terrace train work --scheduler {fleet.url} --run {run}{expected}"
    )
    reported(fleet, run, state="finished")


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    ("config", "judged"),
    [
        ({"strategy": {"trust": {"recheck": 0.1}}}, True),
        ({"strategy": {"trust": None}}, False),
        ({"strategy": 1}, False),
    ],
    ids=str,
)
def test_scores_are_shown_where_updates_are_judged(
    fleet: Fleet, open_page: OpenPage, config: dict[str, Any], judged: bool, width: int
) -> None:
    run = begun(fleet, config=config)
    reported(fleet, run, workers=[worker("pi", score=0.75)])
    page = open_page(f"{fleet.url}/ui/training/{run}")
    page.set_viewport_size({"width": width, "height": 900})
    pi = page.locator("[data-worker=pi]")
    expect(pi).to_contain_text("active")
    expect(pi.get_by_text("75.0 %")).to_be_visible(visible=judged)
    if width > 1000:
        expect(page.get_by_role("columnheader", name="Score")).to_have_count(int(judged))
    reported(fleet, run, state="finished")


def test_a_worker_is_paused_trusted_and_dropped(fleet: Fleet, open_page: OpenPage) -> None:
    run = begun(fleet, config={"strategy": {"trust": {"recheck": 0.1}}})
    standings = {"pi": "active", "bad": "quarantined"}

    def told() -> dict[str, str]:
        workers = [worker(name, standing=each, score=0.9 if name == "pi" else 0.1) for name, each in standings.items()]
        answer = httpx.put(f"{fleet.url}/v1/runs/{run}/report", json=report(workers=workers))
        return dict(answer.json()["workers"])

    told()
    page = open_page(f"{fleet.url}/ui/training/{run}")
    pi, bad = (page.locator(f"[data-worker={name}]") for name in standings)
    expect(bad).to_contain_text("quarantined")
    expect(bad).to_contain_text("10.0 %")
    pi.get_by_role("button", name="Pause").click()
    expect(pi.get_by_role("button", name="Drop")).to_be_disabled()
    bad.get_by_role("button", name="Trust").click()
    expect(bad.get_by_role("button", name="Trust")).to_be_disabled()
    assert told() == {"pi": "pause", "bad": "trust"}
    standings |= {"pi": "paused", "bad": "trusted"}
    assert told() == {}
    expect(pi).to_have_attribute("data-standing", "paused")
    expect(bad.get_by_role("button", name="Trust")).to_have_count(0)
    pi.get_by_role("button", name="Resume").click()
    expect(pi.get_by_role("button", name="Drop")).to_be_disabled()
    assert told() == {"pi": "resume"}
    bad.get_by_role("button", name="Drop").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Keep it").click()
    assert told() == {"pi": "resume"}
    bad.get_by_role("button", name="Drop").click()
    page.get_by_test_id("confirm").get_by_role("button", name="Drop it").click()
    expect(bad.get_by_role("button", name="Drop")).to_be_disabled()
    assert told() == {"pi": "resume", "bad": "drop"}


def test_what_hosts_and_workers_are_called_is_text(fleet: Fleet, open_page: OpenPage) -> None:
    bad = "<img src=x onerror=window.hit=1>"
    run = begun(fleet, network=bad, strategy=bad, config={bad: bad})
    reported(fleet, run, state="failed", error=bad, workers=[worker(bad)], result={bad: bad})
    for path in ("", f"/{run}"):
        page = open_page(f"{fleet.url}/ui/training{path}")
        expect(page.get_by_text(bad).first).to_be_visible()
        assert page.evaluate("window.hit") is None


def copies(segment: int | None = None, source: str | None = None, **changes: Any) -> dict[str, Any]:
    told = {
        "holds": "0-1, 3",
        "has": 3,
        "wants": 5,
        "serves": True,
        "segment": segment,
        "source": source,
        "share": 0.25,
    }
    return {**told, **changes}


def test_the_tree_of_the_training_images_is_seen_as_it_spreads(fleet: Fleet, open_page: OpenPage) -> None:
    run, bad = begun(fleet), "<img src=x onerror=window.hit=1>"
    page = open_page(f"{fleet.url}/ui/training/{run}")
    reported(fleet, run, workers=[worker("no copies")])
    expect(page.locator("[data-worker='no copies']")).to_be_visible()
    expect(page.get_by_test_id("data")).to_be_hidden()
    workers = [
        worker("leaf", copies=copies(4, bad, share=0.5, serves=False)),
        worker(bad, copies=copies(4, "")),
        worker("done", copies=copies(holds="0-4", has=5)),
        worker("swaps", copies=copies(holds="0-2", has=3, wants=2)),
        worker("new", copies=copies(holds="", has=0, wants=2)),
    ]
    reported(fleet, run, workers=workers)
    machines = page.get_by_test_id("copies")
    expect(machines).to_have_count(6)
    nothing = "\N{EN DASH}"
    told = [[cell.strip() for cell in row.locator("td").all_inner_texts()] for row in machines.all()]
    assert told == [
        ["the host", "all", "all", nothing, bad],
        [bad, "3 (0-1, 3)", "5", "segment 4 from the host, 25.0 %", "leaf"],
        ["leaf", "3 (0-1, 3)", "5", f"segment 4 from {bad}, 50.0 %", "none: not reached, or not trusted"],
        ["done", "5 (0-4)", "5", nothing, nothing],
        ["swaps", "3 (0-2)", "2", nothing, nothing],
        ["new", "none", "2", nothing, nothing],
    ]
    # Each stands further to the right than the one that feeds it.
    edges = [
        row.locator("td").first.evaluate("cell => parseFloat(getComputedStyle(cell).paddingLeft)")
        for row in machines.all()
    ]
    assert edges[0] < edges[1] < edges[2]
    assert edges[3] == edges[0]
    assert page.evaluate("window.hit") is None
    # Two that feed each other, as no honest host tells, stand once each.
    reported(fleet, run, workers=[worker("a", copies=copies(1, "b")), worker("b", copies=copies(1, "a"))])
    expect(machines).to_have_count(3)
    reported(fleet, run, state="finished", workers=workers)
    expect(page.get_by_test_id("data")).to_be_hidden()


def test_a_run_that_is_not_there(fleet: Fleet, open_page: OpenPage) -> None:
    page = open_page(f"{fleet.url}/ui/training/{'0' * 32}", allowed="404")
    expect(page.get_by_test_id("no-run")).to_be_visible()


def test_who_has_left_a_run_stays_with_what_it_did(fleet: Fleet, open_page: OpenPage) -> None:
    run = begun(fleet)
    page = open_page(f"{fleet.url}/ui/training/{run}")
    workers = [worker("pi", updates=440, left=True), worker("desk", updates=220, left=True, standing="quarantined")]
    reported(fleet, run, workers=[worker("there"), *workers])
    row = page.get_by_test_id("worker")
    expect(row).to_have_count(3)
    expect(page.locator(".figure", has_text="workers").first).to_contain_text("1")
    reported(fleet, run, state="finished", done=1000, workers=workers)
    expect(state(page)).to_have_text("finished")
    for name, said in (("pi", "left"), ("desk", "quarantined")):
        expect(page.locator(f"[data-worker={name}]").locator(".health")).to_have_text(said)
    expect(page.locator("[data-worker=pi]")).to_contain_text("440")
    page.reload()
    expect(row).to_have_count(2)


@pytest.mark.parametrize(
    ("fragment", "shown"),
    [
        ("#token=terrace_0123456789-~abc", "TERRACE_TOKEN='terrace_0123456789-~abc' terrace train work --scheduler {}"),
        (
            "#token=terrace_0123456789&fetch=own",
            "TERRACE_TOKEN='terrace_0123456789' terrace train work --scheduler {} --fetch own",
        ),
        ("#token=terrace_0123456789&fetch=own;x", "terrace train work --scheduler URL"),
        ("#token=terrace_0123456789';rm%20-rf%20x;'", "terrace train work --scheduler URL"),
        ("", "terrace train work --scheduler URL"),
    ],
)
def test_the_page_of_an_invitation_shows_the_command_and_nothing_that_a_shell_could_mistake(
    fleet: Fleet, open_page: OpenPage, fragment: str, shown: str
) -> None:
    page = open_page(f"{fleet.url}/ui/join{fragment}")
    expect(page.get_by_test_id("command")).to_have_text(shown.format(fleet.url))
