"""One rank of a run: its options, its counters and checkpoints, and the result."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from models.dataset import Dataset
from models.training.config import TrainConfig
from models.training.record import FleetFacts
from models.training.run import RunOptions
from tierkit.atomic import alone_in, write_atomically
from tierkit.errors import Conflict, InvalidInput, ProviderUnavailable, SetupError
from training.host.opening import find_network
from training.learner import FlatLearner, read_images
from training.messages import MOST_LOSS, RESULT, SPEC
from training.parallel.exchange import Done
from training.parallel.keeping import Checkpoints, Totals
from training.parallel.meeting import RankPlace
from training.parallel.pipeline import RankStage
from training.parallel.programs import check_rule
from training.parallel.reporting import RankProgress, RankReports, ReportsTo
from training.strategies.config import ExchangeConfig, TournamentConfig
from training.strategies.finding import find_strategy

__all__ = ["RankOptions", "RankRun"]

_LOSSES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options, the same for all ranks of a run."""

    network: str
    """A bundled configuration, or a TOML file."""
    strategy: str = "allreduce"
    folder: Path | None = None
    """Keeps the run and the trained network, on each machine; a run that is there continues."""
    epochs: int | None = None
    seed: int | None = None
    """Both replace the configuration's."""
    data: Path | None = None
    dataset: str | None = None
    device: str = "cpu"
    """"cuda" gives each rank of a machine a GPU."""
    threads: int | None = 1
    scheduler: ReportsTo | None = None
    """Hears of the run from rank 0."""
    patience_s: float = 120.0
    """Budget of each wait for other ranks."""

    def network_config(self) -> TrainConfig:
        """The network's configuration.

        Raises:
            InvalidInput, SetupError: it cannot be found or read.
        """
        changes = {"epochs": self.epochs, "seed": self.seed}
        network = find_network(self.network)
        return network.model_copy(update={name: value for name, value in changes.items() if value is not None})


class RankRun:
    """Parts and counters of a rank, made from its options.

    Raises:
        InvalidInput, SetupError: they cannot be used.
    """

    def __init__(self, options: RankOptions, place: RankPlace, on_progress: Callable[[RankProgress], None]) -> None:
        self.options, self.place, self._on_progress = options, place, on_progress
        strategy = find_strategy(options.strategy)
        if not isinstance(strategy, ExchangeConfig | TournamentConfig):
            raise InvalidInput(f"{options.strategy!r} needs a host: start it with 'terrace train run' or 'train host'")
        self.strategy = strategy
        network = options.network_config()
        self.device = _device(options.device, place)
        RunOptions(device=str(self.device), threads=options.threads).prepare()
        data = options.data or (Path(os.environ["TERRACE_DATA"]) if "TERRACE_DATA" in os.environ else None)
        self.dataset = Dataset.open(options.dataset or network.dataset, data)
        images, self.test = read_images(network, self.dataset, device=str(self.device))
        self.learner = FlatLearner(network, images, strategy=strategy)
        check_rule(strategy, self.learner, place.ranks)
        self.stage = None
        if isinstance(strategy, ExchangeConfig) and strategy.rule == "pipeline":
            self.stage = RankStage(strategy, self.learner, place.rank, place.ranks)
        batches = strategy.batches(place.ranks)
        self.steps = self.learner.steps // batches
        if not self.steps:
            raise InvalidInput(f"{place.ranks} ranks are more than the {self.learner.steps} steps of this run")
        if options.folder is not None and (options.folder / SPEC).exists():
            raise SetupError(f"{options.folder} holds the run of a host: give another --folder")
        self.kept = Checkpoints(options.folder, place.rank, self.facts)
        self.progress = RankProgress(steps=self.steps, ranks=place.ranks)
        self.totals = Totals()
        self.longest_step_s = 0.0
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._every = max(1, images.batches.steps_per_epoch // batches)
        self._stepped_at = 0.0

    @cached_property
    def facts(self) -> dict[str, object]:
        """Facts that must be the same at all ranks."""
        network = self.learner.config
        return {
            "world size": self.place.ranks,
            "version": importlib.metadata.version("terrace-inference"),
            "seed": network.seed,
            "epochs": network.all_epochs,
            "network": f"{network.name} {_digest(network.model_dump(mode='json', exclude={'seed', 'epochs'}))}",
            "strategy": f"{self.strategy.rule} {_digest(self.strategy.model_dump(mode='json'))}",
            "data set": self.learner.data.sha256[:16],
            "folder": "kept" if self.options.folder is not None else "none",
        }

    @contextmanager
    def folder_locked(self) -> Iterator[None]:
        """Meanwhile no other run uses the folder."""
        with ExitStack() as stack:
            if (folder := self.options.folder) is not None and self.place.rank == 0:
                busy = f"another run uses {folder}: let it end, or give another --folder"
                stack.enter_context(alone_in(folder, otherwise=busy))
            yield

    def continue_from(self, step: int, rank: int | None = None) -> dict[str, float]:
        """Load the checkpoint before this step, of this rank or another one; the figures of the rule."""
        figures: dict[str, float] = {}
        if step:
            self.totals, figures = self.kept.load(step, self.learner, rank=rank)
        self.progress.step, self.progress.loss = step, self.totals.loss
        return figures

    def begin(self) -> None:
        """The first step begins."""
        self._stepped_at = time.monotonic()

    def stepped(self, done: Done, together: Callable[[], object] = lambda: None) -> None:
        """Count a step, report it, and keep a checkpoint after each epoch.

        Args:
            together: waits for the other ranks, so that no rank is more than one checkpoint ahead.
        """
        now = time.monotonic()
        took, self._stepped_at = now - self._stepped_at, now
        self.totals.seconds += took
        self.longest_step_s = max(self.longest_step_s, took)
        self.totals.updates += 1
        self._losses.append(done.loss)
        self.totals.loss = statistics.fmean(self._losses)
        self.progress.step, self.progress.loss = done.step + 1, self.totals.loss
        self.progress.bytes_sent, self.progress.bytes_received = self.totals.bytes_sent, self.totals.bytes_received
        self._on_progress(self.progress)
        if self.options.folder is not None and ((done.step + 1) % self._every == 0 or done.step + 1 == self.steps):
            together()
            self.kept.save(done.step + 1, self.learner, self.totals, done.kept)
            self._stepped_at = time.monotonic()
            self.totals.seconds += self._stepped_at - now

    def spend(self, sent: int, received: int, wait_s: float = 0.0) -> None:
        """Count bytes since the run began, and time since the last call: the learner's, and the wait for others."""
        self.totals.bytes_sent, self.totals.bytes_received = sent, received
        times = self.totals.times
        for name, seconds in {**self.learner.take_times(), "wait": wait_s}.items():
            times[name] = times.get(name, 0.0) + seconds

    def result(self, totals: Sequence[Totals], figures: Mapping[str, float]) -> dict[str, Any]:
        """Measure the accuracy, and keep network, record and result in the folder.

        Args:
            totals: totals of all ranks.

        Raises:
            SetupError: the weights give no meaningful loss.
        """
        learner = self.learner
        accuracy, loss = learner.evaluated(learner.weights(), learner.buffers(), self.test)
        if not loss <= MOST_LOSS:
            scaled = self.strategy.rule in ("allreduce", "hybrid", "factors")
            less = ", or set scaling to none," if scaled else ""
            raise SetupError(
                f"the loss of the weights is {loss:.3g}, which is not finite or above {MOST_LOSS:g}: lower the "
                f"learning rate{less} and begin again in another folder"
            )
        found = {**self.counted(totals), "accuracy": accuracy, **figures}
        if (folder := self.options.folder) is not None:
            self.keep(folder / "rank-0" if self.strategy.rule == "ensemble" else folder, found)
            write_atomically(folder / RESULT, json.dumps(found, indent=1).encode())
        return found

    def counted(self, totals: Sequence[Totals]) -> dict[str, Any]:
        """The result without the accuracy."""
        times = [each.times for each in totals]
        network = self.learner.config
        return {
            "strategy": Path(self.options.strategy).stem,
            "network": network.name,
            "workers": self.place.ranks,
            "seed": network.seed,
            "epochs": network.all_epochs,
            "staleness": 0.0,
            "seconds": max(each.seconds for each in totals),
            "loss": self.progress.loss,
            "updates": sum(each.updates for each in totals)
            * self.strategy.batches(self.place.ranks)
            // self.place.ranks,
            "bytes_sent": sum(each.bytes_sent for each in totals),
            "bytes_received": sum(each.bytes_received for each in totals),
            "faults": 0,
            "times": {
                name: sum(each.get(name, 0.0) for each in times) for name in {name for each in times for name in each}
            },
            "longest_step_s": self.longest_step_s,
        }

    def keep(self, folder: Path, result: Mapping[str, Any]) -> None:
        """Keep the network and its record in this folder."""
        learner = self.learner
        fleet = FleetFacts.model_validate({name: result[name] for name in FleetFacts.model_fields if name in result})
        final = learner.weights(), learner.buffers()
        learner.keep(final, folder, dataset=self.dataset.name, seconds=result["seconds"], fleet=fleet)

    @property
    def stopped(self) -> Conflict:
        """Error of a run that was stopped from a scheduler."""
        return Conflict(
            f"the run was stopped after {self.progress.step:,} of {self.steps:,} steps; with --folder, the same "
            "command continues it"
        )

    def reports(self, run: str, stop: Callable[[], None]) -> RankReports:
        """Reports to a scheduler."""
        host = f"[{self.place.address}]" if ":" in self.place.address else self.place.address
        return RankReports(
            id=run,
            network=self.learner.config,
            strategy=Path(self.options.strategy).stem,
            config=self.strategy.model_dump(mode="json"),
            url=f"http://{host}:{self.place.port}",
            progress=self.progress,
            stop=stop,
        )


def _device(name: str, place: RankPlace) -> torch.device:
    """Raises ProviderUnavailable where torch cannot use it, or has too few."""
    if not (known := re.fullmatch(r"(cpu|cuda)(?::(\d{1,3}))?", name)):
        raise InvalidInput(f"no device {name!r}: there are cpu, cuda and cuda:0, cuda:1, ...")
    if known[1] == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    number = place.local_rank if known[2] is None else int(known[2])
    if number >= count:
        raise ProviderUnavailable(
            f"rank {place.rank} would use CUDA device {number}, and torch finds {count} on this machine: start as many "
            "ranks as there are, or train with --device cpu"
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
