"""The pictures of the dashboard in README and docs: `python -m tests.browser.screenshots docs/images`.

A fleet works through jobs, loses an end device, and is looked at in Debian's Chromium.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from scheduler.core.guards import ReleaseFigures, Trial, judge
from tests.browser.conftest import CHROMIUM, pid_of, started
from tests.browser.test_releases import PlayedReleases, rollout, trial
from tests.browser.test_sites import PlayedFleet, shop, site_now, snapshot
from tests.browser.test_try import pictures
from tests.browser.watching import PlayedNode, coarse_of, jpeg
from tests.training_runs import report, start, worker
from tierkit.client import Client
from tierkit.errors import Conflict
from tierkit.wire.releases import DEFAULT_GUARDS, RolloutState

_PICTURES = 12
_SCHEMES = ("adaptive", "adaptive", "end-cloud")
_WARM_S = 6
"""Seconds of work before the pictures are taken."""
_SETTLED_MS = 2500
_REPORTS = 60
_REPORT_MS = 150
_Scheme = Literal["light", "dark"]
_PAGES: tuple[tuple[str, str, int, _Scheme], ...] = (
    ("fleet-dark", "", 1280, "dark"),
    ("fleet-narrow", "", 400, "light"),
    ("timeline", "/timeline", 1280, "light"),
    ("jobs", "/jobs", 1280, "light"),
    ("job", "/jobs/{job}", 1280, "light"),
    ("privacy", "/privacy", 1280, "light"),
)
_LIVE: tuple[tuple[str, str, int, _Scheme], ...] = (
    ("live", "", 1280, "light"),
    ("live-narrow", "", 360, "dark"),
    ("source", "/south-pi/gate", 1280, "light"),
)
_SITES: tuple[tuple[str, int, int, _Scheme, str | None], ...] = (
    ("sites", 1280, 800, "light", None),
    ("sites-narrow", 390, 844, "dark", None),
    ("site", 1280, 960, "light", "shop-33"),
)
_SOURCES = ("door", "garage", "gate", "yard")
_SEEN = 12
_COLOURS = 200
_SURE = 0.7


def _opened(browser: Browser, url: str, width: int, scheme: _Scheme) -> Page:
    viewport = {"width": width, "height": 1000 if width > 500 else 900}
    page = browser.new_context(viewport=viewport, color_scheme=scheme, device_scale_factor=1).new_page()  # type: ignore[arg-type]
    page.goto(url)
    return page


def _take(page: Page, folder: Path, name: str) -> None:
    page.screenshot(path=folder / f"{name}.png")
    page.close()


def _trained(browser: Browser, url: str) -> Page:
    """The page of a training run that is under way."""
    config = {"strategy": {"trust": {"aggregate": "median"}}}
    wanted = start(network="mnist-64-64", strategy="dc-adaptive", steps=6000, config=config)
    httpx.post(f"{url}/v1/runs", json=wanted).raise_for_status()
    page = _opened(browser, f"{url}/ui/training/{wanted['id']}", 1280, "light")
    for number in range(_REPORTS):
        done = 60 * (number + 1)
        volunteers: dict[str, dict[str, Any]] = {
            "desk": {"staleness": 0.4, "score": 0.97, "standing": "active"},
            "laptop": {"staleness": 1.6, "score": 1.0, "standing": "trusted"},
            "pi-4": {"staleness": 2.9, "score": 0.88, "standing": "paused"},
            "stranger": {"staleness": 0.2, "score": 0.16, "standing": "quarantined"},
        }
        said = report(
            done=done,
            version=done,
            loss=0.25 + 2 * math.exp(-number / 12) + 0.06 * math.sin(5 * number) ** 3,
            accuracy=0.97 - 0.87 * math.exp(-number / 9) if number % 5 == 0 else None,
            workers=[
                worker(name, updates=done // 3, bytes_sent=20_000 * done, bytes_received=9_000 * done, **figures)
                for name, figures in volunteers.items()
            ],
        )
        httpx.put(f"{url}/v1/runs/{wanted['id']}/report", json=said).raise_for_status()
        page.wait_for_timeout(_REPORT_MS)
    return page


def _watched(url: str) -> list[PlayedNode]:
    """Nodes with sources, of which some are in trouble."""
    sample, names = read_sample(), bundled_hierarchy().fine
    assert sample.fine is not None
    labels = [names[label] for label in sample.fine]
    chance = random.Random(5)
    nodes = [PlayedNode(url, f"{place}-pi") for place in ("farm", "north", "south")]
    for node in nodes:
        for source in _SOURCES:
            picture = chance.randrange(len(labels))
            for number in range(1, _SEEN + 1):
                picture = chance.randrange(len(labels))
                coarse, sure = coarse_of(labels[picture]), chance.uniform(0.35, 0.99)
                answer = {} if sure > _SURE else {"finer": node.finer(labels[picture], chance.uniform(0.45, 0.97))}
                amended = {"revision": 1, "unsure": True} if answer else {}
                age_s = 4.0 * (_SEEN - number) + chance.uniform(1, 4)
                node.send(node.seen(number, coarse, sure, source=source, age_s=age_s, **answer, **amended))
                node.send_picture(number, jpeg(picture), source=source)
        running = dict.fromkeys(_SOURCES, "running")
        troubled = node.node_id == "north-pi"
        states = running | ({"door": "waiting", "yard": "paused"} if troubled else {})
        node.says(
            *states.items(),
            reason="it cannot be read: Connection refused" if troubled else "",
            waiting_answers=chance.choice([0, 2]),
            waiting_pictures=chance.choice([0, 1, 14]),
            spool_bytes=40_000_000,
            spool_size_bytes=500_000_000,
            spent_bytes=chance.randrange(80_000_000),
            bytes_per_day=None if node.node_id == "farm-pi" else 100_000_000,
        )
    return nodes


def _take_live(browser: Browser, url: str, folder: Path) -> None:
    nodes = _watched(url)
    for name, path, width, scheme in _LIVE:
        page = _opened(browser, f"{url}/ui/live{path}", width, scheme)
        page.wait_for_timeout(_SETTLED_MS)
        _take(page, folder, name)
        file = folder / f"{name}.png"
        Image.open(file).quantize(_COLOURS).save(file, optimize=True)  # photographs make large files
    for node in nodes:
        node.close()


def _take_sites(browser: Browser, url: str, folder: Path) -> None:
    """Forty shops, of which some are in trouble; then one of them."""
    well = {"end": 4, "edge": 1}
    trouble: dict[str, dict[str, Any]] = {
        "shop-7": {"health": "coarse", "reason": "shop-7-edge-1 is dead", "alive": {"end": 4}, "share": "none"},
        "shop-12": {"health": "degraded", "reason": "shop-12-end-3 is dead", "alive": {"end": 3, "edge": 1}},
        "shop-21": {"health": "drained", "reason": "an operator wants no new tasks for it", "alive": well},
        "shop-33": {"health": "degraded", "reason": "shop-33-edge-1 is dead", "alive": {"end": 4}, "share": "sites"},
    }
    chance = random.Random(4)
    names = [f"shop-{number}" for number in range(1, 41)]
    sites = [site_now(name, **{"images_per_s": chance.randrange(5, 40), **trouble.get(name, {})}) for name in names]
    here = shop("shop-33", foreign="shop-32")
    here[4]["health"] = "dead"
    figures = {"first": 870.0, "alive": 198.0, "first_p50_ms": 11.0, "final_p50_ms": 46.0}
    uppers = ("cloud-1", "shop-32-edge-1", "cloud-1", "shop-32-edge-1")
    links = [
        {"end": node["node_id"], "upper": upper, "mapped": True, "images_per_s": 4.0 * (number + 1)}
        for number, (node, upper) in enumerate(zip(here[:4], uppers, strict=True))
    ]
    for name, width, height, scheme, site in _SITES:
        page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
        fleet = PlayedFleet(page)
        fleet.sites = sites
        page.goto(f"{url}/ui{f'#site={site}' if site else ''}")
        fleet.tell(snapshot(sites, here, site, links=links, known=202, figures=figures))
        page.wait_for_timeout(_SETTLED_MS)
        _take(page, folder, name)


def _figures(chance: random.Random, tasks: int, agreement: float, failed: int) -> ReleaseFigures:
    figures = ReleaseFigures()
    for task in range(tasks):
        figures.agrees(sum(chance.random() < agreement for _ in range(10)), 10)
        figures.attempted(task >= failed)
        figures.took("coarse", 2.4 * chance.lognormvariate(0, 0.3))
    return figures


def _take_releases(browser: Browser, url: str, folder: Path) -> None:
    """A trial that goes well, after one that did not."""
    chance, now = random.Random(3), Trial()
    now.new, now.old_here = _figures(chance, 620, 0.83, 1), _figures(chance, 700, 0.81, 0)
    guards = tuple(judge(name, limit, now) for name, limit in DEFAULT_GUARDS.items())
    now.new = _figures(chance, 40, 0.06, 0)
    failed = judge("agreement", DEFAULT_GUARDS["agreement"], now)
    past = rollout("flowers@6", previous="flowers@5", state=RolloutState.ROLLED_BACK, elapsed_s=95)
    past = past.model_copy(
        update={"ended_at": past.started_at, "reason": f"The trial failed. agreement: {failed.detail}"}
    )
    shown = trial(guards=guards, device_count=6, wanted=11, ready=11, elapsed_s=4500)
    page = browser.new_context(viewport={"width": 1280, "height": 1000}).new_page()
    PlayedReleases(page, shown.model_copy(update={"history": (past,)}), "operator")
    page.goto(f"{url}/ui/releases")
    page.get_by_label("compared with").select_option("flowers@8")
    _take(page, folder, "releases")


def take_all(folder: Path) -> None:
    """Blocks for about a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = read_sample()
    counts = ("--end", "6", "--edge", "2", "--cloud", "1", "--untrusted", "cloud")
    with (
        tempfile.TemporaryDirectory() as state,
        sync_playwright() as playwright,
        started(*counts, folder=Path(state)) as fleet,
        Client(fleet.url) as client,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        assert sample.fine is not None
        labels = sample.fine.tolist()
        done = client.wait(client.submit(sample.images, labels=labels, scheme="mapping", name="sample"))
        # The last one's answers come from the cloud, which gets features.
        jobs = [
            client.submit(np.tile(sample.images, (20, 1, 1, 1)), name=f"batch {number}", scheme=scheme)
            for number, scheme in enumerate(_SCHEMES)
        ]
        page = _opened(browser, f"{fleet.url}/ui", 1280, "light")
        page.wait_for_timeout(1000 * _WARM_S)
        os.kill(pid_of(fleet, "end-3"), signal.SIGKILL)
        client.drain("end-5")
        expect(page.locator('[data-testid=node][data-node="end-3"]')).to_have_attribute("data-health", "dead")
        page.wait_for_timeout(_SETTLED_MS)
        _take(page, folder, "fleet")
        for name, path, width, scheme in _PAGES:
            page = _opened(browser, f"{fleet.url}/ui{path.format(job=done.id)}", width, scheme)
            page.wait_for_timeout(_SETTLED_MS)
            _take(page, folder, name)
        for job in jobs:
            with contextlib.suppress(Conflict):  # it has ended
                client.cancel(job)
        page = _opened(browser, f"{fleet.url}/ui/try", 1280, "dark")
        page.get_by_test_id("upload").set_input_files(pictures(_PICTURES))
        expect(page.locator("[data-testid=card][data-fine]")).to_have_count(_PICTURES)
        page.wait_for_timeout(_SETTLED_MS)
        _take(page, folder, "try-dark")
        _take(_trained(browser, fleet.url), folder, "training")
        _take_live(browser, fleet.url, folder)
        _take_sites(browser, fleet.url, folder)
        _take_releases(browser, fleet.url, folder)
        browser.close()


if __name__ == "__main__":
    take_all(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
