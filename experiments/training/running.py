"""The runs of `terrace experiment training`, and what they take the times of machines from. Needs torch."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import tomli_w
import torch

from experiments.processes import serving
from experiments.training.cases import CHEATERS, LINK_BYTES_PER_S, LINK_DELAY_S, Case
from experiments.training.predicted import predicted
from experiments.training.ranks import RankMachines, simulate_ranks
from experiments.training.second_order import second_order
from experiments.training.simulation import Machines, run_simulation
from experiments.training.volunteers import volunteers
from models.dataset import Dataset
from models.training.config import CONFIGS, NetworkConfig, TrainConfig, find_config
from models.training.data import TrainingData
from models.training.networks import build_network, count_parameters
from tierkit.errors import DataError, InvalidInput, ServiceFailed
from tierkit.http.client import open_client
from training.learner import FlatLearner
from training.payloads import packed_bytes
from training.strategies.config import BatchConfig, ExchangeConfig, TournamentConfig
from training.units import Sends
from training.virtual import Link
from training.worker.connection import HostConnection

__all__ = ["NETWORK", "Bench", "serve_s"]

NETWORK = "mnist-64-64"

SPREAD = 0.1
"""Spread of a worker's steps: they take from 0.9 to 1.1 of their mean."""
_STEPS, _FEW_STEPS, _UNMEASURED = 200, 30, 20
_CLIENTS = 4
_HELD_OUT = 120
"""Reciprocal of the share of images that is held out: 500 of each class of all 60,000."""
_FEW, _SMALL_BATCH = 7_000, 32
"""Images that the networks of single lines train on, and their batches."""


class Bench:
    """The images and the network, and the time of a step on this machine.

    Args:
        images: number of training images, including the held-out ones; the first of the data set are taken.
        folder: folder in which it makes files.

    Raises:
        DataError: MNIST is missing, or has fewer images.
    """

    def __init__(self, data: Path | None, images: int, folder: Path) -> None:
        self._dataset = Dataset.open("mnist", data)
        whole = self._dataset.read("train")
        if len(whole) < images:
            raise DataError(f"MNIST has {len(whole):,} training images here, fewer than {images:,}")
        self._all_images = len(whole)
        self._images, self._test = whole.take(np.arange(images)), self._dataset.read("test")
        text = (CONFIGS / f"{NETWORK}.toml").read_text(encoding="utf-8")
        # Fewer images are held out where there are fewer in all.
        file = folder / f"{NETWORK}.toml"
        text = text.replace("held_out_per_class = 500", f"held_out_per_class = {images // _HELD_OUT}")
        file.write_text(text)
        self._still_file = folder / "without-dropout" / file.name
        """The network for L-BFGS, which compares values of one function."""
        self._still_file.parent.mkdir(exist_ok=True)
        self._still_file.write_text(text.replace("dropout = 0.1", "dropout = 0.0"))
        self._config, self._still = (find_config(NETWORK, each) for each in (file, self._still_file))
        self.host_flags = ["--network", str(file), *([] if data is None else ["--data", str(data.absolute())])]
        """Flags of a host that trains it."""
        self._folder = folder
        self._data: dict[int, TrainingData] = {}
        torch.set_num_threads(1)
        learner = FlatLearner(self._config, self._drawn(0))
        self._size_bytes = packed_bytes(len(learner.weights()), len(learner.buffers()), "fp32")
        """Bytes of the weights, and of an update, in the form that is sent."""
        self.step_s: dict[Sends, float] = {
            sends: _step_s(FlatLearner(self._config, self._drawn(0)), sends) for sends in get_args(Sends)
        }
        """Processor seconds, median."""

    def run(
        self, case: Case, seed: int, *, serve_s: float, faults: int, watch: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Run a line once and return the results."""
        images = self._images, self._test, self._dataset.hierarchy
        if case.table == "second-order":
            return second_order(case, images, seed, watch)
        if case.table == "volunteers":
            return volunteers(case, images, seed, watch)
        if case.table == "predicted":
            return predicted(case, images, seed, watch, partial(_step_s, sends="gradient"))
        step_s = case.step_s or self.step_s[case.strategy.sends]
        if case.ranks:
            return self._run_ranks(case, seed, step_s, watch)
        assert not isinstance(case.strategy, ExchangeConfig)
        strategy, total = case.strategy, case.passes(case.epochs) * self._drawn(seed).batches.steps_per_epoch

        # Of four or of ten.
        cheaters = max(1, round(CHEATERS * case.workers / 10))

        def simulated(epochs: int, *, gradients: bool) -> dict[str, Any]:
            changes = {"epochs": case.passes(epochs), "peak_rate": case.peak_rate or self._config.peak_rate}
            network = (self._still if isinstance(strategy, BatchConfig) else self._config).network
            config = self._of(seed, **changes, network=network)
            updates = -(-config.epochs * self._drawn(seed).batches.steps_per_epoch // case.strategy.period)
            hit = min(faults, updates // 2) if case.faulty else 0
            found = run_simulation(
                config,
                strategy,
                (self._drawn(seed), self._test),
                Machines(
                    workers=case.workers,
                    slow=case.slow,
                    step_s=step_s,
                    serve_s=serve_s,
                    spread=SPREAD,
                    link=Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S),
                    faults=hit,
                    cheat=case.cheat or "sign-flip",
                    cheaters=cheaters if case.cheat else 0,
                    leave_after_s=[total * step_s / case.workers / 2] if case.lost else [],
                    stays_s=case.stays_s,
                    gradients=gradients,
                ),
                lambda done, steps, now: watch(),
            )
            return {**found, "epochs": epochs, "formula_updates": updates}

        timed = simulated(case.timed_epochs, gradients=False) if case.timed_epochs else None
        try:
            found = simulated(case.epochs, gradients=True) if case.learns else timed
        except InvalidInput:  # the weights have no finite loss any more
            if case.table != "strategies" or case.cheat is None:
                raise
            found = {**simulated(case.epochs, gradients=False), "diverged": True}
        assert found is not None
        clock = timed or found
        if case.scaling == "weak":  # the mean over the workers, as the source has it
            epoch_seconds = clock["worker_step_s"] * self._drawn(seed).batches.steps_per_epoch
        else:
            epoch_seconds = clock["virtual_seconds"] / clock["epochs"]
        return {
            **found,
            "epoch_seconds": epoch_seconds,
            "timed_epochs": clock["epochs"],
            "size_bytes": self._size_bytes,
        }

    async def real_seconds(self, case: Case, seed: int) -> float | None:
        """Seconds of the same run with processes on this machine; None for a run that `terrace train run` cannot start.

        Raises:
            ServiceFailed: the run fails.
        """
        if case.name == "tournament, at a host" or case.by_processes:
            return None
        still = isinstance(case.strategy, BatchConfig)
        network = str(self._still_file) if still else self.host_flags[1]
        if case.network:
            network = self._written(self._few(case, seed, self._all_images))
        found = await self._run_here(case, network, {"--epochs": case.epochs, "--seed": seed})
        return float(found["seconds"])

    async def run_processes(self, case: Case, seed: int) -> dict[str, Any]:
        """A run with processes on this machine; its rule has no virtual time.

        Raises:
            ServiceFailed: the run fails.
        """
        if case.network:
            config = self._few(case, seed, self._all_images)
        else:
            held_out = (self._all_images - len(self._images)) // 10 + self._config.held_out_per_class
            changes = {"epochs": case.epochs, "held_out_per_class": held_out}
            config = self._of(seed, network=self._still.network, **changes)
        network = build_network(config.network.kind, len(self._dataset.hierarchy.fine), config.network.options)
        found = await self._run_here(case, self._written(config), {})
        steps = found["updates"] // case.workers
        return {
            **found,
            "strategy": case.name,
            "real_seconds": found["seconds"],
            "cheat": None,
            "virtual_seconds": None,
            "epoch_seconds": None,
            "size_bytes": self._size_bytes,
            "step_s": self.step_s["gradient"],
            "step_bytes": found["bytes_sent"] / found["updates"],
            "allreduce_bytes": steps * 2 * (case.workers - 1) * 4 * count_parameters(network),
        }

    async def _run_here(self, case: Case, network: str, given: Mapping[str, object]) -> dict[str, Any]:
        """Result of `terrace train run` with the strategy and the workers of a line."""
        strategy = self._folder / "strategy.toml"
        kind = case.strategy.model_dump(include={"family", "rule"})
        chosen = case.strategy.model_dump(mode="json", exclude_unset=True)  # others may be for other rules
        strategy.write_text(tomli_w.dumps({**kind, **chosen}))
        given = {"--strategy": strategy, "--workers": case.workers, **given}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "terrace", "train", "run", network, *self.host_flags[2:]),
            *(str(word) for flag in given.items() for word in flag),
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, error = await process.communicate()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        if process.returncode:
            raise ServiceFailed(f"{case.name}: {error.decode()[-500:]}", code=process.returncode)
        found: dict[str, Any] = json.loads(out)
        return found

    def _run_ranks(self, case: Case, seed: int, step_s: float, watch: Callable[[], None]) -> dict[str, Any]:
        assert isinstance(case.strategy, ExchangeConfig | TournamentConfig)
        config, drawn = self._of(seed, epochs=case.epochs), self._drawn(seed)
        if case.network:
            config = self._few(case, seed, len(self._images))
            drawn = TrainingData(config, self._images, self._dataset.hierarchy)
            step_s = _step_s(FlatLearner(config, drawn), case.strategy.sends, _FEW_STEPS)
        found = simulate_ranks(
            config,
            case.strategy,
            (drawn, self._test),
            RankMachines(
                ranks=case.workers,
                slow=case.slow,
                step_s=step_s,
                link=Link(delay_s=LINK_DELAY_S, bytes_per_s=LINK_BYTES_PER_S),
                cheats=case.cheat is not None,
            ),
            lambda done, steps, now: watch(),
        )
        return {
            **found,
            "cheat": case.cheat,
            "cheaters": 0 if case.cheat is None else 1,
            "serve_s": 0.0,
            "epoch_seconds": found["virtual_seconds"] / case.epochs,
            "timed_epochs": case.epochs,
            "size_bytes": self._size_bytes,
            "twice": 0,
            "missing": 0,
        }

    def _written(self, config: TrainConfig) -> str:
        """File of a configuration."""
        file = self._folder / "processes" / f"{config.name}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
        return str(file)

    def _few(self, case: Case, seed: int, images: int) -> TrainConfig:
        """The network of a line, trained on few of these images."""
        return self._of(
            seed,
            epochs=case.epochs,
            name=case.network["kind"],
            network=NetworkConfig.model_validate(case.network),
            peak_rate=case.peak_rate or self._config.peak_rate,
            batch_size=_SMALL_BATCH,
            held_out_per_class=max(1, (images - _FEW) // 10),
        )

    def _of(self, seed: int, **changes: Any) -> TrainConfig:
        return self._config.model_copy(update={"seed": seed, **changes})

    def _drawn(self, seed: int) -> TrainingData:
        # Batches of this network depend on nothing else of a configuration.
        if seed not in self._data:
            self._data[seed] = TrainingData(self._of(seed), self._images, self._dataset.hierarchy)
        return self._data[seed]


def _step_s(learner: FlatLearner, sends: Sends, steps: int = _STEPS) -> float:
    """Processor seconds of a step, median."""

    def once(step: int) -> float:
        began = time.thread_time()
        learner.compute(range(step, step + 1), sends)
        return time.thread_time() - began

    return statistics.median([once(step % learner.steps) for step in range(_UNMEASURED + steps)][_UNMEASURED:])


async def serve_s(strategy: str, host_flags: Sequence[str], *, exchanges: int, core: int) -> float:
    """Processor seconds that a real host takes for a request: a fetch of the weights, or an update in fp32.

    Clients that compute nothing keep the host busy; the result is the mean of both kinds of request.

    Args:
        strategy: A name, or a file.
        host_flags: The network, and where its images are.
        exchanges: Updates, approximately.
        core: Core of the host.
    """
    flags = ["--strategy", strategy, "--workers", str(_CLIENTS), *host_flags]
    with serving(["training.host", *flags], core=core) as (url, server):
        each = -(-exchanges // _CLIENTS)
        async with open_client() as http:
            workers = [HostConnection(f"w{number}", f"{number:016x}", http, url=url) for number in range(_CLIENTS)]
            await asyncio.gather(*(_exchange(worker, 1 + each // 10) for worker in workers))  # until all is compiled
            before = server.cpu_s()
            updates = sum(await asyncio.gather(*(_exchange(worker, each) for worker in workers)))
            return (server.cpu_s() - before) / (2 * max(1, updates))


async def _exchange(worker: HostConnection, times: int) -> int:
    """Fetch weights and bring an update that changes little, `times` times. Return the number of updates before the run
    ended.
    """
    spec = await worker.spec()
    await worker.join(spec.data_sha256)
    chance = np.random.default_rng(0)
    values = (1e-6 * chance.standard_normal(spec.values)).astype(np.float32)
    buffers = np.zeros(spec.buffers, np.float32)
    done = 0
    while done < times:
        granted = await worker.lease()
        if granted is None:
            break
        if granted == "none yet":
            continue
        lease, _ = granted
        await worker.update(worker.head(lease, 0.0), worker.packed(values, buffers, spec))
        done += 1
    return done
