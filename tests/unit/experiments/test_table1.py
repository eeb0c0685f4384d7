"""Table 1, stopped."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import table1
from experiments.harness import Request, execute
from experiments.profile import read_profile
from experiments.testbed import BATCH


class SlowModel:
    """Answers batch after batch, and holds the third until it is let go."""

    def __init__(self) -> None:
        self.batches = 0
        self.busy, self.go_on = threading.Event(), threading.Event()

    def run(self, inputs: Any, outputs: Any) -> dict[str, Any]:
        self.batches += 1
        if self.batches == 3:
            self.busy.set()
            self.go_on.wait(60)
        return {"logits": np.zeros((BATCH, 20), np.float32)}


async def test_ctrl_c_ends_the_measurement_at_the_next_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SlowModel()
    monkeypatch.setattr(table1, "_load", lambda entry, tier: (model, "1 core"))
    request = Request(profile_name="native", profile=read_profile("native"), tasks=20)
    running = asyncio.create_task(execute(table1.TABLE1, request, tmp_path / "run", lambda *words: None))
    await asyncio.to_thread(model.busy.wait, 60)
    running.cancel()
    outcome = await running
    assert outcome.record["state"] == "interrupted"
    model.go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()  # as the end of a program does
    assert model.batches == 3
