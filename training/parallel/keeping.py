"""Checkpoints of ranks: each keeps its own two newest, so that there is a step that all of them have."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tierkit.atomic import made_folder, write_atomically
from tierkit.errors import SetupError, WeightsError
from training.learner import FlatLearner
from training.units import Flat

__all__ = ["Checkpoints", "Totals"]

log = logging.getLogger(__name__)

_NEWEST = 2


@dataclass(slots=True)
class Totals:
    """Counted by one rank since the run began."""

    run: str = field(default_factory=lambda: secrets.token_hex(16))
    """Id under which a scheduler knows the run."""
    updates: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    times: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    """Mean of the last steps."""


class Checkpoints:
    """The checkpoints of one rank in the folder of a run; nothing is kept without a folder.

    Args:
        facts: facts of the run; a folder with other facts is refused.
    """

    def __init__(self, folder: Path | None, rank: int, facts: Mapping[str, object]) -> None:
        self._folder, self._rank, self._facts = folder, rank, dict(facts)
        if folder is not None:
            made_folder(folder)

    def steps(self) -> list[int]:
        """Return the steps from which this rank can continue. Damaged checkpoints are left out.

        Raises:
            SetupError: the folder holds another run.
            WeightsError: all that this rank has are damaged.
        """
        found, damaged = [], None
        for step in self._steps():
            try:
                self._read(step, self._rank)
                found.append(step)
            except WeightsError as error:
                log.warning("%s", error)
                damaged = error
        if damaged is not None and not found:
            raise damaged
        return found

    def newest(self) -> tuple[int, int]:
        """The newest step that any rank has kept here, and that rank; without any, step 0 of this rank.

        Raises:
            SetupError: the folder holds another run.
        """
        paths = [] if self._folder is None else self._folder.glob("rank-*-*.safetensors")
        found = [(int(step), int(rank)) for _, rank, step in (path.stem.split("-") for path in paths)]
        for step, rank in sorted(found, reverse=True):
            try:
                self._read(step, rank)
                return step, rank
            except WeightsError as error:
                log.warning("%s", error)
        return 0, self._rank

    def save(self, step: int, learner: FlatLearner, totals: Totals, figures: Mapping[str, float]) -> None:
        """Keep the state before a step.

        Args:
            figures: figures of the rule; the learner does not hold them.
        """
        if self._folder is None:
            return
        said = {
            "facts": json.dumps(self._facts),
            "totals": json.dumps(asdict(totals)),
            "figures": json.dumps({**figures}),
        }
        vectors = {"joined": learner.joined(), "momentum": learner.momentum()}
        said["sha256"] = _digest(self._rank, step, *vectors.values())
        path = self._path(step)
        try:
            write_atomically(path, lambda file: save_file(vectors, file.name, said))
        except SafetensorError as error:
            raise SetupError(f"cannot write {path}: {error}") from error
        for old in self._steps()[:-_NEWEST]:
            self._path(old).unlink(missing_ok=True)

    def load(self, step: int, learner: FlatLearner, *, rank: int | None = None) -> tuple[Totals, dict[str, float]]:
        """Continue from a step. Return the totals until then, and the figures of the rule.

        Args:
            rank: rank that has kept it. Default: this one.

        Raises:
            SetupError: the folder holds another run.
            WeightsError: the file is damaged.
        """
        joined, momentum, totals, figures = self._read(step, self._rank if rank is None else rank)
        learner.load_joined(joined)
        learner.load_momentum(momentum)
        return Totals(**totals), figures

    def _read(self, step: int, rank: int) -> tuple[Flat, Flat, dict[str, Any], dict[str, float]]:
        """Weights with buffers, momentum, totals and figures."""
        path = self._path(step, rank)
        try:
            with safe_open(path, framework="numpy") as file:
                said = file.metadata() or {}
                facts, totals, figures = (json.loads(said[name]) for name in ("facts", "totals", "figures"))
                joined, momentum = (_vector(file.get_tensor(name)) for name in ("joined", "momentum"))
            if said["sha256"] != _digest(rank, step, joined, momentum):
                raise ValueError("the content has another digest")
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise WeightsError(f"{path} is damaged: bring it back from a copy, or remove it") from error
        if different := [name for name, value in self._facts.items() if facts.get(name) != value]:
            raise SetupError(
                f"{self._folder} holds another run, with another value of {', '.join(different)}: give the same as "
                "before, or another --folder"
            )
        return joined, momentum, totals, figures

    def _steps(self) -> list[int]:
        return sorted(int(path.stem.rpartition("-")[2]) for path in self._paths())

    def _path(self, step: int, rank: int | None = None) -> Path:
        assert self._folder is not None
        return self._folder / f"rank-{self._rank if rank is None else rank}-{step}.safetensors"

    def _paths(self) -> list[Path]:
        return [] if self._folder is None else list(self._folder.glob(f"rank-{self._rank}-*.safetensors"))


def _vector(values: np.ndarray) -> Flat:
    return np.ascontiguousarray(values, np.float32)


def _digest(rank: int, step: int, *vectors: Flat) -> str:
    found = hashlib.sha256(f"{rank} {step} ".encode())
    for each in vectors:
        found.update(each.data)
    return found.hexdigest()
