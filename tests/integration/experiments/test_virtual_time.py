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


async def test_a_worker_that_gives_way_to_its_host_does_all_of_its_work(tmp_path: Path) -> None:
    data = write_digits(tmp_path, 6_000)
    real = await real_run("downpour", 0, workers=1, share=SHARE, epochs=10, data=data, give_way=True)
    assert real["updates"] == 100  # of one step each
    assert len(real["cores"]) == 1
    assert 0 < real["cores"][0] < 1.3 * SHARE
    assert real["step_s"] > 0


async def test_a_request_is_half_of_what_an_update_takes_beyond_its_step_and_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    async def measured(strategy: str, seed: int, **given: object) -> dict[str, float]:
        asked.append((strategy, seed, given["workers"], given["give_way"]))
        # Of 5 ms an update 1 ms is the disk and 2 ms the step; in the run beside it a step takes half of that.
        return {"seconds": 0.5, "updates": 100, "sync_s": 0.001, "step_s": 0.002 / (1 + seed)}

    monkeypatch.setattr("experiments.training.real.real_run", measured)
    found = await request_steps("downpour", workers=2, share=SHARE, epochs=10, data=None)
    assert asked == [("downpour", 0, 1, True), ("downpour", 1, 1, True)]
    assert found == pytest.approx((0.5 + 1.5) / 2)
