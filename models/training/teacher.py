"""Knowledge distillation: the teachers' probabilities for every training image, computed once and kept.

Each image is seen as it is and mirrored; a student's random crop gets the answer for the whole image. That costs two
passes of the teacher over the data in all, instead of one per epoch. The file is the one of `models.training.answers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from models.data import ImageSet
from models.hierarchy import Hierarchy
from models.training.answers import AnswerFacts, Teacher, TeacherAnswers, ask, read_answers, write_answers
from models.training.checkpoint import CHECKPOINT, load_checkpoint, not_trained
from models.training.learner import averaged_network, predict
from tierkit.atomic import made_folder
from tierkit.errors import DataError

__all__ = ["answers_of_runs", "kept_answers", "save_again", "teacher_probabilities"]


def teacher_probabilities(
    runs: Sequence[Path], data: ImageSet, hierarchy: Hierarchy, *, cache: Path, device: str = "cpu"
) -> Tensor:
    """Log probabilities `[N, 2, F]` of the networks of these run folders; see `kept_answers`.

    Raises:
        WeightsError: a run folder has no checkpoint, a damaged one, or one for another hierarchy.
        DataError: a teacher gives no fine probabilities.
    """
    facts, teachers = answers_of_runs(runs, data, hierarchy, device)
    return torch.from_numpy(kept_answers(teachers, data, hierarchy, facts, cache).log_probabilities)


def answers_of_runs(
    runs: Sequence[Path], data: ImageSet, hierarchy: Hierarchy, device: str = "cpu"
) -> tuple[AnswerFacts, Iterable[Teacher]]:
    """Facts of the answers of run folders, and their networks, each loaded when it is asked for.

    Raises:
        WeightsError: a run folder has no checkpoint. A teacher that is damaged raises later.
    """
    digest = hashlib.sha256()
    for run in runs:
        path = run / CHECKPOINT
        if not path.is_file():
            raise not_trained(run)
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    facts = AnswerFacts(
        data_sha256=data.digest(),
        hierarchy=hierarchy.name,
        teachers=tuple(run.name for run in runs),
        teachers_sha256=digest.hexdigest(),
    )
    return facts, (_teacher(run, hierarchy, torch.device(device)) for run in runs)


def _teacher(run: Path, hierarchy: Hierarchy, device: torch.device) -> Teacher:
    network, config, known = averaged_network(load_checkpoint(run, hierarchy, str(device)))
    if config.target != "fine":
        raise DataError(f"the teacher {run.name!r} answers {config.target} labels; a teacher needs fine ones")
    network.to(device, memory_format=torch.channels_last)
    return lambda images: predict(network, images, known, config, device)


def kept_answers(
    teachers: Iterable[Teacher], data: ImageSet, hierarchy: Hierarchy, facts: AnswerFacts, cache: Path
) -> TeacherAnswers:
    """Answers of teachers to each image and its mirror image.

    Args:
        cache: file that keeps the result; it is used again if its facts are the same.
    """
    with suppress(DataError):
        kept = read_answers(cache, facts.data_sha256, hierarchy)
        if kept.facts == facts:
            return kept
    answers = TeacherAnswers(facts=facts, log_probabilities=ask(teachers, data, hierarchy))
    made_folder(cache.parent)
    write_answers(cache, answers)
    return answers


def save_again(path: Path, answers: TeacherAnswers, hierarchy: Hierarchy, top: int) -> TeacherAnswers:
    """Replace a file of answers by one with the likeliest classes only; return what that file teaches.

    Raises:
        InvalidInput: `top` is not below the number of classes.
        SetupError: the file could not be written.
    """
    write_answers(path, answers, top=top)
    return read_answers(path, answers.facts.data_sha256, hierarchy)
