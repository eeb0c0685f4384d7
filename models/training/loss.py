"""The training loss: smoothed labels, a teacher's probabilities, and a fine second classifier where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from models.training.batches import Batch
from models.training.config import TrainConfig

__all__ = ["Labels", "training_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of the whole data set, on the device."""

    fine: Tensor
    """int64 `[N]`."""
    coarse: Tensor
    """int64 `[N]`."""
    membership: Tensor
    """Float `[F, C]`, one where a class belongs to a superclass."""
    teacher: Tensor | None
    """Log-probabilities of the teacher, `[N, 2, F]`: each image and its mirror image. None without a teacher."""


def training_loss(
    output: Tensor, auxiliary: Tensor | None, batch: Batch, labels: Labels, config: TrainConfig
) -> Tensor:
    """Mean loss of a batch.

    `(1 - w) CE(labels) + w T^2 KL(teacher || student)`, both at temperature `T` in the second term (arXiv:1503.02531,
    section 2); the fine second classifier adds the same with weight `config.auxiliary`.

    Args:
        output: logits `[n, C]` or `[n, F]`, by `config.target`.
        auxiliary: fine logits `[n, F]` of the second classifier, or None.
    """
    first = _term(output, config.target, batch, labels, config)
    return first if auxiliary is None else first + config.auxiliary * _term(auxiliary, "fine", batch, labels, config)


def _term(logits: Tensor, target: str, batch: Batch, labels: Labels, config: TrainConfig) -> Tensor:
    logits = logits.float()
    classes = (labels.fine if target == "fine" else labels.coarse)[batch.index]
    smoothing = config.label_smoothing
    hard = F.cross_entropy(logits, classes, label_smoothing=smoothing)
    if config.mixup or config.cutmix:
        others = F.cross_entropy(logits, classes[batch.partner], label_smoothing=smoothing)
        hard = batch.share * hard + (1 - batch.share) * others
    if config.teacher is None or labels.teacher is None:
        return hard
    temperature = config.teacher.temperature
    soft = F.softmax(labels.teacher[batch.index, batch.flipped].float() / temperature, dim=1)
    soft = batch.share * soft + (1 - batch.share) * soft[batch.partner]
    if target == "coarse":
        soft = soft @ labels.membership
    distance = F.kl_div(F.log_softmax(logits / temperature, dim=1), soft, reduction="batchmean")
    return (1 - config.teacher.weight) * hard + config.teacher.weight * temperature**2 * distance
