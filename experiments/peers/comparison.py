"""The whole comparison: rounds over contenders, so that a slow minute of the machine hits all of them; then records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.peers.bare import bare_loop
from experiments.peers.contenders import Contender
from experiments.peers.environments import installed_version, interpreter_of
from experiments.peers.measuring import Cores, environment_of, measure_once
from experiments.peers.rows import Measurement, Network, Row, Timing, derive
from experiments.peers.table import EXPERIMENT
from experiments.record import RunRecord
from models.manifest import ModelEntry
from models.session import load_model, verify_file
from tierkit.errors import TerraceError
from tierkit.inference.model import Array

__all__ = ["Announce", "Comparison", "compare", "install"]

Announce = Callable[[str], None]

_NO_PORT = 0  # the bare loop listens nowhere


class Comparison:
    """One network, its rows and contenders, and what was measured of them so far."""

    def __init__(self, entry: ModelEntry, folder: Path, contenders: Sequence[Contender], rows: Sequence[Row]) -> None:
        self.network = Network(
            name=entry.name,
            folder=str(folder.resolve()),
            file=verify_file(entry, folder).name,
            sha256=entry.sha256,
            shape=entry.input_shape,
        )
        self.contenders = contenders
        self.rows = rows
        self.measurements: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
        """By name of the contender."""
        self.failures: dict[str, str] = {}
        """Why a contender is not measured, or no further, by its name."""
        self._model = load_model(entry, folder)

    def expected(self, images: Array) -> Array:
        """The right answer: logits of the network for a batch."""
        return self._model.run({"images": images}, ["logits"])["logits"]

    def records(self, timing: Timing, cores: Cores, pythons: Mapping[str, Path]) -> list[RunRecord]:
        """One record for each contender that was reached, also for those that could not be measured."""
        return [
            self._record(contender, timing, cores, pythons.get(contender.name))
            for contender in self.contenders
            if self.measurements[contender.name] or contender.name in self.failures
        ]

    def _record(self, contender: Contender, timing: Timing, cores: Cores, python: Path | None) -> RunRecord:
        measurements = self.measurements[contender.name]
        samples, results = derive(measurements)
        failures = {
            key: reason
            for one in measurements
            for key, reason in one.failures.items()
            if f"{key}.p50_ms" not in samples
        }
        more: dict[str, Any] = {"failures": failures} if failures else {}
        if contender.name in self.failures:
            more["unmeasured" if not measurements else "stopped"] = self.failures[contender.name]
        return RunRecord(
            experiment=f"{EXPERIMENT}-{contender.name}-{self.network.name}",
            config={
                "contender": contender.name,
                "title": contender.title,
                "version": installed_version(python, contender.distribution) if python else "not installed",
                "protocol": contender.protocol,
                "batches": contender.batches,
                "network": self.network.name,
                "sha256": self.network.sha256,
                "rows": [asdict(row) for row in self.rows],
                "timing": asdict(timing),
                "cores": asdict(cores),
            },
            samples=samples,
            results={**results, **more},
            seed=0,
        )


def install(
    contenders: Sequence[Contender], folder: Path, announce: Announce
) -> tuple[dict[str, Path], dict[str, str]]:
    """See that every contender has its environment; interpreters and reasons for their lack, by name."""
    pythons: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        announce(f"{contender.title}: environment")
        try:
            pythons[contender.name] = interpreter_of(contender, folder)
        except TerraceError as exc:
            failures[contender.name] = str(exc)
    return pythons, failures


def compare(
    comparisons: Sequence[Comparison], timing: Timing, cores: Cores, pythons: Mapping[str, Path], announce: Announce
) -> None:
    """Measure all rounds into the comparisons. A contender that fails once is not started again."""
    with ExitStack() as stack:
        loops = [
            stack.enter_context(bare_loop(environment_of(comparison.network, _NO_PORT), core=cores.server))
            for comparison in comparisons
        ]
        for number in range(timing.rounds):
            for comparison, loop in zip(comparisons, loops, strict=True):
                for contender in comparison.contenders:
                    if contender.name in comparison.failures:
                        continue
                    where = f"round {number + 1} of {timing.rounds}, {comparison.network.name}, {contender.title}"
                    try:
                        comparison.measurements[contender.name].append(
                            measure_once(
                                contender,
                                pythons[contender.name],
                                comparison.network,
                                comparison.rows,
                                timing,
                                cores=cores,
                                bare=loop,
                                expected=comparison.expected,
                                announce=lambda what, where=where: announce(f"{where}: {what}"),  # type: ignore[misc]  # a default in a lambda
                            )
                        )
                    except TerraceError as exc:
                        comparison.failures[contender.name] = str(exc)
                        announce(f"{where}: {exc}")
