"""Far more is asked of a node than it can do: what has room is answered, the rest refused at once, memory is bounded.

In small, for every run of the tests; `python -m benchmarks overload` measures it for a minute with real networks.
"""

import os
from collections import Counter
from pathlib import Path

from benchmarks.peers.requests import infer_target
from experiments.bench.load import LoadPlan, Open, measure
from experiments.bench.summary import OK, percentile
from tierkit.testing import service_process

NODE = Path(__file__).with_name("slow_node.py")
BATCH = 50
REQUEST_BYTES = BATCH * 32 * 32 * 3
CAPACITY_PER_S = 10
"""Requests of 50 images that `slow_node` can answer in a second."""
QUEUE_IMAGES = 200
"""They take 400 ms."""
REFUSED = "503"


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_sixteen_times_what_a_node_can_do(tmp_path: Path) -> None:
    plan = LoadPlan(window_s=1.5, warmup_s=0.5, timeout_s=20.0, max_connections=64)
    queue = ["--max-queue-images", str(QUEUE_IMAGES)]
    async with service_process([str(NODE), "--port", "0", *queue], ready_file=tmp_path / "ready") as node:
        target = infer_target(node.url, "slow", BATCH, (32, 32, 3))
        before = resident_bytes(node.process.pid)
        level = await measure(target, Open(16 * CAPACITY_PER_S), plan)
        grown = resident_bytes(node.process.pid) - before
    assert level is not None
    outcomes = Counter(sample.outcome for sample in level.samples)
    assert set(outcomes) == {OK, REFUSED}, "a request without an answer"
    assert outcomes[REFUSED] > 14 * CAPACITY_PER_S * plan.window_s
    assert level.summary.requests_per_s >= 0.9 * CAPACITY_PER_S
    # A refusal that waited for a place would take as long as the queue, 400 ms. A pause of the machine spoils the tail.
    refusals_s = sorted(sample.done - sample.sent for sample in level.samples if sample.outcome == REFUSED)
    assert percentile(refusals_s, 50) < 0.05
    # The queue, a body in each connection, and what an allocator keeps. All bodies together are 70 MB.
    bound = QUEUE_IMAGES // BATCH * REQUEST_BYTES + plan.max_connections * REQUEST_BYTES + 8 * 2**20
    assert grown < bound < outcomes[REFUSED] * REQUEST_BYTES / 2
