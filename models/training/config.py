"""Training configuration: a TOML file, checked and frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat

from models.dataset import CIFAR100, BuiltIn
from models.manifest import PlainName
from tierkit.documents import Frozen, read_document
from tierkit.errors import InvalidInput

__all__ = ["CONFIGS", "Config", "NetworkConfig", "TeacherConfig", "TrainConfig", "find_config", "read_config"]

CONFIGS = Path(__file__).parent.parent / "configs"
"""Folder of the configurations that ship with Terrace."""


class NetworkConfig(Frozen):
    """Architecture of a network and its options."""

    kind: str = Field(max_length=64)
    """A key of `models.training.networks`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the network's class."""


class TeacherConfig(Frozen):
    """Knowledge distillation (Hinton et al. 2015, arXiv:1503.02531)."""

    runs: tuple[PlainName, ...] = Field(min_length=1)
    """Names of runs whose averaged probabilities are learnt in addition to the labels."""
    weight: float = Field(default=0.7, ge=0, le=1)
    """Share of the teacher's term in the loss; the labels have the rest."""
    temperature: PositiveFloat = 2.0
    """Softens both sides of the teacher's term, which is scaled by its square."""


class TrainConfig(Frozen):
    """Everything that determines a training run, together with the data and the code."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: PlainName
    """Name of the network in the manifest and of its run folder."""
    tier: Literal["end", "edge", "cloud"]
    """Tier that it serves."""
    target: Literal["fine", "coarse"]
    """Label level of its output."""
    dataset: BuiltIn = CIFAR100
    """Data set that it is trained on, unless the command names another one."""
    network: NetworkConfig
    teacher: TeacherConfig | None = None
    initial: PlainName | None = None
    """Name of a run of the same architecture whose averaged weights this one starts from; random weights by default."""
    auxiliary: NonNegativeFloat = 0.0
    """Weight of a second, fine classifier: the extra classifier that a coarse network has only during training, or the
    early exit of a network in two parts.
    """
    epochs: int = Field(ge=1, le=1_000_000)
    """Passes over the training images; with `stream`, the parts of the only pass."""
    batch_size: int = Field(default=256, ge=1, le=65_536)
    peak_rate: PositiveFloat = 0.2
    """Highest learning rate."""
    schedule: Literal["one-cycle", "cosine", "constant"] = "one-cycle"
    warmup: float = Field(default=0.25, gt=0, lt=1)
    """Share of the steps in which the rate rises."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum."""
    weight_decay: NonNegativeFloat = 5e-4
    """Weight decay of convolution and linear weights; biases and normalisation are exempt."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    mixup: float = Field(default=0.0, ge=0, le=1_000)
    """Beta parameter of mixup (arXiv:1710.09412); 0 switches it off."""
    cutmix: float = Field(default=0.0, ge=0, le=1_000)
    """Beta parameter of cutmix (arXiv:1905.04899); 0 switches it off. With both, each batch draws one."""
    crop_padding: int = Field(default=4, ge=0, le=1_024)
    """Pixels of reflected border from which random crops are taken; at most half the side of an image."""
    mirror: bool = True
    """True if every other image, drawn at random, is mirrored; not for digits or letters."""
    contrast: float = Field(default=1.0, ge=1, le=10)
    """The contrast of each image is multiplied by a factor from `1 / contrast` to `contrast`, drawn evenly on a
    logarithmic scale; 1 switches it off."""
    early_side: int | None = Field(default=None, ge=1, le=4_096)
    """Height and width that images are shrunk to in the early epochs, which then cost less; None for never."""
    early_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the epochs, from the first, in which `early_side` holds."""
    ema_decay: float = Field(default=0.995, ge=0, lt=1)
    """Decay per step of the averaged weights that are evaluated and exported; 0 switches averaging off."""
    held_out_per_class: int = Field(default=20, ge=1, le=1_000_000)
    """Training images per class that no step sees: for choosing, and for fitting the temperature."""
    label_noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training images whose label is replaced by another class, drawn from the seed; never of images that
    are held out or of the test set."""
    stream: bool = False
    """True if each training image is seen once, in an order drawn from the seed; `epochs` then says in how many parts,
    each of which ends with a measurement."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Precision of activations and matrix products; weights and their updates are always fp32."""
    seed: int = Field(default=0, ge=-(2**31), lt=2**31)

    @property
    def all_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.epochs


Config = TypeVar("Config", bound=TrainConfig)


def find_config(name: str, path: Path | None) -> TrainConfig:
    """The configuration of a network; see `read_config`."""
    return read_config(name, path, TrainConfig, CONFIGS)


def read_config(name: str, path: Path | None, kind: type[Config], bundled: Path) -> Config:
    """Read the configuration called `name` from `path`, by default the bundled one.

    Args:
        bundled: folder of the configurations that ship with Terrace.

    Raises:
        InvalidInput: there is no bundled one, or the file has another name in it.
        SetupError: the file cannot be read, or a field is wrong; the message names it and the reason.
    """
    file = path or bundled / f"{name}.toml"
    if path is None and not file.is_file():
        have = ", ".join(sorted(other.stem for other in bundled.glob("*.toml")))
        raise InvalidInput(f"no bundled configuration {name!r}; there is: {have}")
    config = read_document(file, kind, what="configuration")
    if config.name != name:
        raise InvalidInput(f"the configuration {path} is called {config.name!r}, not {name!r}")
    return config
