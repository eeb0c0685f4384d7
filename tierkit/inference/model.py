"""The `Model` protocol: all that the serving side knows about a network.

The Open Inference Protocol server and the batcher use only this protocol. `models.session.OnnxModel` implements it with
ONNX Runtime; anything else that maps named arrays to named arrays along a batch axis can be served as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from tierkit.tensors import Array, TensorSpec

__all__ = ["CORES", "WANTED_UNTIL", "Divisible", "Loadable", "Model", "Steady", "wanted_s"]

WANTED_UNTIL: ContextVar[float] = ContextVar("wanted_until", default=math.inf)
"""Time at which the last budget of the batch under way is spent (`time.perf_counter`); the runner sets it before
`Model.run`."""


CORES: ContextVar[int] = ContextVar("cores", default=0)
"""Number of cores for the batch under way, of a model that is `Divisible`; 0 for all that it has. The runner sets it
before `Model.run`."""


def wanted_s(most_s: float) -> float:
    """Seconds for which a model that waits for something else may wait for the batch under way, at most `most_s`."""
    return min(most_s, max(0.0, WANTED_UNTIL.get() - time.perf_counter()))


@runtime_checkable
class Model(Protocol):
    """A network that is ready to run. `run` is called from one inference thread at a time, unless it is `Divisible`."""

    @property
    def name(self) -> str: ...

    @property
    def platform(self) -> str:
        """Name of the platform, such as "onnxruntime_onnx"."""
        ...

    @property
    def sha256(self) -> str:
        """Digest of the weights file, and the model's version in the protocol: two nodes with the same digest give the
        same answers."""
        ...

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Class names by output name, used by the `classification` extension."""
        ...

    @property
    def parameters(self) -> Mapping[str, str | int | float | bool]:
        """Facts a client may want (temperature, precision, accuracies), shown in the model's metadata."""
        ...

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Map a batch to the outputs asked for.

        Args:
            inputs: arrays by input name, all with the same first axis `n >= 1`, already checked against `inputs`.
            outputs: names from `self.outputs`; only what is named here is computed where that saves work.

        Returns:
            Arrays by output name, first axis `n`.
        """
        ...


@runtime_checkable
class Steady(Protocol):
    """Optional part of `Model`; a model without it is not steady."""

    @property
    def steady(self) -> bool:
        """True if the time of `run` depends only on the batch, and `run` waits for nothing: no device, peer or clock.
        Only then may it run on the event loop."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A model that computes on several cores: one batch on all of them, or one batch on each."""

    @property
    def threads(self) -> int:
        """Number of the cores. `run` is called from this many inference threads at a time, each with its `CORES`."""
        ...


@runtime_checkable
class Loadable(Protocol):
    """Optional part of `Model`: free the memory of its weights while the model is not served."""

    def load(self) -> object:
        """Make it ready to run, if it is not; blocks meanwhile.

        Raises:
            SetupError: its weights cannot be used any more.
        """
        ...

    def unload(self) -> None:
        """Free the memory. The model is not run until it has been loaded again; its properties stay."""
        ...
