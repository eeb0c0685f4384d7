"""A process that fills a spool is killed, or offers much more than fits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from end_node.spool import Spool
from tierkit.wire.observations import Observation

MB = 10**6

WRITER = """
import os, sys
from pathlib import Path
from end_node.spool import Draft, Spool

spool = Spool.open(Path(sys.argv[1]), size_bytes=50_000_000)
picture = os.urandom(20_000)
taken = int(sys.argv[2])
while True:
    taken += 1
    mark = str(taken)
    assert spool.known("gate", [mark]) == set()
    added = spool.add(Draft(source="gate", name=mark, mark=mark, unsure=True, margin=0.1, picture=picture, waits=True))
    print(added.sequence, mark, flush=True)
"""

OVERLOAD = """
import os, sys
from pathlib import Path
from end_node.spool import Draft, Spool

def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

size, picture = 10_000_000, os.urandom(100_000)
spool = Spool.open(Path(sys.argv[1]), size_bytes=size)
used, settled = [], 0
for number in range(1000):
    unsure = number % 3 == 0
    spool.add(Draft(source="gate", unsure=unsure, margin=0.1, picture=picture, waits=unsure, keeps=not unsure))
    if number == 200:
        settled = memory()
    used.append(spool.stats().bytes_used)
    assert used[-1] <= size
stats = spool.stats()
print(max(used), memory() - settled, stats.dropped_sure, stats.dropped_unsure, stats.lost, stats.waiting)
"""


def test_ten_kills_lose_nothing_that_was_stored_and_nothing_comes_twice(tmp_path: Path) -> None:
    chance = random.Random(1)
    folder = tmp_path / "spool"
    announced: dict[int, str] = {}
    last = 0
    for _ in range(10):
        writer = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, str(folder), str(last)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(chance.randint(1, 60)):
            number, mark = writer.stdout.readline().split()
            announced[int(number)] = mark
        writer.kill()
        for line in writer.stdout:
            if line.endswith("\n"):
                number, mark = line.split()
                announced[int(number)] = mark
        writer.wait()
        writer.stdout.close()
        spool = Spool.open(folder, size_bytes=50 * MB)
        stored: list[Observation] = spool.undelivered(100_000)[0]
        assert [each.sequence for each in stored] == list(range(1, len(stored) + 1))
        assert announced.items() <= {each.sequence: each.name for each in stored}.items()
        assert len(stored) <= len(announced) + 1  # one was stored, and killed before it was announced
        assert len({each.name for each in stored}) == len(stored)
        assert all(len(spool.picture(held.key) or b"") == 20_000 for held in spool.waiting(100_000))
        assert spool.stats().set_aside == ()
        for each in stored:
            announced[each.sequence] = each.name
        last = int(stored[-1].name)
        spool.close()


def test_ten_times_as_much_as_fits(tmp_path: Path) -> None:
    """Sure pictures go first; memory and files stay within their bounds."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", OVERLOAD, str(tmp_path / "spool")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    most, grown, sure, unsure, lost, waiting = (int(part) for part in done.stdout.split())
    assert most <= 10 * MB
    assert grown < 4 * 2**20
    assert lost == 0
    assert waiting > 50  # only unsure pictures are left
    assert sure == 1000 * 2 // 3
    assert unsure + waiting == 1000 - sure
