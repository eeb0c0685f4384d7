# mypy: ignore-errors
# Its imports are installed in the environment of this rival only.
"""hivemind: peers that train on local gradients, and average their weights in the background.

This is the configuration of its quick start, all peers on loopback, and the running statistics are averaged too. With
averaged gradients, its default, each step would wait for a round of matchmaking, which takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import subprocess
import sys
import time

import hivemind
import torch
from common import BATCH, Curve, Pictures, sgd, step, task

_LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
_MATCHMAKING_S, _AVERAGING_S, _REQUEST_S = 3.0, 10.0, 1.0
"""Seconds of the quick start. The documentation has 3 to 5 s for small local runs; its log asks for requests that take
less.
"""


class _Rounds(logging.Handler):
    """Counts the rounds of averaging that this process has done with all the others: hivemind only logs them, and its
    own counter of epochs rises without any."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._wanted, self.done = f"Averaged parameters with {workers} peers", 0

    def emit(self, record: logging.LogRecord) -> None:
        self.done += record.getMessage() == self._wanted


def peer(asked: argparse.Namespace) -> None:
    """Train to the end; the first peer measures. It prints its address when it is ready, and begins on a signal."""
    rounds = _Rounds(asked.workers)
    logging.getLogger("hivemind.optim.state_averager").addHandler(rounds)
    pictures = Pictures(asked)
    dht = hivemind.DHT(host_maddrs=_LOOPBACK, initial_peers=[asked.first] if asked.first else [], start=True)
    torch.manual_seed(asked.seed * asked.workers + asked.peer)
    # It averages no tensors in the order "channels last"; a step takes as long without.
    network = pictures.network().to(memory_format=torch.contiguous_format)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="pictures",
        batch_size_per_step=BATCH,
        target_batch_size=BATCH * asked.period * asked.workers,
        optimizer=sgd(list(network.parameters()), asked.rate),
        use_local_updates=True,
        matchmaking_time=_MATCHMAKING_S,
        averaging_timeout=_AVERAGING_S,
        averager_opts={"request_timeout": _REQUEST_S},
        extra_tensors=[each for each in network.buffers() if each.is_floating_point()],
        verbose=True,
    )
    # Each peer goes through all images, in an order of its own, as in the quick start.
    batches = pictures.batches(asked.seed * asked.workers + asked.peer)
    curve = Curve(pictures, asked.accuracy)
    print(dht.get_visible_maddrs()[0], flush=True)  # noqa: T201
    sys.stdin.readline()
    began = time.monotonic()
    for done in itertools.count(1):
        step(network, optimizer, next(batches))
        if asked.peer or done % asked.period or not rounds.done:
            continue
        if curve.reached(network, time.monotonic() - began, updates=rounds.done * asked.workers, steps=done):
            return


def main() -> None:
    asked = task(peer=int, first=str)
    if asked.peer is not None:
        peer(asked)
        return
    peers: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    for number in range(asked.workers):
        command = [sys.executable, *sys.argv, "--peer", str(number), *(["--first", addresses[0]] if addresses else [])]
        peers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        if not addresses:  # by which the others find each other
            addresses.append(peers[0].stdout.readline().strip())
    for each in peers[1:]:
        each.stdout.readline()
    for each in peers:
        each.stdin.write("begin\n")
        each.stdin.flush()
    print(peers[0].stdout.readline(), end="", flush=True)  # noqa: T201
    for each in peers:  # what they have started is ended by who has started this
        each.kill()


if __name__ == "__main__":
    main()
