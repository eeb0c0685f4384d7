"""A process with a share of a core."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from experiments.peers.processes import cpu_s
from experiments.training.cores import CoreShare, core_shares
from tierkit.errors import SetupError

SHARE, WORK_S = 0.25, 0.5
WORKS = f"""
import sys, time
sys.stdin.readline()
while time.process_time() < {WORK_S}:
    pass
"""


@pytest.fixture
def share() -> Iterator[CoreShare]:
    try:
        with core_shares(SHARE) as (made,):
            yield made
    except SetupError as error:
        pytest.skip(str(error))


def test_it_takes_at_least_as_long_as_its_share_says(share: CoreShare) -> None:
    process = subprocess.Popen([sys.executable, "-c", WORKS], stdin=subprocess.PIPE)
    try:
        share.take(process.pid)
        before = cpu_s(process.pid)
        began = time.monotonic()
        process.communicate(b"\n", timeout=120)
        # However fast or busy the machine is: it has at most its share of each period, and of one more.
        assert time.monotonic() - began > 0.9 * (WORK_S - before) / SHARE
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_gone_is_told(share: CoreShare) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(SetupError, match=r"cgroup\.procs"):
        share.take(process.pid)
