"""The pages on protocol and metrics say what is true: their example runs, their tables are complete."""

import asyncio
import re
from importlib import import_module
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from scheduler.metrics import LEARNING, SITES, SOURCES
from tierkit.errors import TerraceError
from tierkit.http import errors as http_errors
from tierkit.inference.metrics import ShareMetrics
from tierkit.testing import service_process

DOCS = Path(__file__).parents[3] / "docs"
MEASURING = (
    "tierkit.access.authentication",
    "end_node.node",
    "end_node.observing",
    "end_node.uplink.sending",
    "encryption.heads",
    "encryption.sending",
    "scheduler.metrics",
    "tierkit.inference.metrics",
    "tierkit.http.server",
)


async def test_the_example_of_the_protocol_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "reference/inference-protocol.md").read_text(), re.DOTALL)
    async with service_process(["-m", "cloud_node", "--port", "0"], ready_file=tmp_path / "ready") as node:
        code = example.replace("127.0.0.1:8072", node.url.removeprefix("http://"))
        assert code != example
        await asyncio.to_thread(exec, compile(code, "protocol.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "(2, 100)" in printed
    assert re.search(r"b'\d\.\d{6}:\d+:[a-z_]+'", printed)


def test_every_metric_is_documented_with_its_labels() -> None:
    text = (DOCS / "reference/metrics.md").read_text()
    told = {
        name.removesuffix("_total"): tuple(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(terrace_\w+)` \| \w+ \|([^|]*)\|", text, re.MULTILINE)
    }
    values = [value for module in MEASURING for value in vars(import_module(module)).values()]
    metrics = [value for value in values if isinstance(value, MetricWrapperBase)]
    given = {next(iter(metric.describe())).name: metric._labelnames for metric in metrics}
    given |= {family.name: family._labelnames for family in SOURCES.describe()}
    given |= {family.name: family._labelnames for family in SITES.describe()}
    given |= {family.name: family._labelnames for family in LEARNING.describe()}
    given |= {family.name: family._labelnames for family in ShareMetrics((), tuple).describe()}
    assert told == given


def test_every_status_of_an_error_is_on_the_protocol_page_or_belongs_to_the_scheduler() -> None:
    def classes(cls: type[TerraceError]) -> set[type[TerraceError]]:
        return {cls}.union(*map(classes, cls.__subclasses__()))

    named = set(
        map(int, re.findall(r"^\| (\d{3}) \|", (DOCS / "reference/inference-protocol.md").read_text(), re.MULTILINE))
    )
    statuses = {http_errors.status_of(cls.__new__(cls)) for cls in classes(TerraceError)}
    assert statuses - named == {421}  # who leads is the scheduler's business
