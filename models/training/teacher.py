"""A teacher's probabilities for every training image, computed once and kept.

Each image is seen as it is and mirrored; a student's random crop gets the answer for the whole image. That costs two
passes of the teacher over the data in all, instead of one per epoch.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.atomic import write_atomically
from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.checkpoint import load_checkpoint
from models.training.loop import averaged_network, predict
from tierkit.errors import DataError, WeightsError

__all__ = ["teacher_probabilities"]

_PART = 2_000  # images between two progress reports


def teacher_probabilities(
    runs: Sequence[Path],
    data: ImageSet,
    hierarchy: Hierarchy,
    *,
    cache: Path,
    device: str = "cpu",
    report: Callable[[float], None] = lambda _: None,
) -> Tensor:
    """Log of the runs' mean probabilities, float16 `[N, 2, F]`: image and mirror image.

    Args:
        runs: run folders of finished fine networks.
        cache: file that keeps the result; it is used again while the images and the teachers' checkpoints are the same.
        report: told the finished share, 0 to 1.

    Raises:
        WeightsError: a run folder has no checkpoint, a damaged one, or one for another hierarchy.
        DataError: a teacher gives no fine probabilities.
    """
    digest = hashlib.sha256(data.digest().encode())
    for run in runs:
        path = run / "checkpoint.pt"
        if not path.is_file():
            raise WeightsError(f"the teacher {run.name!r} has not been trained: no {path}")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    if (kept := _cached(cache, digest.hexdigest())) is not None:
        return kept
    total = torch.zeros(len(data), 2, len(hierarchy.fine))
    for number, run in enumerate(runs):
        checkpoint = load_checkpoint(run / "checkpoint.pt", device=device)
        assert checkpoint is not None
        network, config, known = averaged_network(checkpoint, hierarchy)
        if config.target != "fine":
            raise DataError(f"the teacher {run.name!r} answers {config.target} labels; a teacher needs fine ones")
        network.to(torch.device(device), memory_format=torch.channels_last)
        for start in range(0, len(data), _PART):
            images = data.images[start : start + _PART]
            for view, seen in enumerate((images, np.ascontiguousarray(images[:, :, ::-1]))):
                logits = torch.from_numpy(predict(network, seen, known, config, torch.device(device)))
                total[start : start + _PART, view] += logits.softmax(1) / len(runs)
            report((number + min(1.0, (start + _PART) / len(data))) / len(runs))
    answer = total.clamp_min(1e-7).log().half()
    buffer = io.BytesIO()
    torch.save({"sha256": digest.hexdigest(), "log_probabilities": answer}, buffer)
    write_atomically(cache, buffer.getvalue())
    return answer


def _cached(cache: Path, digest: str) -> Tensor | None:
    if not cache.is_file():
        return None
    content = torch.load(cache, weights_only=True)
    kept: Tensor = content["log_probabilities"]
    return kept if content["sha256"] == digest else None
