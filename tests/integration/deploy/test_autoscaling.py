"""The examples of docs/how-to/engines.md for what scales plain replicas."""

import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "engines.md"
METRIC = "terrace_queued_images"
"""On docs/reference/metrics.md, which another test compares with the code."""


def examples() -> dict[str, Any]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return {found["kind"]: found for found in map(yaml.safe_load, blocks)}


def test_the_autoscaler_is_valid_and_asks_for_a_metric_of_nodes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="needs the extra `chart`: pip install '.[chart]'")
    autoscaler = examples()["HorizontalPodAutoscaler"]
    kubernetes.validate(autoscaler, "1.31", strict=True)
    (measure,) = autoscaler["spec"]["metrics"]
    assert measure["pods"]["metric"]["name"] == METRIC


def test_keda_asks_for_the_same() -> None:
    (trigger,) = examples()["ScaledObject"]["spec"]["triggers"]
    query: Any = promql_parser.parse(trigger["metadata"]["query"])
    assert query.expr.name == METRIC
    assert {matcher.name for matcher in query.expr.matchers.matchers} == {"namespace", "tier"}
    assert float(trigger["metadata"]["threshold"]) > 0
