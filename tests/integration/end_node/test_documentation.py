"""docs/reference/task-protocol.md is true: its example runs, its tables are complete."""

import asyncio
import re
from pathlib import Path
from typing import get_args

import pytest
from msgspec import Struct

from models.manifest import load_manifest
from tierkit.testing import ServiceProcess
from tierkit.wire.events import CoarseEvent, ErrorEvent, FallbackEvent, FallbackReason, FineEvent, RoutedEvent
from tierkit.wire.messages import Upstream

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "task-protocol.md").read_text(encoding="utf-8")


async def test_the_example_runs(
    end_process: ServiceProcess, edge_process: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert f'"{load_manifest().default_for("edge").name}"' in example
    code = example.replace("http://127.0.0.1:8071", end_process.url).replace("http://127.0.0.1:8072", edge_process.url)
    await asyncio.to_thread(exec, compile(code, "end-node.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("coarse end-1 [")
    assert second.startswith("fine edge-1 [")


def rows(header: str) -> dict[str, str]:
    """The table under this header row: first cell to second."""
    table = PAGE.partition(header)[2].partition("\n\n")[0]
    return dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("event", [CoarseEvent, FineEvent, RoutedEvent, FallbackEvent, ErrorEvent])
def test_every_field_of_an_event_is_named(event: type[Struct]) -> None:
    told = rows("| `event` | fields, with `event` and `task_id` |\n")
    named = re.findall(r"`(\w+)`", told[str(event.__struct_config__.tag)])
    assert {"task_id", *named} == set(event.__struct_fields__)


def test_every_reason_and_every_field_of_an_upper_node_is_named() -> None:
    assert rows("| `reason` of a fallback |").keys() == set(get_args(FallbackReason)) - {"quarantined"}
    assert (
        set(re.findall(r"`(\w+)`", rows("| header | meaning |\n")["Terrace-Upstream"])) == Upstream.model_fields.keys()
    )
