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
from common import Digits, sgd, task, tell
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg
from torch import nn

_MOST_ROUNDS = 100_000


class Worker(NumPyClient):
    """Has a share of the images."""

    def __init__(self, number: int, asked: Any) -> None:
        digits = Digits(asked.data)
        torch.manual_seed(asked.seed * asked.workers + number)
        self._network = digits.network()
        self._batches = digits.batches(asked.seed, slice(number, None, asked.workers))
        self._asked = asked

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        began = time.monotonic()
        _fill(self._network, parameters)
        optimizer = sgd(list(self._network.parameters()), self._asked.rate)
        for _ in range(self._asked.period):
            images, labels = next(self._batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._network(images), labels).backward()
            optimizer.step()
        return _arrays(self._network), self._asked.period, {"began": began}


def work(number: int, address: str, asked: Any) -> None:
    start_client(server_address=address, client=Worker(number, asked).to_client(), insecure=True)


class _Reached(Exception):
    """The run is to end."""


def main() -> None:
    asked = task()
    digits = Digits(asked.data)
    network = digits.network()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    began: list[float] = []

    def note(metrics: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        began.extend(each["began"] for _, each in metrics)
        return {}

    def evaluate(number: int, parameters: list[Any], config: dict[str, Any]) -> None:
        _fill(network, parameters)
        accuracy = digits.accuracy(network)
        if began and accuracy >= asked.accuracy:
            size = sum(each.nbytes for each in parameters)
            tell(
                seconds=time.monotonic() - min(began),
                accuracy=accuracy,
                updates=number * asked.workers,
                bytes_sent=number * asked.workers * size,
            )
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
    return [each.detach().numpy() for each in network.parameters()]


def _fill(network: nn.Module, arrays: list[Any]) -> None:
    with torch.no_grad():
        for each, values in zip(network.parameters(), arrays, strict=True):
            each.copy_(torch.from_numpy(values))


if __name__ == "__main__":
    main()
