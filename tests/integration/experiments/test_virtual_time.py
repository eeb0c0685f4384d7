"""A run of real workers with a quarter of a core each, as `terrace experiment virtual-time` has it."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra 'train' (torch)")

from experiments.training.real import real_run, request_steps, virtual_run
from tests.digits import write_digits

pytestmark = [pytest.mark.train, pytest.mark.anyio, pytest.mark.timeout(300)]

SHARE = 0.25
EPOCHS, UPDATES = 100, 20
"""With 50 steps in each: 6,000 images, of which 5,000 are held out, in batches of 100."""


async def test_real_workers_have_their_share_of_a_core_and_no_more(tmp_path: Path) -> None:
    data = write_digits(tmp_path, 6_000)
    real = await real_run("fedavg", 0, workers=2, share=SHARE, epochs=EPOCHS, data=data)
    assert real["updates"] == UPDATES
    assert len(real["cores"]) == 2
    # On any machine: what has a smaller share is kept waiting by others.
    assert 0 < min(real["cores"]) <= max(real["cores"]) < 1.3 * SHARE
    virtual = virtual_run(
        "fedavg",
        0,
        workers=2,
        epochs=EPOCHS,
        step_s=0.01,
        spread=0.05,
        serve_s=0.001,
        sync_s=0.001,
        data=data,
    )
    assert virtual["updates"] == UPDATES
    assert virtual["virtual_seconds"] > UPDATES / 2 * 50 * 0.9 * 0.01


async def test_a_request_takes_a_part_of_what_its_worker_takes(tmp_path: Path) -> None:
    data = write_digits(tmp_path, 6_000)
    found = await request_steps("downpour", workers=2, share=SHARE, epochs=10, data=data)
    assert 0 < found < 1
