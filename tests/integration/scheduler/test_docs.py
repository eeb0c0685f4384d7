"""The examples on the scheduler's pages run as they stand."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import get_args

import pytest

from tierkit.wire.events import FallbackReason

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("page", "shows"),
    [
        ("reference/jobs.md", ["event: state", "event: coarse", '"index":2']),
        (
            "explanation/scheduling.md",
            ["end-0 -> ['edge-0', 'cloud-0'] place 1 of 1 on 1 edge node", "set by the operator"],
        ),
    ],
)
async def test_the_examples_run(kit, scheduler, page, shows, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(examples) == 1
    async with kit.end(scheduler, "end-0"), kit.uppers(scheduler, "edge-0", "cloud-0"):
        code = examples[0].replace("http://127.0.0.1:8070", scheduler.url)
        assert code != examples[0]
        await asyncio.to_thread(exec, compile(code, page, "exec"), {})
    printed = capsys.readouterr().out
    assert [text for text in shows if text not in printed] == []


def test_every_reason_of_a_fallback_is_told():
    table = (DOCS / "reference/jobs.md").read_text().partition("| reason | what happened |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(get_args(FallbackReason))
