"""Emulated compute: a model that takes a given time per image, and gives the answers of the real network.

The real network runs and the rest of the time is slept. So the inference thread is occupied for exactly as long as on
the emulated machine, while the core is free for the other processes of an experiment. A network that is slower here
than there needs its answers beforehand (`Answers`): they are looked up by the digest of each image. If neither is
possible, the run fails once its delay is more than a busy machine explains.
"""

from __future__ import annotations

import hashlib
import logging
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.emulation.waiting import sleep_precisely
from tierkit.errors import SetupError
from tierkit.inference.model import Model
from tierkit.tensors import Array

__all__ = ["LATE", "Answers", "EmulatedModel", "emulate"]

log = logging.getLogger(__name__)

_TOLERANCE = 0.03
_SLACK_S = 0.1
_MOMENT_S = 0.05
"""Allowance for real runs that exceed their emulated time: 3 % of it, and the moments in which a busy system gave the
core to another process or stopped this one. Each moment counts as at most 0.05 s. Such moments only make measurements
slower, never faster. A network that is too slow here uses up the allowance within a few batches.
"""

LATE = "EMULATED COMPUTE is late: a batch took longer than its emulated time, and further ones are not told of"
"""Message in the log when a model first takes longer than it should."""

_DIGEST_BYTES = 16
_MODEL_KEY = "model_sha256"
_DIGESTS_KEY = "image_digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of one model to given images. A tail in the same file is the same model, so its answers to features may
    be among them. They cannot be confused with answers to images.
    """

    model_sha256: str
    rows: Mapping[bytes, int]
    """Row of the outputs by the digest of an image, or of its features."""
    outputs: Mapping[str, Array]
    """All outputs of the model by name; the values of `rows` number their first axis."""

    @classmethod
    def compute(cls, model: Model, images: Array, *, batch: int = 50) -> Answers:
        """Run `model` on `images` (its one input, first axis n), and on the blank image that nodes warm up with."""
        (spec,) = model.inputs
        names = [output.name for output in model.outputs]
        images = np.concatenate([images, np.zeros_like(images[:1])])
        pieces = [model.run({spec.name: images[at : at + batch]}, names) for at in range(0, len(images), batch)]
        return cls(
            model_sha256=model.sha256,
            rows={digest: row for row, digest in enumerate(_digests(images))},
            outputs={name: np.concatenate([piece[name] for piece in pieces]) for name in names},
        )

    def joined(self, other: Answers) -> Answers:
        """Add answers to other inputs of the same model."""
        if other.model_sha256 != self.model_sha256 or other.outputs.keys() != self.outputs.keys():
            raise ValueError("answers of another model")
        have = len(next(iter(self.outputs.values())))
        return Answers(
            model_sha256=self.model_sha256,
            rows={**self.rows, **{digest: have + row for digest, row in other.rows.items()}},
            outputs={name: np.concatenate([array, other.outputs[name]]) for name, array in self.outputs.items()},
        )

    def save(self, path: Path) -> None:
        """Write them to `path` (.npz)."""
        digests = np.frombuffer(b"".join(self.rows), np.uint8).reshape(-1, _DIGEST_BYTES)
        rows = list(self.rows.values())
        arrays = {name: array[rows] for name, array in self.outputs.items()}
        named: dict[str, Any] = {_MODEL_KEY: np.array(self.model_sha256), _DIGESTS_KEY: digests, **arrays}
        np.savez(path, **named)

    @classmethod
    def load(cls, path: Path, models: Sequence[Model]) -> Answers:
        """Read what `save` wrote of one of these models.

        Raises:
            SetupError: the file is not there, not of this kind, or of another model.
        """
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            model, digests = str(arrays.pop(_MODEL_KEY)), arrays.pop(_DIGESTS_KEY)
        except (OSError, EOFError, ValueError, TypeError, KeyError, zipfile.BadZipFile) as exc:
            raise SetupError(f"cannot use the file of answers {path}: {exc}") from exc
        if model not in [known.sha256 for known in models]:
            names = ", ".join(known.name for known in models)
            raise SetupError(f"the file {path} holds the answers of another model than {names}")
        return cls(
            model_sha256=model, rows={digest.tobytes(): row for row, digest in enumerate(digests)}, outputs=arrays
        )

    def look_up(self, images: Array, outputs: Sequence[str]) -> dict[str, Array] | None:
        """The answers for a batch, or None where an image is not among them."""
        rows = [self.rows.get(digest, -1) for digest in _digests(images)]
        return None if -1 in rows else {name: self.outputs[name][rows] for name in outputs}


class EmulatedModel:
    """`model`, taking `ms_per_image` for each image of a batch.

    Args:
        model: gives the answers.
        ms_per_image: milliseconds that an image should take.
        answers: answers of this model, computed beforehand; other images are really run.
        clock: seconds, never backwards.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        model: Model,
        ms_per_image: float,
        answers: Answers | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = sleep_precisely,
    ) -> None:
        self.name, self.platform, self.sha256 = model.name, model.platform, model.sha256
        self.inputs, self.outputs, self.labels = model.inputs, model.outputs, model.labels
        # Tells clients that its speed is not real.
        self.parameters = {**model.parameters, "emulated_ms_per_image": ms_per_image}
        self._model = model
        self._ms_per_image = ms_per_image
        self._answers = answers
        self._emulated_s = 0.0
        self._overrun_s = 0.0
        self._clock = clock
        self._sleep = sleep

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """The model's answers, after exactly the emulated time.

        Raises:
            SetupError: they took longer than that, and this was no moment of a busy machine.
        """
        started = self._clock()
        images = len(inputs[self.inputs[0].name])
        emulated_s = images * self._ms_per_image / 1000
        answers = self._look_up(inputs, outputs)
        if answers is None:
            answers = self._model.run(inputs, outputs)
        real_s = self._clock() - started
        self._emulated_s += emulated_s
        if real_s > emulated_s:
            self._overrun(real_s, emulated_s, images)
        self._sleep(max(0.0, started + emulated_s - self._clock()))
        return answers

    def _overrun(self, real_s: float, emulated_s: float, images: int) -> None:
        """Count a batch that took too long. Only the first one is logged, because tolerated delays do not fail a
        run.
        """
        if not self._overrun_s:
            log.warning(
                LATE,
                extra={
                    "model": self.name,
                    "real_ms": round(real_s * 1000, 1),
                    "emulated_ms": round(emulated_s * 1000, 1),
                },
            )
        self._overrun_s += min(_MOMENT_S, real_s - emulated_s)
        if self._overrun_s > self._emulated_s * _TOLERANCE + _SLACK_S:
            raise SetupError(
                f"the model '{self.name}' took {real_s * 1000:.1f} ms for {images} images, which is longer than the "
                f"emulated {emulated_s * 1000:.1f} ms: free the machine, or compute its answers beforehand "
                "(--emulate-answers)"
            )

    def _look_up(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array] | None:
        return None if self._answers is None else self._answers.look_up(inputs[self.inputs[0].name], outputs)


def emulate(models: Sequence[Model], ms_per_image: float, answers: Answers | None) -> list[Model]:
    """Return the models with an emulated speed, and log a warning.

    Args:
        answers: answers of one of them, or None.
    """

    def known(model: Model) -> Answers | None:
        return answers if answers and answers.model_sha256 == model.sha256 else None

    log.warning(
        "EMULATED COMPUTE is active: the speed of the models is not real",
        extra={
            "ms_per_image": ms_per_image,
            "answers": "computed beforehand" if any(map(known, models)) else "real run",
        },
    )
    return [EmulatedModel(model, ms_per_image, known(model)) for model in models]


def _digests(images: Array) -> Iterable[bytes]:
    return (hashlib.blake2b(image.tobytes(), digest_size=_DIGEST_BYTES).digest() for image in images)
