# mypy: ignore-errors
# What it shares with the rivals is found beside it only.
"""torch.distributed with gloo, one process a worker: gradients are averaged at each step by DistributedDataParallel, or
weights after some steps (local SGD). Or one process, without any of it."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from common import Curve, Pictures, fill, sgd, state, step, task
from torch import distributed, nn


def work(rank: int, rendezvous: str, asked: argparse.Namespace) -> None:
    """Train to the end; the first worker measures."""
    alone = asked.how == "alone"
    workers = 1 if alone else asked.workers
    pictures = Pictures(asked)
    network = trained = pictures.network()
    optimizer = sgd(list(network.parameters()), asked.rate)
    torch.manual_seed(asked.seed * workers + rank)
    batches = pictures.batches(asked.seed, slice(rank, None, workers))
    if not alone:
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=workers)
        if asked.how == "all-reduce":
            trained = nn.parallel.DistributedDataParallel(network)
        distributed.barrier()
    curve = Curve(pictures, asked.accuracy)
    began = time.monotonic()
    for done in itertools.count(1):
        step(trained, optimizer, next(batches))
        if done % asked.period:
            continue
        if asked.how == "local":
            average(network, workers)
        exchanged = {"alone": 0, "local": done // asked.period, "all-reduce": done}[asked.how]
        if not rank and curve.reached(network, time.monotonic() - began, updates=workers * exchanged, steps=done):
            return


def average(network: nn.Module, workers: int) -> None:
    """Let all networks be their mean."""
    values = torch.cat([each.reshape(-1) for each in state(network)])
    distributed.all_reduce(values)
    fill(network, values / workers)


def main() -> None:
    asked = task(how=str)
    # gloo would look for an address of this machine, and others could connect to it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder, 'rendezvous')}"
        others = [] if asked.how == "alone" else range(1, asked.workers)
        processes = [
            multiprocessing.get_context("spawn").Process(target=work, args=(rank, rendezvous, asked), daemon=True)
            for rank in others
        ]
        for each in processes:
            each.start()
        work(0, rendezvous, asked)
        for each in processes:
            each.kill()
    os._exit(0)  # gloo would wait for the others


if __name__ == "__main__":
    main()
