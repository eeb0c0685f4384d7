"""Knowledge distillation: the teachers' probabilities for every training image, computed once and kept.

Each image is seen as it is and mirrored; a student's random crop gets the answer for the whole image. That costs two
passes of the teacher over the data in all, instead of one per epoch.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.session import softmax
from models.training.checkpoint import CHECKPOINT, load_checkpoint, not_trained
from models.training.learner import averaged_network, predict
from tierkit.atomic import write_atomically
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["Teacher", "kept_answers", "teacher_probabilities"]

Teacher = Callable[[Array], Array]
"""Logits, FP32 `[n, F]`, of UINT8 images `[n, h, w, 3]`."""


def teacher_probabilities(
    runs: Sequence[Path], data: ImageSet, hierarchy: Hierarchy, *, cache: Path, device: str = "cpu"
) -> Tensor:
    """What the networks of these run folders answer; see `kept_answers`.

    Raises:
        WeightsError: a run folder has no checkpoint, a damaged one, or one for another hierarchy.
        DataError: a teacher gives no fine probabilities.
    """
    digest = hashlib.sha256(data.digest().encode())
    for run in runs:
        path = run / CHECKPOINT
        if not path.is_file():
            raise not_trained(run)
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return kept_answers(
        (_teacher(run, hierarchy, torch.device(device)) for run in runs), data, digest.hexdigest(), cache
    )


def _teacher(run: Path, hierarchy: Hierarchy, device: torch.device) -> Teacher:
    network, config, known = averaged_network(load_checkpoint(run, hierarchy, str(device)))
    if config.target != "fine":
        raise DataError(f"the teacher {run.name!r} answers {config.target} labels; a teacher needs fine ones")
    network.to(device, memory_format=torch.channels_last)
    return lambda images: predict(network, images, known, config, device)


def kept_answers(teachers: Iterable[Teacher], data: ImageSet, key: str, cache: Path) -> Tensor:
    """Log of the teachers' mean probabilities, float16 `[N, 2, F]`: each image and its mirror image.

    Args:
        key: digest of the images and of the teachers.
        cache: file that keeps the result; it is used again while the key is the same.
    """
    if cache.is_file():
        content = torch.load(cache, weights_only=True)
        if content["sha256"] == key:
            kept: Tensor = content["log_probabilities"]
            return kept
    views = data.images, np.ascontiguousarray(data.images[:, :, ::-1])
    answers = [np.stack([softmax(teacher(view)) for view in views], axis=1) for teacher in teachers]
    answer = torch.from_numpy(np.mean(answers, axis=0)).clamp_min(1e-7).log().half()
    buffer = io.BytesIO()
    torch.save({"sha256": key, "log_probabilities": answer}, buffer)
    write_atomically(cache, buffer.getvalue())
    return answer
