"""What the doctor finds, and what it advises."""

import asyncio
import hashlib
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import trustme
from anyio import to_thread
from starlette.applications import Starlette

from models.escalation import TUNING_NAME
from models.manifest import load_manifest, save_manifest, weights_folder
from terrace import __version__
from terrace.checks import (
    check_data,
    check_fleet,
    check_installation,
    check_port,
    check_weights,
    listens_here,
)
from terrace.findings import Check, CheckVerdict
from tests.model_sets import colour_network, colour_set
from tierkit.client import Client, Device, ReleaseList, SinkList, SinkNow, SiteNow
from tierkit.errors import (
    Forbidden,
    NotFound,
    Standby,
    TerraceError,
    Unauthenticated,
    UpstreamError,
    UpstreamUnavailable,
)
from tierkit.http.address import free_port
from tierkit.settings import ServiceSettings
from tierkit.testing import serve_app, talking
from tierkit.types import Health, Share, SiteHealth, Tier
from tierkit.wire.sources import SourcesReport


class FakeClient:
    """Says what a scheduler would."""

    url = "http://scheduler:8070"

    def __init__(
        self,
        *devices: Device,
        error: TerraceError | None = None,
        who: dict[str, Any] | None = None,
        standbys: Sequence[str] = (),
        report: SourcesReport | None = None,
        sites: Sequence[SiteNow] = (),
        share: Sequence[str] = (),
        sinks: Sequence[SinkNow] | None = None,
    ) -> None:
        self._sinks = sinks
        self._report = report
        self._sites = tuple(sites)
        self._share = list(share)
        self.urls = (*standbys, self.url)
        self._devices = devices
        self._error = error
        self._who = who or {"name": None}

    def whoami(self) -> dict[str, Any]:
        if self._error:
            raise self._error
        return self._who

    def info(self) -> dict[str, Any]:
        if self._error:
            raise self._error
        return {"version": __version__, "share": self._share}

    def models(self) -> dict[str, Any]:
        return {"models": [{"name": "small", "sha256": "0" * 64}]}

    def releases(self) -> ReleaseList:
        raise NotFound("no such path")

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def sites(self) -> tuple[SiteNow, ...]:
        return self._sites

    def sinks(self) -> SinkList:
        if self._sinks is None:
            raise Forbidden("only admins see sinks")
        return SinkList(sinks=tuple(self._sinks))

    def node_sources(self, node_id: str) -> SourcesReport:
        if self._report is None:
            raise UpstreamError(f"{node_id} cannot be reached")
        return self._report


def examine(
    *devices: Device,
    error: TerraceError | None = None,
    who: dict[str, Any] | None = None,
    asked_for: bool = True,
    tls_ca: Path | None = None,
    standbys: Sequence[str] = (),
    report: SourcesReport | None = None,
    sites: Sequence[SiteNow] = (),
    share: Sequence[str] = (),
    sinks: Sequence[SinkNow] | None = None,
) -> dict[str, Check]:
    fake = FakeClient(
        *devices, error=error, who=who, standbys=standbys, report=report, sites=sites, share=share, sinks=sinks
    )
    client = cast(Client, fake)
    return {check.name: check for check in check_fleet(client, asked_for=asked_for, tls_ca=tls_ca)}


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


DEVICE = Device(node_id="end-1", tier=Tier.END, url="http://127.0.0.1:1", health=Health.ALIVE, version=__version__)


@pytest.mark.parametrize(
    ("source", "spool", "name", "verdict", "words"),
    [
        ({}, {"waiting_answers": 1200}, "end-1, sources", CheckVerdict.OK, "1 of 1 run; 1,200 answers and 0 pictures"),
        ({"state": "finished"}, {}, "end-1, sources", CheckVerdict.OK, "0 of 1 run"),
        ({"state": "waiting", "reason": "no route"}, {}, "end-1, gate", CheckVerdict.FAIL, "stream waiting: no route"),
        ({"state": "paused"}, {}, "end-1, gate", CheckVerdict.NOTE, "stream paused"),
        ({}, {"dropped_pictures": 7}, "end-1, sources", CheckVerdict.NOTE, "7 pictures dropped, 0 answers lost"),
        ({}, {"lost_answers": 2}, "end-1, sources", CheckVerdict.NOTE, "0 pictures dropped, 2 answers lost"),
        ({}, {"set_aside": "/var/x"}, "end-1, sources", CheckVerdict.FAIL, "a damaged spool was set aside: /var/x"),
    ],
)
def test_sources_and_their_spool(
    source: dict[str, Any], spool: dict[str, Any], name: str, verdict: CheckVerdict, words: str
) -> None:
    report = SourcesReport.model_validate(
        {
            "sources": [{"name": "gate", "kind": "stream", "state": "running", **source}],
            "spool": {"bytes": 1, "size_bytes": 2, **spool},
        }
    )
    found = examine(DEVICE.model_copy(update={"sources": True}), report=report)
    assert (found[name].verdict, words in found[name].detail) == (verdict, True)
    assert bool(found[name].advice) == (verdict is not CheckVerdict.OK)


def test_sources_that_cannot_be_listed() -> None:
    devices = [DEVICE.model_copy(update={"sources": True}), DEVICE.model_copy(update={"node_id": "end-2"})]
    found = examine(*devices)
    assert found["end-1, sources"].verdict is CheckVerdict.NOTE
    assert "end-1 cannot be reached" in found["end-1, sources"].detail
    assert "end-2, sources" not in found


async def test_a_healthy_node() -> None:
    async with serve_app(Starlette()) as service:
        device = DEVICE.model_copy(update={"url": service.url, "network": "net", "accuracy": 0.7469})
        found = await to_thread.run_sync(examine, device)
        older = await to_thread.run_sync(examine, device.model_copy(update={"version": "0.0.1"}))
    assert {check.verdict for check in found.values()} == {CheckVerdict.OK}
    assert "serves net (74.7 %)" in found["end-1"].detail
    assert older["end-1"].verdict is CheckVerdict.NOTE
    assert "same version" in older["end-1"].advice


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({"health": Health.DEAD, "reason": "refuses connections"}, CheckVerdict.FAIL, "dead: refuses connections"),
        ({"health": Health.SUSPECT}, CheckVerdict.FAIL, "suspect"),
        ({"health": Health.DRAINING, "reason": "draining: drained by bob"}, CheckVerdict.NOTE, "drained by bob"),
        ({"health": Health.REMOVED, "reason": "removed by bob"}, CheckVerdict.NOTE, "removed by bob"),
    ],
)
def test_a_node_that_the_scheduler_doubts(change: dict[str, Any], verdict: CheckVerdict, words: str) -> None:
    check = examine(DEVICE.model_copy(update=change))["end-1"]
    assert check.verdict is verdict
    assert words in check.detail
    assert ("devices forget" in check.advice) is (change["health"] is Health.DEAD), "the scheduler forgets no other"


@pytest.mark.parametrize(
    ("allowed", "verdict", "words"),
    [
        ((), None, ""),
        (("http://10.0.0.7:1",), CheckVerdict.OK, "edge-2 of 2"),
        (("http://10.0.0.8:1",), CheckVerdict.NOTE, "none of 2"),
    ],
)
def test_which_upper_nodes_a_list_leaves_to_an_end_node(
    allowed: tuple[str, ...], verdict: CheckVerdict | None, words: str
) -> None:
    edges = [
        DEVICE.model_copy(update={"node_id": f"edge-{k}", "tier": Tier.EDGE, "url": f"http://10.0.0.{5 + k}:1"})
        for k in (1, 2)
    ]
    check = examine(DEVICE.model_copy(update={"allowed_upstreams": allowed}), *edges).get("end-1, list")
    if verdict is None:
        assert check is None
    else:
        assert check is not None
        assert check.verdict is verdict
        assert words in check.detail


async def test_a_node_that_answers_but_not_as_it_should_is_not_behind_a_firewall(tmp_path: Path) -> None:
    async def lost() -> None:
        raise UpstreamUnavailable("the scheduler is lost")

    cert = tmp_path / "expired.pem"
    cert.touch(0o600)
    authority, now = trustme.CA(), datetime.now(UTC)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    expired = authority.issue_cert("127.0.0.1", not_before=now - timedelta(days=9), not_after=now - timedelta(days=1))
    cert.write_bytes(expired.private_key_and_cert_chain_pem.bytes())
    settings = ServiceSettings.model_validate({"tls_cert": cert})
    async with serve_app(Starlette(), settings) as expired_here, serve_app(Starlette()) as busy:
        busy.add_check("scheduler", lost)
        for url, words in ((expired_here.url, "has expired: renew it"), (busy.url, "not ready")):
            device = DEVICE.model_copy(update={"url": url})
            check = (await to_thread.run_sync(partial(examine, device, tls_ca=tmp_path / "ca.pem")))["end-1"]
            assert words in check.detail
            assert "firewall" not in check.advice


def test_a_node_that_cannot_be_reached_from_here(closed_url: str) -> None:
    check = examine(DEVICE.model_copy(update={"url": closed_url}))["end-1"]
    assert check.verdict is CheckVerdict.FAIL
    assert "cannot be reached from here (ConnectError)" in check.detail
    assert "--advertise-url" in check.advice


def test_without_an_end_node_nothing_runs() -> None:
    check = examine()["end nodes"]
    assert check.verdict is CheckVerdict.FAIL
    assert "terrace end --scheduler http://scheduler:8070" in check.advice


@pytest.mark.parametrize(("asked_for", "verdict"), [(True, CheckVerdict.FAIL), (False, CheckVerdict.NOTE)])
def test_no_scheduler_is_a_fault_only_where_one_was_named(asked_for: bool, verdict: CheckVerdict) -> None:
    check = examine(error=UpstreamUnavailable("x"), asked_for=asked_for)["scheduler"]
    assert check.verdict is verdict
    assert "terrace up" in check.advice
    assert "--scheduler URL" in check.advice


@pytest.mark.parametrize(
    ("status", "body", "verdict", "words"),
    [
        (503, b'{"status": "standby"}', CheckVerdict.OK, "ready to lead"),
        (200, b'{"status": "ready"}', CheckVerdict.FAIL, "leads as well"),
        (503, b'{"status": "failing"}', CheckVerdict.FAIL, "failing"),
        (503, b"<html>", CheckVerdict.FAIL, "no scheduler"),
        (404, b"[]", CheckVerdict.FAIL, "no scheduler"),
    ],
)
async def test_who_would_take_the_scheduler_s_place(
    status: int, body: bytes, verdict: CheckVerdict, words: str
) -> None:
    async def say(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async with talking(say) as other:
        found = await to_thread.run_sync(partial(examine, standbys=[other.url]))
    check = found["standby"]
    assert (check.verdict, other.url in check.detail, words in check.detail) == (verdict, True, True)


def test_a_standby_that_does_not_answer_is_missed(closed_url: str) -> None:
    assert examine(standbys=[closed_url])["standby"].verdict is CheckVerdict.FAIL


def test_where_none_leads_that_is_the_fault() -> None:
    check = examine(error=Standby("no scheduler leads at the moment"), asked_for=False)["scheduler"]
    assert (check.verdict, "log" in check.advice) == (CheckVerdict.FAIL, True)


def test_another_service_at_that_address() -> None:
    check = examine(error=UpstreamError("http://a:1 answered 404, and not as a Terrace service does"))["scheduler"]
    assert check.verdict is CheckVerdict.FAIL
    assert "404" in check.detail


@pytest.mark.parametrize(
    ("left", "verdict", "words"),
    [
        (None, CheckVerdict.OK, "of alice, role user, does not expire"),
        (timedelta(days=30, hours=1), CheckVerdict.OK, "of alice, role user, expires in 30 days"),
        (timedelta(hours=5, minutes=10), CheckVerdict.NOTE, "expires in 5 h"),
    ],
)
def test_a_token_and_its_time(left: timedelta | None, verdict: CheckVerdict, words: str) -> None:
    expires = None if left is None else (datetime.now(UTC) + left).isoformat()
    check = examine(who={"name": "alice", "role": "user", "expires": expires})["token"]
    assert check.verdict is verdict
    assert words in check.detail


def test_a_token_that_is_refused() -> None:
    check = examine(error=Unauthenticated("the token is unknown here"))["token"]
    assert check.verdict is CheckVerdict.FAIL
    assert "--token-file FILE" in check.advice


@pytest.mark.parametrize(("expect_scheduler", "verdict"), [(False, CheckVerdict.FAIL), (True, CheckVerdict.OK)])
def test_a_port_in_use(expect_scheduler: bool, verdict: CheckVerdict) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (check,) = check_port(taken.getsockname()[1], expect_scheduler=expect_scheduler)
    assert check.verdict is verdict


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8070", True),
        ("http://localhost:8070", True),
        ("http://127.0.0.1:8071", False),
        ("http://127.0.0.1", False),
        ("http://192.0.2.1:8070", False),
        ("http://no-such-host.invalid:8070", False),
    ],
)
def test_whether_a_scheduler_is_one_of_this_machine(url: str, here: bool) -> None:
    assert listens_here(url, 8070) is here


def test_a_free_port() -> None:
    (check,) = check_port(free_port(), expect_scheduler=False)
    assert check.verdict is CheckVerdict.OK


def verdicts(found: Iterator[Check]) -> dict[str, CheckVerdict]:
    return {check.name: check.verdict for check in found}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [damage, Path.unlink], ids=["one bit", "missing"])
def test_weights_that_are_not_those_of_the_manifest(harm: Callable[[Path], None], tmp_path: Path) -> None:
    before = verdicts(check_weights())
    assert set(before.values()) == {CheckVerdict.OK}
    for source in (path for path in weights_folder().iterdir() if path.is_file()):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    victim = tmp_path / load_manifest().models[0].file
    harm(victim)
    after = list(check_weights(tmp_path))
    assert [check.verdict for check in after].count(CheckVerdict.FAIL) == 1
    assert any(str(victim) in check.detail for check in after)


@pytest.fixture
def own_set(tmp_path: Path) -> Path:
    return colour_set(tmp_path / "colours", {"end": colour_network(tmp_path / "colours.onnx")})


def test_the_networks_of_a_model_set(own_set: Path) -> None:
    assert verdicts(check_weights(own_set)) == {"set": CheckVerdict.OK, "of-end": CheckVerdict.OK}


def test_a_network_for_machines_with_a_gpu_is_marked(own_set: Path) -> None:
    manifest = load_manifest(own_set)
    entry = manifest.models[0].model_copy(update={"gpu": True})
    save_manifest(manifest.model_copy(update={"models": (entry,)}), own_set)
    assert [check.detail for check in check_weights(own_set) if check.detail.startswith("end with a GPU")]


def test_a_network_that_cannot_be_loaded(own_set: Path) -> None:
    manifest = load_manifest(own_set)
    (own_set / manifest.models[0].file).write_bytes(b"no network")
    digest = hashlib.sha256(b"no network").hexdigest()
    entry = manifest.models[0].model_copy(update={"sha256": digest, "size_bytes": len(b"no network")})
    save_manifest(manifest.model_copy(update={"models": (entry,)}), own_set)
    *_, check = check_weights(own_set)
    assert (check.name, check.verdict) == ("of-end", CheckVerdict.FAIL)
    assert "terrace models import" in check.advice


def test_a_model_set_that_is_not_there(tmp_path: Path) -> None:
    (check,) = check_weights(tmp_path / "mistyped")
    assert check.verdict is CheckVerdict.FAIL
    assert str(tmp_path / "mistyped") in check.detail


def test_thresholds_of_other_weights(own_set: Path) -> None:
    shutil.copy(weights_folder() / TUNING_NAME, own_set)
    assert verdicts(check_weights(own_set))["thresholds"] is CheckVerdict.NOTE
    assert verdicts(check_weights())["thresholds"] is CheckVerdict.OK


def test_the_installation_and_the_sample_are_as_they_should_be() -> None:
    assert set(verdicts(check_installation()).values()) == {CheckVerdict.OK}
    assert verdicts(check_data(None)) == {"sample": CheckVerdict.OK, "cifar100": CheckVerdict.NOTE}


def test_a_data_folder_without_data(tmp_path: Path) -> None:
    assert verdicts(check_data(tmp_path))["cifar100"] is CheckVerdict.FAIL


def a_site(name: str, health: SiteHealth, reason: str) -> SiteNow:
    return SiteNow(site=name, share=Share.CLOUD, health=health, reason=reason, nodes={}, alive={})


@pytest.mark.parametrize(
    ("health", "verdict", "advice"),
    [
        (SiteHealth.OK, CheckVerdict.OK, ""),
        (SiteHealth.DEGRADED, CheckVerdict.NOTE, ""),
        (SiteHealth.COARSE, CheckVerdict.FAIL, "start an edge node there, or a cloud node without a site"),
        (SiteHealth.DRAINED, CheckVerdict.NOTE, "terrace sites resume shop-7"),
        (SiteHealth.DOWN, CheckVerdict.NOTE, "terrace sites remove shop-7 --forget"),
    ],
)
def test_each_site_is_told_of_with_what_helps(health: SiteHealth, verdict: CheckVerdict, advice: str) -> None:
    found = examine(DEVICE.model_copy(update={"site": "shop-7"}), sites=[a_site("shop-7", health, "why")])
    check = found["site shop-7"]
    assert (check.verdict, check.detail) == (verdict, f"{health}, share cloud: why")
    assert advice in check.advice
    assert "end nodes without a site" not in found


def test_an_end_device_outside_the_sites_is_noticed_and_a_rule_for_no_site() -> None:
    shops = [a_site("shop-1", SiteHealth.OK, "")]
    stray = examine(*(DEVICE.model_copy(update={"node_id": f"end-{number}"}) for number in range(7)), sites=shops)
    check = stray["end nodes without a site"]
    assert (check.verdict, check.detail) == (CheckVerdict.NOTE, "end-0, end-1, end-2, end-3, end-4 and 2 more")
    found = examine(DEVICE, sites=shops, share=["cloud", "shop-1=none", "shpo-2=none"])
    assert (found["site shpo-2"].verdict, found["site shpo-2"].detail) == (
        CheckVerdict.NOTE,
        "has the rule shpo-2=none and no node",
    )
    assert "end nodes without a site" not in examine(DEVICE)


@pytest.mark.parametrize(
    ("changes", "verdict", "detail", "advice"),
    [
        ({}, CheckVerdict.OK, "webhook, ok", ""),
        (
            {"state": "failing", "reason": "the receiver answered 500"},
            CheckVerdict.NOTE,
            "webhook, failing: the receiver answered 500",
            "see to the receiver; 'terrace sinks test hook' tries it at once",
        ),
        ({"state": "paused", "reason": "by bob"}, CheckVerdict.NOTE, "webhook, paused: by bob", "resume hook"),
        ({"dead": 1200}, CheckVerdict.NOTE, "webhook, ok, 1,200 dead letters", "terrace sinks replay hook"),
        ({"dropped": 7}, CheckVerdict.NOTE, "webhook, ok, 7 events dropped", ""),
    ],
)
def test_each_sink_is_told_of_with_what_helps(
    changes: dict[str, Any], verdict: CheckVerdict, detail: str, advice: str
) -> None:
    now = {"name": "hook", "kind": "webhook", "created_at": 0, "state": "ok", **changes}
    found = examine(DEVICE, sinks=[SinkNow.model_validate(now)])["sink hook"]
    assert (found.verdict, found.detail) == (verdict, detail)
    assert advice in found.advice
