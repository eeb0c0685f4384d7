"""The networks' own learner with flat weights. Workers compute their steps with it, and the host measures its
weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from models.data import ImageSet
from models.dataset import Dataset
from models.training.answers import TeacherAnswers, read_answers
from models.training.checkpoint import Checkpoint, save_checkpoint
from models.training.config import TrainConfig
from models.training.data import TrainingData
from models.training.learner import BatchAnswers, NetworkLearner, groups_of, load_weights, predict, set_rate
from models.training.networks import running_statistics
from models.training.record import FleetFacts, TrainingRecord, make_record, save_record
from tierkit.errors import InvalidAnswer, InvalidInput, WeightsError
from training.measuring import free_bytes
from training.messages import RunSpec
from training.strategies.config import StrategyConfig
from training.units import Computed, Flat, Sends

__all__ = ["ADAMW_DECAY", "FlatLearner", "foreign", "learner_of", "read_images", "read_teacher"]

ADAMW_DECAY = 0.1
"""Decoupled weight decay of AdamW steps (arXiv:2311.08105); biases and normalisation have none."""
_CALIBRATION_BATCHES = 20


class _FrozenNorm(torch.nn.BatchNorm2d):
    """Batch normalisation by running statistics, in training too."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


class FlatLearner:
    """A network whose weights come from outside, as one vector, and whose steps can be computed in any order.

    The same weights, buffers and steps give the same result, bit for bit on one machine, unless the strategy lets a
    worker keep the momentum of its steps from unit to unit.

    Args:
        strategy: defines the local steps; by default SGD whose momentum is not kept.
        network: replaces the network of `config`; see `NetworkLearner`. The vectors hold its parameters that require a
            gradient.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        *,
        strategy: StrategyConfig | None = None,
        network: torch.nn.Module | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.steps = config.all_epochs * data.batches.steps_per_epoch
        self._learner = NetworkLearner(config, data, network=network)
        whole = self._learner.network
        self._parameters = [each for each in whole.parameters() if each.requires_grad]
        # Counters of batches are whole numbers, and matter to nothing that is computed here.
        self._buffers = running_statistics(whole)
        self._inner, self._keeps = ("sgd", False) if strategy is None else (strategy.inner, strategy.keeps_moments)
        self._answered: BatchAnswers | None = None
        self.moments: Any = None
        """State that SGD or AdamW has from the steps so far. A caller that computes for several workers exchanges
        it.
        """

    @property
    def trained_network(self) -> torch.nn.Module:
        """The network with all that trains, such as a second classifier; parameters are in the order of the vectors."""
        return self._learner.network

    @property
    def batch_size(self) -> int:
        """Images of a step."""
        return min(self.config.batch_size, self.data.train_images)

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers in the weights, and in the buffers."""
        return sum(each.numel() for each in self._parameters), sum(each.numel() for each in self._buffers)

    def step_bytes(self) -> int:
        """Approximate bytes that a step keeps in memory in addition to the weights: the outputs of the layers for a
        batch, in fp32.
        """
        numbers, network = 0, self._learner.network

        def count(_layer: torch.nn.Module, _given: Any, found: Any) -> None:
            nonlocal numbers
            numbers += found.numel() if isinstance(found, Tensor) else 0

        hooks = [each.register_forward_hook(count) for each in network.modules() if not any(each.children())]
        height, width, colours = self.data.held_out.images.shape[1:]
        with torch.inference_mode():
            network.eval()(torch.zeros(1, colours, height, width, device=self.data.device))
        for each in hooks:
            each.remove()
        return 4 * numbers * self.batch_size

    @property
    def network(self) -> Any:
        """The network that answers after training, without a second classifier."""
        return self._learner.network.network

    def begin_with(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of a served network, by the names of its tensors. A second classifier keeps its own.

        Raises:
            WeightsError: they are of another network.
        """
        load_weights(self.network, weights, f"the weights that {self.config.name!r} is to start from")

    def hold(self, parts: Iterable[torch.nn.Module]) -> None:
        """Take weights, buffers, gradients and momentum from these parts of the network only."""
        held = torch.nn.ModuleList(parts)
        self._parameters = list(held.parameters())
        self._buffers = running_statistics(held)

    def freeze(self) -> None:
        """Measure the running statistics over the first batch. From then on training does not change them."""
        self._calibrate(1)
        for layer in self._normalisations():
            layer.__class__ = _FrozenNorm

    def weights(self) -> Flat:
        """Current weights; at first the random ones of the configuration."""
        return _flat(self._parameters)

    def buffers(self) -> Flat:
        """Current buffers."""
        return _flat(self._buffers)

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return self._learner.rate(step)

    def load(self, weights: Flat, buffers: Flat) -> None:
        """Continue from these weights and buffers.

        Raises:
            WeightsError: they are of another network.
        """
        _fill(self._parameters, weights, self.config.name)
        _fill(self._buffers, buffers, self.config.name)
        if not self._keeps:
            self.moments = None

    def joined(self) -> Flat:
        """Weights and buffers as one vector."""
        return np.concatenate((self.weights(), self.buffers()))

    def load_joined(self, vector: Flat) -> None:
        """Continue from a vector that `joined` has returned.

        Raises:
            WeightsError: it is of another network.
        """
        values, _ = self.lengths
        self.load(vector[:values], vector[values:])

    def hold_tensors(self, tensors: list[Tensor]) -> None:
        """Have these as the weights, instead of all parameters of the network: the parts that a rank has.

        Args:
            tensors: a backward pass leaves each its gradient.
        """
        self._parameters, self.moments = tensors, None

    def draw_from(self, data: TrainingData) -> None:
        """Take the batches of the steps to come from these images: some segments of the same data set."""
        self._learner.data = data

    def compute(
        self,
        steps: range,
        sends: Sends,
        rate: float | None = None,
        watch: Callable[[int], None] = lambda step: None,
    ) -> Computed:
        """Compute some steps, each from the weights after the step before.

        Args:
            rate: learning rate at the peak of the schedule; by default the configuration's.
            watch: called after each step with the number of the next one; an error that it raises ends the computation.
        """
        if sends == "portion":
            return self._portion(steps, watch)
        factor = 1.0 if rate is None else rate / self.config.peak_rate
        before = self.weights() if sends == "change" else None
        total: list[Tensor] | None = None
        loss = 0.0
        for step in steps:
            loss += self._learner.backward(step)
            gradients = self._decayed() if self._inner == "sgd" else []
            if sends == "gradient":
                if total is None:
                    total = [each.clone() for each in gradients]
                else:
                    torch._foreach_add_(total, gradients)
            began = time.perf_counter()
            if sends == "gradient":
                # Plain SGD: what the host will do, as far as a worker can know it.
                self._descend(gradients, factor * self.rate(step), momentum=0.0)
            elif self._inner == "sgd":
                self._descend(gradients, factor * self.rate(step), self.config.momentum)
            else:
                self._step_adamw(factor * self.rate(step))
            self.spend("step", time.perf_counter() - began)
            self._learner.network.zero_grad()
            watch(step + 1)
        values = before - self.weights() if before is not None else _flat(total or [])
        return Computed(values=values, buffers=self.buffers(), loss=loss / len(steps))

    def _portion(self, steps: range, watch: Callable[[int], None]) -> Computed:
        """Sum of the gradients of some batches of the first epoch at the same weights, and their mean loss, both with
        weight decay."""
        network, batches = self._learner.network, self.data.batches.steps_per_epoch
        loss = 0.0
        try:
            for step in steps:
                loss += self._learner.backward(step % batches)
                watch(step + 1)
            values = _flat(self._decayed(len(steps)))
        finally:
            network.zero_grad()
        squares = sum(float(each.detach().double().square().sum()) for each in self._parameters if each.ndim > 1)
        decay = self.config.weight_decay / 2 * squares
        return Computed(values=values, buffers=self.buffers(), loss=loss / len(steps) + decay)

    def gradient(self, step: int) -> tuple[Flat, float]:
        """The gradient of a step with weight decay, and its loss."""
        loss = self._learner.backward(step)
        gradients = _flat(self._decayed())
        self._learner.network.zero_grad()
        return gradients, loss

    def apply(self, gradient: Flat, rate: float) -> None:
        """A step of SGD with the network's momentum, by a gradient from elsewhere."""
        given, start = [], 0
        for each in self._parameters:
            given.append(torch.from_numpy(gradient[start : start + each.numel()]).view(each.shape).to(each.device))
            start += each.numel()
        self._descend(given, rate, self.config.momentum)

    @contextmanager
    def spread(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Iterator[None]:
        """Meanwhile, steps compute through what `wrap` makes of the network."""
        network = self._learner.network
        self._learner.network = wrap(network.train())  # what wraps it takes itself to be in training mode
        try:
            yield
        finally:
            self._learner.network = network

    def momentum(self) -> Flat:
        """Momentum of SGD; empty before the first step."""
        return _flat(self.moments or [])

    def load_momentum(self, values: Flat) -> None:
        """Continue with such a vector.

        Raises:
            WeightsError: it is of another network.
        """
        self.moments = [torch.zeros_like(each) for each in self._parameters] if len(values) else None
        _fill(self.moments or [], values, self.config.name)

    def walk(self, step: int, rate: float) -> float:
        """One step of SGD with the network's momentum, at this learning rate; its loss."""
        loss = self._learner.backward(step)
        self.descend(rate)
        return loss

    def descend(self, rate: float) -> None:
        """One step of SGD with the network's momentum, by the gradients that its parameters have."""
        self._descend(self._decayed(), rate, self.config.momentum)
        self._learner.network.zero_grad()

    def answers(self, step: int) -> Flat:
        """Logits of a step's batch, one after the other. `walk_together` continues from them."""
        self._answered = self._learner.forward(step)
        return _flat([self._answered.output])

    def walk_together(self, mean: Flat, networks: int, rate: float) -> float:
        """One step of SGD by the loss of an ensemble's answers to the batch of `answers`; that loss.

        Args:
            mean: logits of all networks, of which this is one.
        """
        assert self._answered is not None
        own = self._answered.output
        joint = torch.from_numpy(mean).view(own.shape).to(own.device) + (own - own.detach()) / networks
        loss = self._learner.backward_from(replace(self._answered, output=joint))
        self._answered = None
        self.descend(rate)
        return loss

    def spend(self, name: str, seconds: float) -> None:
        """Count time on load, forward, backward or step."""
        self._learner.times[name] = self._learner.times.get(name, 0.0) + seconds

    def take_times(self) -> dict[str, float]:
        """Seconds since the last call that were spent on load, forward, backward and step."""
        times, self._learner.times = self._learner.times, {}
        return times

    def evaluated(self, weights: Flat, buffers: Flat, images: ImageSet) -> tuple[float, float]:
        """Return the share of images whose class these weights find, and their mean cross entropy, which need not be
        finite. Running statistics are measured again, because a mix from many workers fits no weights well.

        Args:
            images: with labels of the configuration's target.
        """
        self.load(weights, buffers)
        logits, labels = self.logits(images), self.labels(images)
        loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits).double(), torch.from_numpy(labels))
        return float(np.mean(logits.argmax(1) == labels)), float(loss)

    def logits(self, images: ImageSet) -> NDArray[np.float32]:
        """Answers `[n, classes]` of the weights that are loaded; running statistics are measured again."""
        self._calibrate()
        data = self.data
        # In evaluation mode as a whole: the next step then sets it to training mode as a whole.
        network = self._learner.network.eval().network
        return predict(network, images.images, data.batches.statistics, self.config, data.device)

    def labels(self, images: ImageSet) -> NDArray[np.int64]:
        """The right answers; `images` have labels of the configuration's target."""
        found = images.fine if self.config.target == "fine" else images.coarse
        assert found is not None
        return found

    def measured(self, weights: Flat, buffers: Flat) -> tuple[float, float]:
        """Accuracy and loss of these weights on the held-out images. The learner is then as it was before."""
        kept = self.weights(), self.buffers(), self.moments
        found = self.evaluated(weights, buffers, self.data.held_out)
        self.load(*kept[:2])
        self.moments = kept[2]
        return found

    def keep(self, final: tuple[Flat, Flat], folder: Path, *, dataset: str, seconds: float, fleet: FleetFacts) -> None:
        """Write checkpoint and record of a finished run, so that the commands that read run folders can use it.

        Args:
            final: its weights and buffers.
            dataset: its name.
            seconds: from the first unit of work to the last update.
            fleet: facts about the machines of the run.

        Raises:
            WeightsError: weights or buffers belong to another network.
            SetupError: it could not be written.
        """
        self.load(*final)
        self._calibrate()
        network, data = self._learner.network.state_dict(), self.data
        steps = self.steps if fleet.reached is None else fleet.reached.steps
        save_checkpoint(
            folder,
            Checkpoint(
                step=steps,
                config=self.config.model_dump(mode="json"),
                hierarchy=data.hierarchy.content(),
                data_sha256=data.sha256,
                statistics=asdict(data.batches.statistics),
                weights=network,
                averaged=network,
                optimizer={},
                epochs=[],
                loss_sum=0.0,
                epoch_seconds=0.0,
                seconds=seconds,
            ),
        )
        record = make_record(
            TrainingRecord,
            self.config,
            data,
            data=dataset,
            steps=steps,
            planned_steps=self.steps,
            seconds=seconds,
            fleet=fleet,
        )
        save_record(record, folder)

    def _decayed(self, batches: int = 1) -> list[Tensor]:
        decay = batches * self.config.weight_decay
        return [
            # As the sequential trainer's optimiser: biases and normalisation have no decay.
            value.grad.add(value.detach(), alpha=decay if value.ndim > 1 else 0.0)
            for value in self._parameters
            if value.grad is not None
        ]

    def _descend(self, gradients: list[Tensor], rate: float, momentum: float) -> None:
        if momentum and self.moments is None:
            self.moments = [torch.zeros_like(each) for each in gradients]
        for place, (value, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if momentum:
                velocity = self.moments[place].mul_(momentum).add_(gradient)
                gradient = gradient.add(velocity, alpha=momentum)  # Nesterov
            value.data.add_(gradient, alpha=-rate)

    def _step_adamw(self, rate: float) -> None:
        if self.moments is None:
            config = self.config.model_copy(update={"weight_decay": ADAMW_DECAY})
            self.moments = torch.optim.AdamW(groups_of(self._learner.network, config), lr=rate)
        set_rate(self.moments, rate)
        self.moments.step()

    def _normalisations(self) -> list[torch.nn.BatchNorm2d]:
        """Layers with running statistics that change."""
        return [layer for layer in self._learner.network.modules() if type(layer) is torch.nn.BatchNorm2d]

    def _calibrate(self, batches: int = _CALIBRATION_BATCHES) -> None:
        """Measure running statistics of the weights that are loaded, over the first batches."""
        layers = self._normalisations()
        if not layers:
            return
        kept: list[Any] = [layer.momentum for layer in layers]
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a plain mean of all batches
        for step in range(min(batches, self.steps)):
            self._learner.observe(step)
        for layer, momentum in zip(layers, kept, strict=True):
            layer.momentum = momentum


def read_images(
    config: TrainConfig,
    dataset: Dataset,
    *,
    device: str = "cpu",
    answers: TeacherAnswers | None = None,
    begins: bool = False,
) -> tuple[TrainingData, ImageSet]:
    """Read the training images and the test images.

    Args:
        device: device that keeps the training images.
        answers: answers of the teacher, if the configuration has one; see `read_teacher`.
        begins: True if the caller loads the weights of the configuration's `initial` run.

    Raises:
        InvalidInput: the configuration has a teacher, and its answers are missing; or it starts from another run, and
            the caller does not load that.
        DataError: they are missing or damaged.
    """
    if config.teacher is not None and answers is None:
        raise InvalidInput(
            f"{config.name!r} has a teacher: give its answers to the training images with --answers FILE; "
            f"'terrace models answers {' '.join(config.teacher.runs)} --out FILE' makes them"
        )
    if config.initial is not None and not begins:
        raise InvalidInput(
            f"{config.name!r} starts from the run {config.initial!r}: only 'terrace train host' and 'run' with a host "
            "load that"
        )
    teacher = None if answers is None else torch.from_numpy(answers.log_probabilities)
    images = TrainingData(config, dataset.read("train"), dataset.hierarchy, teacher=teacher, device=device)
    return images, dataset.read("test")


def read_teacher(path: Path | None, config: TrainConfig, dataset: Dataset) -> TeacherAnswers | None:
    """The answers of a configuration's teacher from a file; None for a configuration without a teacher.

    Raises:
        DataError: the file is missing or damaged, or belongs to other images or another hierarchy.
        InvalidInput: they are answers of another teacher.
    """
    if config.teacher is None or path is None:
        return None
    answers = read_answers(path, dataset.read("train").digest(), dataset.hierarchy)
    if answers.facts.teachers != config.teacher.runs:
        have, wanted = (" and ".join(names) for names in (answers.facts.teachers, config.teacher.runs))
        raise InvalidInput(f"{path} holds answers of {have}, and the teacher of {config.name!r} is {wanted}")
    return answers


@contextmanager
def foreign(name: str) -> Iterator[None]:
    """Context for computing what another machine describes. If that cannot be computed, the other machine is at fault.

    Raises:
        InvalidAnswer: raised instead of errors of arithmetic, torch or memory.
    """
    try:
        yield
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        raise InvalidAnswer(f"the host's network {name!r} cannot be computed here: {str(error)[:200]}") from error


def learner_of(spec: RunSpec, data: TrainingData, network: torch.nn.Module | None = None) -> FlatLearner:
    """Return the learner of a run that another machine describes. Layers stop being filled once there are more values
    than described.

    Args:
        network: see `FlatLearner`.

    Raises:
        InvalidAnswer: its network has another number of values or buffers than described, or a step does not fit in the
            free memory.
        InvalidInput, WeightsError, DataError: see `FlatLearner`.
    """
    seen, thread = 0, threading.get_ident()

    def count(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal seen
        if parameter is not None and threading.get_ident() == thread:  # torch calls this for all that is built
            seen += parameter.numel()
            if seen > spec.values:
                raise InvalidAnswer(f"the host's network has more than the {spec.values:,} values that the host says")

    counting = register_module_parameter_registration_hook(count)
    try:
        learner = FlatLearner(spec.network, data, strategy=spec.strategy, network=network)
    finally:
        counting.remove()
    if (found := learner.lengths) != (spec.values, spec.buffers):
        raise InvalidAnswer(
            f"the host's network has {found[0]:,} values and {found[1]:,} in buffers; the host says "
            f"{spec.values:,} and {spec.buffers:,}"
        )
    needed, free = learner.step_bytes(), free_bytes(str(data.device))
    if free is not None and needed > free:
        raise InvalidAnswer(
            f"a step of the host's network takes {needed / 1e9:.1f} GB, and this machine has {free / 1e9:.1f} free"
        )
    return learner


def _flat(tensors: list[Tensor]) -> Flat:
    if not tensors:
        return np.zeros(0, np.float32)
    joined: Flat = torch.cat([each.detach().reshape(-1).float().cpu() for each in tensors]).numpy()
    return joined


def _fill(tensors: list[Tensor], values: Flat, name: str) -> None:
    size = sum(each.numel() for each in tensors)
    if values.shape != (size,):
        raise WeightsError(f"{name!r} has {size:,} values, and {values.size:,} came: they are of another network")
    start = 0
    for each in tensors:
        stop = start + each.numel()
        each.data.copy_(torch.from_numpy(values[start:stop]).view(each.shape))
        start = stop
