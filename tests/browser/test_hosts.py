"""The page of hosts: a person starts a run within the limits, gets the command of a worker, and sees the result."""

from __future__ import annotations

import contextlib
import queue
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import BUDGET_MS, Fleet, OpenPage, faults
from tests.browser.hub import BOB, Hub
from tests.training_runs import report, start, worker
from tierkit.access import invitation_of

HOST = "desk"


def limits(lowest: float, highest: float, default: float) -> dict[str, float]:
    return {"lowest": lowest, "highest": highest, "default": default}


def network(name: str, epochs: int) -> dict[str, Any]:
    rate, batch = limits(0.01, 1.0, 0.1), limits(16, 256, 64)
    return {"name": name, "rate": rate, "epochs": limits(1, epochs, 2), "batch": batch}


class PlayedHost:
    """A host that offers two networks every half second, by a plain HTTP client, until it is closed."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url, self.id, self.name = url, secrets.token_hex(16), HOST
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.latest: dict[str, Any] | None = None
        self.wanted: queue.Queue[dict[str, Any]] = queue.Queue()
        """The starts that it was told of."""
        self.run: str | None = None
        self.said: dict[str, Any] = {}
        """The report of its run."""
        self._end = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="played host")

    def start(self) -> None:
        self._beats.start()

    def close(self) -> None:
        self._end.set()
        self._beats.join()

    def _beat(self) -> None:
        networks = [network("mnist-100", 5), network("mnist-64-64", 9)]
        with httpx.Client(base_url=self.url, headers=self.headers, timeout=30) as http:
            while not self._end.wait(0.5):
                said = {"host": self.name, "networks": networks, "strategies": ["fedavg", "sgd"], "workers": 3}
                answer = http.put(f"/v1/offers/{self.id}", json={**said, "latest": self.latest})
                if (wanted := answer.raise_for_status().json()["start"]) is not None:
                    self.wanted.put(wanted)
                if self.run is not None:
                    http.put(f"/v1/runs/{self.run}/report", json=report(**self.said)).raise_for_status()

    def begins(self, wanted: dict[str, Any]) -> str:
        """The id of the run."""
        wants = {"workers": 3, "start_at": wanted["start_at"]}
        told = start(network=wanted["network"], strategy=wanted["strategy"], wants=wants, config={"share_data": True})
        httpx.post(f"{self.url}/v1/runs", json=told, headers=self.headers).raise_for_status()
        self.run = str(told["id"])
        return self.run


@pytest.fixture
def host(fleet: Fleet) -> Iterator[PlayedHost]:
    host = PlayedHost(fleet.url)
    yield host
    host.close()


def slide(page: Page, name: str, key: str) -> None:
    page.get_by_test_id(name).focus()
    page.keyboard.press(key)


def test_a_person_starts_a_run_gets_the_command_of_a_worker_and_sees_the_result(
    fleet: Fleet, host: PlayedHost, open_page: OpenPage, tmp_path: Path
) -> None:
    host.start()
    page = open_page(f"{fleet.url}/ui/hosts")
    card = page.locator(f"[data-offer='{host.id}']")
    expect(card.get_by_role("heading", name=HOST)).to_be_visible()
    card.get_by_label("Network").select_option("mnist-64-64")
    card.get_by_label("Strategy").select_option("sgd")
    assert card.get_by_test_id("epochs").get_attribute("max") == "9"
    for name, key in (("rate", "End"), ("epochs", "Home"), ("batch", "End")):
        slide(page, name, key)
    card.get_by_test_id("start-at").fill("2")
    card.get_by_test_id("host").click()
    said = card.get_by_test_id("said")
    wanted = host.wanted.get(timeout=BUDGET_MS / 1000)
    chosen = {name: wanted[name] for name in ("network", "strategy", "rate", "epochs", "batch", "start_at")}
    assert chosen == {
        "network": "mnist-64-64",
        "strategy": "sgd",
        "rate": 1.0,
        "epochs": 1,
        "batch": 256,
        "start_at": 2,
    }

    latest = {"start": wanted["id"], "run": None, "over": False, "error": None}
    host.latest = latest
    expect(said).to_contain_text("reads its images")
    host.said = {"done": 0, "missing": 1, "workers": [worker("pi", updates=0)]}
    run = host.begins(wanted)
    host.latest = latest = {**latest, "run": run}
    expect(said).to_contain_text("Waits for workers: 1 of 2 ready")
    card.get_by_test_id("work").click()
    command = f"terrace train work --scheduler {fleet.url} --run {run} --fetch own"
    expect(card.get_by_test_id("join")).to_have_text(command)
    host.said = {"done": 400, "accuracy": 0.5, "loss": 0.75}
    expect(said).to_contain_text("400 of 1,000 steps")
    page.screenshot(path=tmp_path / "hosts.png", full_page=True)
    assert faults(page) == []
    page.set_viewport_size({"width": 360, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=tmp_path / "hosts-narrow.png", full_page=True)
    assert faults(page) == []
    host.said = {"done": 1000, "state": "finished", "accuracy": 0.93, "result": {"accuracy": 0.93}}
    host.latest = {**latest, "over": True}
    expect(said).to_contain_text("finished, with an accuracy of 93.0 %")
    expect(card.get_by_test_id("join")).to_be_hidden()
    card.get_by_test_id("run-link").click()
    expect(page).to_have_url(f"{fleet.url}/ui/training/{run}")


def test_where_tokens_are_asked_for_the_command_of_a_worker_has_an_invitation(hub: Hub, open_page: OpenPage) -> None:
    with contextlib.closing(PlayedHost(hub.url, BOB)) as host:
        run = host.begins({"network": "mnist-100", "strategy": "sgd", "start_at": None})
        host.latest = {"start": "0" * 32, "run": run, "over": False}
        host.start()
        page = open_page(f"{hub.url}/ui/hosts", allowed="status of 401")
        page.get_by_label("Token").fill(BOB)
        page.get_by_role("button", name="Sign in").click()
        card = page.locator(f"[data-offer='{host.id}']")
        expect(card.get_by_role("heading", name="desk, of bob")).to_be_visible()
        card.get_by_test_id("work").click()
        command = re.compile(
            rf"^TERRACE_TOKEN='(\S+)' terrace train work --scheduler {re.escape(hub.url)} --fetch own$"
        )
        expect(card.get_by_test_id("join")).to_have_text(command)
        expect(card.get_by_text("For one machine", exact=False)).to_contain_text("until")
        found = command.fullmatch(card.get_by_test_id("join").inner_text())
        assert found is not None
        name = f"{invitation_of(str(found[1]))}-pi"
        headers = {"Authorization": f"Bearer {found[1]}"}
        answer = httpx.post(f"{hub.url}/v1/matches", json={"name": name}, headers=headers)
        assert (answer.status_code, answer.json()["run"]) == (200, run)
        answer = httpx.post(f"{hub.url}/v1/offers/{host.id}/runs", json={}, headers=headers)
        assert answer.status_code == 403


def test_what_a_host_refuses_is_said_and_a_host_that_is_gone_is_not_shown(
    fleet: Fleet, host: PlayedHost, open_page: OpenPage
) -> None:
    bad = "<img src=x onerror=window.hit=1>"
    host.name, host.latest = bad, {"start": "0" * 32, "over": True, "error": bad}
    host.start()
    page = open_page(f"{fleet.url}/ui/hosts")
    card = page.locator(f"[data-offer='{host.id}']")
    expect(card.get_by_test_id("said")).to_contain_text(bad)
    assert page.evaluate("window.hit") is None
    host.close()
    expect(card).to_have_count(0)
    expect(page.get_by_test_id("no-hosts")).to_be_visible()
