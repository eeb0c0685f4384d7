# mypy: ignore-errors
# Its imports are installed in the environment of this rival only.
"""Flower: FedAvg over gRPC, a server and client processes that stay connected.

`start_server` and `start_client` are deprecated, and faster than what has taken their place: a SuperNode starts a
process for each message, and asks for messages every 3 s.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

import torch
from common import Curve, Pictures, fill, sgd, state, step, task
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
from torch import nn

_MOST_ROUNDS = 100_000


class Worker(NumPyClient):
    """Has a share of the images."""

    def __init__(self, number: int, asked: Any) -> None:
        pictures = Pictures(asked)
        torch.manual_seed(asked.seed * asked.workers + number)
        self._network = pictures.network()
        self._batches = pictures.batches(asked.seed, slice(number, None, asked.workers))
        self._asked = asked

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        began = time.monotonic()
        _load(self._network, parameters)
        optimizer = sgd(list(self._network.parameters()), self._asked.rate)
        for _ in range(self._asked.period):
            step(self._network, optimizer, next(self._batches))
        return _arrays(self._network), self._asked.period, {"began": began}


def work(number: int, address: str, asked: Any) -> None:
    start_client(server_address=address, client=Worker(number, asked).to_client(), insecure=True)


class _Reached(Exception):
    """The run is to end."""


def main() -> None:
    asked = task()
    pictures = Pictures(asked)
    network, curve = pictures.network(), Curve(pictures, asked.accuracy)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    began: list[float] = []

    def note(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        began.extend(each["began"] for _, each in metrics)
        return {}

    def evaluate(number: int, parameters: list[Any], config: dict[str, Any]) -> None:
        if not began:
            return
        seconds = time.monotonic() - min(began)
        _load(network, parameters)
        if curve.reached(network, seconds, updates=number * asked.workers, steps=number * asked.period):
            raise _Reached

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=asked.workers,
        min_available_clients=asked.workers,
        evaluate_fn=evaluate,
        fit_metrics_aggregation_fn=note,
        initial_parameters=ndarrays_to_parameters(_arrays(network)),
    )
    workers = [
        multiprocessing.get_context("spawn").Process(target=work, args=(number, address, asked), daemon=True)
        for number in range(asked.workers)
    ]
    for each in workers:
        each.start()
    try:
        start_server(server_address=address, config=ServerConfig(num_rounds=_MOST_ROUNDS), strategy=strategy)
    except _Reached:
        for each in workers:
            each.kill()
        os._exit(0)  # the server's threads would wait for them


def _arrays(network: nn.Module) -> list[Any]:
    return [each.detach().numpy() for each in state(network)]


def _load(network: nn.Module, arrays: list[Any]) -> None:
    fill(network, torch.cat([torch.from_numpy(each).reshape(-1) for each in arrays]))


if __name__ == "__main__":
    main()
