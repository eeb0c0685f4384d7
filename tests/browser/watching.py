"""A node with sources, played with a plain HTTP client, for pages that show what it sees."""

from __future__ import annotations

import io
import re
import secrets
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from models.manifest import load_manifest

__all__ = [
    "HOSTILE",
    "PLAYS_EVENTS",
    "PlayedNode",
    "coarse_of",
    "history",
    "jpeg",
    "row",
    "shown_number",
    "streams",
    "tile",
    "turn",
]

HOSTILE = "<img src=x onerror=window.hit=1> \u202egnp.\u2066evil " + "n" * 160
"""A text that must stay a text."""

PLAYS_EVENTS = """
window.streams = [];
window.kept = {};
window.EventSource = class extends EventTarget {
  constructor(url) {
    super();
    this.url = url;
    window.streams.push(this);
    document.documentElement.dataset.stream = url;
    setTimeout(() => {
      this.dispatchEvent(new Event("open"));
      if (url in window.kept) this.dispatchEvent(new MessageEvent("snapshot", { data: window.kept[url] }));
    });
  }
  close() {
    window.streams = window.streams.filter((each) => each !== this);
  }
};
window.keep = (url, data) => {
  window.kept[url] = data;
  for (const each of window.streams)
    if (each.url === url) each.dispatchEvent(new MessageEvent("snapshot", { data }));
};
window.tell = (path, name, data) => {
  for (const each of window.streams)
    if (each.url.startsWith(path)) each.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data) }));
};
"""
"""Event streams whose events the test makes: what a browser does with them does not depend on who sends them.

A snapshot that is kept also comes first in each stream of this address that is opened later.
"""

_COARSE, _FINE = bundled_hierarchy().coarse, bundled_hierarchy().fine


def coarse_of(label: str) -> str:
    """The superclass of a class."""
    return _COARSE[bundled_hierarchy().parent[_FINE.index(label)]]


def jpeg(number: int, width: int = 320, height: int = 240) -> bytes:
    """A picture of the sample, enlarged."""
    file = io.BytesIO()
    Image.fromarray(read_sample().images[number]).resize((width, height)).save(file, "JPEG")
    return file.getvalue()


def streams(page: Page, path: str) -> None:
    """Wait until the newest event stream of a page with `PLAYS_EVENTS` is this one.

    The policy of the page forbids Playwright's own `wait_for_function`.
    """
    expect(page.locator(f'html[data-stream="{path}"]')).to_have_count(1)


class PlayedNode:
    """An end node that the scheduler believes alive for ten minutes.

    Args:
        token: of the node; None where none is asked for.
        site: of the node; None: no site.
    """

    def __init__(self, url: str, node_id: str, token: str | None = None, site: str | None = None) -> None:
        self.node_id = node_id
        self._incarnation, self._spool = secrets.token_hex(8), secrets.token_hex(8)
        self._network = next(each for each in load_manifest().models if each.tier == "end")
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, headers=headers)
        offer = {"name": self._network.name, "sha256": self._network.sha256, "ms_per_image": 1.0}
        place = {
            "node_id": node_id,
            "incarnation": self._incarnation,
            "tier": "end",
            "site": site,
            "url": "http://127.0.0.1:9",
            "models": [offer],
            "version": "0",
            "spool": self._spool,
            "lease_s": 600.0,
        }
        self._http.post("/v1/devices", json=place).raise_for_status()

    def close(self) -> None:
        self._http.close()

    def local(self, label: str, confidence: float) -> dict[str, Any]:
        """An answer of the node: a superclass."""
        network = {"model": self._network.name, "sha256": self._network.sha256}
        return {**network, "label": _COARSE.index(label), "confidence": confidence}

    @staticmethod
    def finer(label: str, confidence: float) -> dict[str, Any]:
        """An answer from the cloud: a class."""
        return {
            "node_id": "cloud-0",
            "tier": "cloud",
            "model": "large",
            "sha256": "2" * 64,
            "label": _FINE.index(label),
            "confidence": confidence,
            "coarse_label": _COARSE.index(coarse_of(label)),
            "coarse_confidence": confidence,
        }

    def seen(
        self, sequence: int, label: str = "fish", confidence: float = 0.75, *, source: str = "gate", **changes: Any
    ) -> dict[str, Any]:
        """An observation."""
        answer = self.local(label, confidence)
        return {"source": source, "sequence": sequence, "age_s": 1.0, "local": answer, **changes}

    def send(self, *observations: dict[str, Any], device: dict[str, Any] | None = None) -> None:
        """Post a batch.

        Args:
            device: the state of the node.
        """
        batch = {"node_id": self.node_id, "incarnation": self._incarnation, "spool": self._spool}
        told = {} if device is None else {"device": device}
        self._http.post("/v1/observations", json={**batch, "observations": observations, **told}).raise_for_status()

    def send_picture(self, sequence: int, content: bytes, *, source: str = "gate") -> None:
        path = f"/v1/observations/{self.node_id}/{source}/{sequence}/picture"
        self._http.put(path, content=content, headers={"content-type": "image/jpeg"}).raise_for_status()

    def says(self, *sources: tuple[str, str], reason: str = "", **changes: Any) -> None:
        """Post the state of the node without observations.

        Args:
            sources: names and states.
            reason: why sources wait after a failure.
        """
        states = [
            {"name": name, "state": state, "reason": reason if state == "waiting" else ""} for name, state in sources
        ]
        self.send(device={"sources": states, **changes})


def tile(page: Page, node: PlayedNode, source: str = "gate") -> Locator:
    """The tile of a source."""
    return page.locator(f'[data-testid=tile][data-node="{node.node_id}"][data-source="{source}"]')


def shown_number(tile: Locator) -> int:
    """The sequence number of the picture that a tile shows."""
    found = re.search(r"/(\d+)/picture\?size=320$", str(tile.locator("img").get_attribute("src")))
    assert found is not None
    return int(found[1])


def history(url: str, node: PlayedNode, source: str = "gate") -> str:
    """The address of the page of a source."""
    return f"{url}/ui/live/{node.node_id}/{source}"


def row(page: Page, number: int) -> Locator:
    """The row of an observation."""
    return page.locator(f'[data-testid=observation][data-number="{number}"]')


def turn(page: Page, *, hidden: bool) -> None:
    """Make the page believe that it is hidden, or seen again."""
    page.evaluate(
        "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange')); }",
        hidden,
    )
