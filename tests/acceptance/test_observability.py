"""The alert rules and the dashboard ask for what services really measure, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggregateExpr, MatchOp, VectorSelector

from models.data import read_sample
from scheduler.metrics import GUARD_LIMITS, GUARDS, show_guards
from tierkit.client import Client
from tierkit.types import Tier
from tierkit.wire.api import Device
from tierkit.wire.releases import DEFAULT_GUARDS, GuardNow

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "terrace.json"
OF_TARGETS = {"job", "instance", "namespace"}
"""Labels that Prometheus gives to all that it reads from a target."""
KNOWN_VALUES = re.compile(r"`(\w+)`")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus"
)


@dataclass
class Use:
    """What a query wants of one metric."""

    where: str
    metric: str
    labels: set[str] = field(default_factory=set)
    values: dict[str, set[str]] = field(default_factory=dict)


def rules() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def queries() -> dict[str, str]:
    """Expressions by where they stand; the variables of the dashboard have a value."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = re.sub(r"\$__\w+", "5m", target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (found[f"the variable {variable['name']}"],) = re.findall(
                r"label_values\((.+), \w+\)", variable["definition"]
            )
    return found


def uses(where: str, query: str) -> Iterator[Use]:
    """The metrics of a query, each with the labels that it is chosen or grouped by."""
    found: list[Use] = []
    grouped: list[set[str]] = []

    def enter(node: promql_parser.Expr) -> bool:
        if isinstance(node, AggregateExpr):
            grouped.append(set(node.modifier.labels) if node.modifier else set())
        elif isinstance(node, VectorSelector):
            use = Use(where, str(node.name), set().union(*grouped))
            for matcher in node.matchers.matchers:
                use.labels.add(matcher.name)
                if not matcher.value.startswith("$"):
                    exact = matcher.op in (MatchOp.Equal, MatchOp.NotEqual)
                    use.values[matcher.name] = {matcher.value} if exact else set(matcher.value.split("|"))
            found.append(use)
        return True

    def leave(node: promql_parser.Expr) -> bool:
        if isinstance(node, AggregateExpr):
            grouped.pop()
        return True

    promql_parser.walk(promql_parser.parse(query), enter, leave)
    yield from found


@pytest.fixture(scope="module")
def measured(fleet_url: str) -> dict[str, dict[str, set[str]]]:
    """Label names with their values, by series name, of all services of a fleet that has done a job."""
    with Client(fleet_url) as client:
        for scheme in ("end-edge", "end-cloud"):
            client.wait(client.submit(read_sample().images[:20], scheme=scheme), budget_s=60)
        devices = client.devices()
    urls = [fleet_url, *(device.url for device in devices)]
    _send_observation(fleet_url, next(device for device in devices if device.tier is Tier.END))
    series: dict[str, dict[str, set[str]]] = {}
    for url in urls:
        page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = series.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    labels.setdefault(name, set()).add(value)
    series |= _guards()
    # Others use this fleet.
    httpx.delete(f"{fleet_url}/v1/devices/camera?incarnation={_INCARNATION}", trust_env=False).raise_for_status()
    httpx.delete(f"{fleet_url}/v1/devices/camera?forget=true", trust_env=False)
    return series


def _guards() -> dict[str, dict[str, set[str]]]:
    """The metrics of a trial, which this fleet does not have."""
    show_guards(GuardNow(name=name, limit=limit, value=1.0) for name, limit in DEFAULT_GUARDS.items())
    samples = [sample for metric in (GUARDS, GUARD_LIMITS) for family in metric.collect() for sample in family.samples]
    return {sample.name: {"guard": {*DEFAULT_GUARDS}} for sample in samples}


_INCARNATION = "0" * 16


def _send_observation(scheduler: str, like: Device) -> None:
    """Let a camera with the network of an end node send one observation."""
    own = {"node_id": "camera", "incarnation": _INCARNATION}
    place = {**own, "tier": "end", "url": like.url, "models": like.models, "version": "0", "spool": "0" * 16}
    place["site"] = "shop-1"  # a fleet without sites has no metrics of sites
    httpx.post(f"{scheduler}/v1/devices", json=place, trust_env=False).raise_for_status()
    status = {"sources": [{"name": "gate", "state": "running"}], "spool_bytes": 1, "spool_size_bytes": 2}
    seen = {"source": "gate", "sequence": 1, "age_s": 1.0}
    batch = {**own, "spool": "0" * 16, "observations": [seen], "device": status}
    httpx.post(f"{scheduler}/v1/observations", json=batch, trust_env=False).raise_for_status()


def documented(metric: str) -> set[str]:
    """Words of a metric's row, or of the page where it is a metric of the Python client."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    if metric.startswith("process_"):
        assert "`process_*`" in page
        return set()
    name = re.sub(r"_(bucket|count|sum)$", "", metric)
    rows = re.findall(rf"^\| `{name}` \|.*$", page, re.MULTILINE)
    assert len(rows) == 1, f"{name} is not on the page of metrics"
    return set(re.findall(r"\w+", rows[0]))


@pytest.mark.parametrize("where", queries())
def test_a_query_asks_for_metrics_labels_and_values_that_exist(
    where: str, measured: dict[str, dict[str, set[str]]]
) -> None:
    wanted = list(uses(where, queries()[where]))
    assert wanted
    for use in wanted:
        told = documented(use.metric)
        assert use.metric in measured, f"no service gives {use.metric}"
        given = measured[use.metric]
        assert use.labels <= given.keys() | OF_TARGETS, use
        for label, values in use.values.items():
            # Not every outcome has come up in this fleet; the page names them all.
            assert values <= given[label] | told, use


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_promtool_finds_nothing_wrong(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for test in yaml.safe_load((PROMETHEUS / "alerts_test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    assert set(cases) == {(rule["alert"], fires) for rule in rules() for fires in (True, False)}


@needs_promtool
def test_promtool_takes_the_page_of_metrics_for_clean(fleet_url: str) -> None:
    page = httpx.get(f"{fleet_url}/metrics", trust_env=False).text
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_on_the_page_of_observability_with_what_to_do() -> None:
    page = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    rows = dict(re.findall(r"^\| `(Terrace\w+)` \|.*\| (.+) \|$", page, re.MULTILINE))
    assert list(rows) == [rule["alert"] for rule in rules()]


def test_the_panels_of_the_dashboard_stand_side_by_side_and_take_its_data_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "job", "site"]
