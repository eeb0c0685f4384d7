"""A node with sources, in a process of its own, that is killed again and again."""

import random
from collections import Counter
from pathlib import Path

from models.manifest import weights_folder
from tests.integration.end_node.observing import png, said_scheduler
from tierkit.testing import service_process, wait_for

KILLS = 6
PICTURES = 200


async def test_kill_9_loses_nothing_of_a_folder_and_repeats_nothing(tmp_path: Path) -> None:
    """Each file is answered once; the scheduler gets each number once with one name."""
    pictures, chance = tmp_path / "pictures", random.Random(7)
    pictures.mkdir()
    for number in range(PICTURES):
        (pictures / f"{number:04}.png").write_bytes(png(number % 256, number // 256))
    (tmp_path / "end.toml").write_text(
        f'[[source]]\nname = "inbox"\nurl = "{pictures}"\nrate = 40\n[spool]\nfolder = "{tmp_path / "spool"}"\n'
    )
    async with said_scheduler() as (scheduler, url):
        flags = ["--config", str(tmp_path / "end.toml"), "--port", "0", "--node-id", "end-1", "--scheduler", url]
        command = ["-m", "terrace", "end", *flags, "--models", str(weights_folder())]
        for number in range(KILLS):
            async with service_process(command, ready_file=tmp_path / f"{number}.ready") as node:
                had = len(scheduler.observations)
                some = had + chance.randrange(1, 25)
                await wait_for(lambda some=some: len(scheduler.observations) >= some)  # type: ignore[misc]
                node.kill()
                await node.exit_code()
        async with service_process(command, ready_file=tmp_path / "last.ready"):
            await wait_for(lambda: len(scheduler.observations) >= PICTURES, timeout_s=60)
    names = Counter(each.name for each in scheduler.observations.values())
    assert names == Counter(f"{number:04}.png" for number in range(PICTURES))
    assert sorted(number for _, number in scheduler.observations) == list(range(1, PICTURES + 1))
