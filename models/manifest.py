"""The manifest: the networks that ship, the facts about each, and the label hierarchy that they share.

`manifest.json` is in the weights folder. Only this file holds input sizes, class counts, accuracies and digests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from models.hierarchy import Hierarchy
from models.split import Part
from tierkit.atomic import write_atomically
from tierkit.documents import Frozen, faults, read_json
from tierkit.errors import DataError, InvalidInput, NotFound, SetupError, WeightsError
from tierkit.types import EncoderKind

__all__ = [
    "MANIFEST_NAME",
    "Costs",
    "Cut",
    "Digest",
    "EncoderEntry",
    "Fit",
    "Manifest",
    "ModelEntry",
    "NamedFile",
    "PartFile",
    "PlainName",
    "Resample",
    "ResizeRule",
    "Side",
    "TrainingFacts",
    "WeightsFile",
    "begin_weights",
    "checked_manifest",
    "load_manifest",
    "merge_encoder",
    "merge_entry",
    "parse_manifest",
    "records_folder",
    "save_manifest",
    "weights_folder",
]

MANIFEST_NAME = "manifest.json"

Share = Annotated[float, Field(ge=0, le=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileSize = Annotated[int, Field(gt=0, le=2**31)]
"""Bytes of an ONNX file: its format, protobuf, holds no more."""

PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


ResizeRule = Literal["shortest-side", "squash", "pad"]
"""shortest-side: the shortest side gets a length and the middle is cut out; squash: both sides are resized, whatever
becomes of the aspect ratio; pad: the longest side fits, and black fills the rest."""

Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
"""A filter of Pillow."""

Side = Literal["head", "tail"]
"""Part of an encoder: the head runs on the lower tier, the tail on the upper one."""

_SIDES: tuple[Side, ...] = ("head", "tail")
_SMALL_SIDE = 64
"""Pictures of more pixels have fewer bytes as files."""


class WeightsFile(Protocol):
    """A file of weights, and the name to ask for it by."""

    @property
    def name(self) -> str: ...

    @property
    def file(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class TrainingFacts(Frozen):
    """Facts about a network's training; the full record is in `models/records/`."""

    record: str
    """File name of the training record."""
    config: str
    """Name of the training configuration."""
    epochs: NonNegativeInt
    """Finished epochs of this run."""
    minutes: float
    """Wall time of this run's steps, on a machine that had other work too where `hardware` says so."""
    total_epochs: NonNegativeInt
    total_minutes: float
    """Sum of `minutes` over this run and the earlier runs that its weights come from (`initial`)."""
    hardware: str
    teachers: tuple[str, ...] = ()
    initial: str | None = None
    """The run whose weights this one started from."""
    data: str
    """Data set, and how much of it was trained on."""


class Cut(NamedTuple):
    """The place between head and tail of a network."""

    shape: tuple[int, int, int]
    """Channels, height and width of the features of an image."""
    head_parameters: int


class Fit(NamedTuple):
    """The pixels that a network takes, and how a picture of another size gets there."""

    height: int
    width: int
    rule: ResizeRule = "squash"
    resize_to: int | None = None
    """Length to which the shortest side (shortest-side) or both sides (squash) are resized before the middle is cut
    out. None: to the longer side of what is taken (shortest-side), or nothing is cut out (squash)."""
    resample: Resample = "bicubic"

    @property
    def turned(self) -> Fit:
        """Return the same for a picture that lies on its side."""
        return self._replace(height=self.width, width=self.height)


class Costs(Frozen):
    """The cost of one picture; see `models.costs`."""

    macs: NonNegativeInt | None
    """Multiply-adds of convolutions and matrix products; None if an operator multiplies in an unknown way."""
    peak_bytes: PositiveInt
    """Weights, and the tensors that live at once in a batch of one, from the graph."""


class Costed(Frozen):
    """A file of weights whose costs may be known."""

    costs: Costs | None = None
    """None in manifests that were written before costs were kept, or if nothing could run the network then."""

    @model_serializer(mode="wrap")
    def _without_unknown_costs(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # So an older manifest keeps its digest, and older nodes can read it.
        content: dict[str, Any] = written(self)
        if content.get("costs", 0) is None:
            del content["costs"]
        return content


class ModelEntry(Costed):
    """One shipped network."""

    name: PlainName
    tier: Literal["end", "edge", "cloud"]
    file: PlainName
    """File name within the weights folder."""
    sha256: Digest
    size_bytes: FileSize
    target: Literal["coarse", "fine"]
    """Label level of the logits."""
    classes: PositiveInt
    input_shape: tuple[PositiveInt, PositiveInt, Literal[3]]
    """Height, width and colours of the UINT8 images."""
    resize: ResizeRule = "squash"
    """Rule that brings a picture of another size to this one."""
    resize_to: PositiveInt | None = None
    """Length of the shortest side (shortest-side) or of both sides (squash) before the middle is cut out."""
    resample: Resample = "bicubic"
    """Filter by which a picture is resized."""
    precision: Literal["int8", "fp32"]
    parameters: PositiveInt
    """Trained values of the network, before normalisation was folded into its convolutions."""
    temperature: PositiveFloat
    """`softmax(logits / temperature)` is calibrated; fitted on held-out training images."""
    coarse_accuracy: Share | None
    """Coarse accuracy on the whole test set; a fine network's probabilities are summed per superclass."""
    fine_accuracy: Share | None
    """Fine accuracy on the whole test set; None for a coarse network."""
    fp32_coarse_accuracy: Share | None = None
    fp32_fine_accuracy: Share | None = None
    """The same before quantisation."""
    test_images: NonNegativeInt
    """Number of images on which the accuracies were measured."""
    ece_before: Share | None
    ece_after: Share | None
    """Expected calibration error on the test set at temperature 1 and at `temperature`, 15 bins of equal width."""
    feature_shape: tuple[PositiveInt, PositiveInt, PositiveInt] | None
    """Channels, height and width of the first convolution's output, where head and tail are cut; None where there is no
    cut."""
    head_parameters: PositiveInt | None
    """Trained values of the head."""
    gpu: bool = False
    """True if nodes on which ONNX Runtime computes on a GPU serve this network by default instead of the tier's other
    networks.
    """
    training: TrainingFacts | None
    """None for a network that was imported."""
    licence: str = "Apache-2.0"

    @property
    def fit(self) -> Fit:
        """The pixels that it takes."""
        return Fit(*self.input_shape[:2], self.resize, self.resize_to, self.resample)

    @property
    def reading(self) -> str:
        """Digest of everything except the weights that decides an answer: how a picture becomes pixels, and the
        temperature.
        """
        return hashlib.sha256(json.dumps([*self.fit, self.temperature]).encode()).hexdigest()

    @property
    def trained(self) -> TrainingFacts:
        """Facts about its training.

        Raises:
            WeightsError: it was imported.
        """
        if self.training is None:
            raise WeightsError(f"{self.name!r} was imported, so nothing is known of its training")
        return self.training

    @property
    def cut(self) -> Cut:
        """The place between head and tail.

        Raises:
            WeightsError: it has no such place.
        """
        if self.feature_shape is None or self.head_parameters is None:
            raise WeightsError(
                f"{self.name!r} cannot be cut after its first convolution, so there are no features of it: its tier "
                "must be one that may see pixels"
            )
        return Cut(self.feature_shape, self.head_parameters)

    @property
    def accuracy(self) -> float | None:
        """Accuracy at the label level of `target`; None if it was not measured."""
        return self.fine_accuracy if self.target == "fine" else self.coarse_accuracy

    @property
    def accuracy_density(self) -> float | None:
        """Accuracy at the label level of `target` in percent, per million parameters (Bianco et al. 2018)."""
        return None if self.accuracy is None else 100 * self.accuracy / (self.parameters / 1e6)

    @property
    def input_text(self) -> str:
        """Size of the images and resize rule in words: "224 x 224, shortest side to 256"."""
        height, width, _ = self.input_shape
        if self.resize == "shortest-side":
            return f"{width} x {height}, shortest side to {self.resize_to or max(height, width)}"
        if self.resize == "squash" and self.resize_to is not None:
            return f"{width} x {height}, squashed to {self.resize_to} x {self.resize_to}, middle"
        return f"{width} x {height}, {'padded' if self.resize == 'pad' else 'squashed'}"

    def with_file(self, path: Path, *, precision: Literal["int8", "fp32"]) -> ModelEntry:
        """This entry for another file of the same network; the file is not checked.

        Raises:
            WeightsError: the file cannot be read.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror}") from error
        facts = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
        return self.model_copy(update={**facts, "precision": precision, "costs": None})


class NamedFile(Frozen):
    """A `WeightsFile` and no more."""

    name: PlainName
    file: PlainName
    sha256: Digest
    size_bytes: FileSize


class PartFile(Costed):
    """File of the head or the tail of an encoder."""

    file: PlainName
    """File name within the weights folder."""
    sha256: Digest
    size_bytes: FileSize
    part: Part
    """Part of the file to use: all of it, or one side of the network's cut (`models.split`)."""


class EncoderEntry(Frozen):
    """An encoder, whose features a device may send to an upper network instead of pixels: a head for the lower tier,
    the packing of its output, and a tail for the upper tier.

    On the wire a feature x is `q = clip(round(x / scale) + zero_point, 0, 2**bits - 1)`, and the tail gets
    `(q - zero_point) * scale`.
    """

    kind: EncoderKind
    network: PlainName
    """The upper network whose answers the tail gives."""
    head: PartFile
    """`images` UINT8 `[n, h, w, 3]` to `features` FP32 `[n, channels, h, w]`."""
    tail: PartFile
    """`features` FP32 to `logits` FP32 `[n, classes]`."""
    feature_shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Channels, height and width of the features of an image."""
    scale: PositiveFloat
    zero_point: Annotated[int, Field(ge=0, le=255)]
    bits: Annotated[int, Field(ge=1, le=8)] = 8
    noise: NonNegativeFloat = 0.0
    """Standard deviation of the Gaussian noise that the device adds to the features before it rounds them."""
    hiding: PlainName | None = None
    """Name of a step in `terrace.encoders` that changes the features before they are rounded. It replaces the noise."""
    temperature: PositiveFloat
    """`softmax(logits / temperature)` is calibrated."""
    fine_accuracy: Share
    coarse_accuracy: Share
    """Coarse accuracy on the whole test set, through the UINT8 features."""
    fp32_fine_accuracy: Share
    """The same with the features as FP32, without noise."""
    test_images: PositiveInt
    head_parameters: PositiveInt
    parameters: PositiveInt
    """Trained values of head and tail together."""
    training: TrainingFacts | None = None
    """None if the encoder is the network's own first layer."""

    @model_serializer(mode="wrap")
    def _without_default_hiding(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # So an older manifest keeps its digest, and older nodes can read it.
        content: dict[str, Any] = written(self)
        if content.get("hiding", "") is None:
            del content["hiding"]
        return content

    @property
    def name(self) -> str:
        """Under which a node serves the tail."""
        return f"{self.network}.{self.kind}"

    @property
    def head_name(self) -> str:
        """Under which the file of the head is fetched."""
        return f"{self.name}-head"

    @property
    def own_files(self) -> tuple[Side, ...]:
        """The sides whose file is not the network's."""
        return tuple(side for side in _SIDES if getattr(self, side).part == "whole")

    def weights(self, side: Side) -> WeightsFile:
        """The file of a side. A tail that is a part of its network keeps the network's name."""
        part = self.head if side == "head" else self.tail
        own = self.head_name if side == "head" else self.name
        return NamedFile(
            name=own if part.part == "whole" else self.network, **part.model_dump(exclude={"part", "costs"})
        )

    @property
    def is_cut(self) -> bool:
        """True if head and tail are the network itself, cut in two; a learned encoder has a separate tail."""
        return self.tail.part == "tail"

    @property
    def levels(self) -> int:
        """Number of values that a packed feature can have."""
        return int(2**self.bits)

    @model_validator(mode="after")
    def _zero_is_a_level(self) -> EncoderEntry:
        if self.zero_point >= self.levels:
            raise ValueError(f"zero_point {self.zero_point} does not fit {self.bits} bits")
        return self


class Manifest(Frozen):
    """All shipped networks and their label hierarchy."""

    format: Literal[1] = 1
    hierarchy_content: dict[str, Any] = Field(alias="hierarchy")
    data_source: str
    """Source of the training and test images, and their terms of use."""
    models: tuple[ModelEntry, ...]
    """At least one."""
    encoders: tuple[EncoderEntry, ...] = ()
    tuned: tuple[PlainName, ...] = ()
    """Networks that the thresholds of escalation were tuned for; see `models.escalation`."""

    @model_serializer(mode="wrap")
    def _without_untuned(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # So an older manifest keeps its digest, and older nodes can read it.
        content: dict[str, Any] = written(self)
        if not content.get("tuned", True):
            del content["tuned"]
        return content

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """The label hierarchy of every network here."""
        return Hierarchy.parse(self.hierarchy_content, source=MANIFEST_NAME)

    @property
    def fit(self) -> Fit | None:
        """The pixels that every network takes, where images travel as these; None where they travel as the files that
        users send, because the networks take different ones, or large ones."""
        fits = {entry.fit for entry in self.models}
        fit = fits.pop()
        return None if fits or max(fit.height, fit.width) > _SMALL_SIDE else fit

    def check_hierarchy(self, hierarchy: Hierarchy) -> None:
        """Refuse a data set with another hierarchy.

        Raises:
            InvalidInput: it has one.
        """
        if hierarchy != self.hierarchy:
            raise InvalidInput(
                f"the networks are of hierarchy {self.hierarchy.name!r}, the data set is {hierarchy.name!r}: name a "
                "folder of pictures of their classes with --dataset, or another model set with --models"
            )

    def content(self) -> dict[str, Any]:
        """Return the content of `manifest.json` as JSON values."""
        return self.model_dump(mode="json", by_alias=True)

    def as_json(self) -> bytes:
        """The content of `manifest.json`."""
        return (json.dumps(self.content(), indent=2) + "\n").encode()

    @cached_property
    def digest(self) -> str:
        """sha256 of its content: two manifests with the same digest name the same networks and classes."""
        return hashlib.sha256(self.as_json()).hexdigest()

    @cached_property
    def offered(self) -> Mapping[str, tuple[str, str]]:
        """Map the name of each network and each encoder's tail that a node may serve to its sha256 and
        `ModelEntry.reading`. A tail takes no pictures, so its reading is "".
        """
        tails = {encoder.name: (encoder.tail.sha256, "") for encoder in self.encoders}
        return tails | {entry.name: (entry.sha256, entry.reading) for entry in self.models}

    def entry(self, name: str) -> ModelEntry:
        """The network called `name`.

        Raises:
            NotFound: there is none; the message lists those that there are.
        """
        for model in self.models:
            if model.name == name:
                return model
        raise NotFound(f"no model {name!r}; the manifest has: {', '.join(model.name for model in self.models)}")

    def default_for(self, tier: str, *, gpu: bool = False) -> ModelEntry:
        """The first network listed for `tier` that is for such a processor; the first of all if none is.

        Args:
            gpu: True if it will run on a GPU.

        Raises:
            NotFound: no network serves this tier.
        """
        own = [model for model in self.models if model.tier == tier]
        if not own:
            raise NotFound(f"the model set has no network for the {tier} tier")
        return next((model for model in own if model.gpu == gpu), own[0])

    def candidates(self, tier: str, *, gpu: bool = False) -> tuple[ModelEntry, ...]:
        """The networks among which a node of a tier may choose, beginning with its default.

        Networks for such a processor count before the others, and a network with tuned thresholds before those without:
        thresholds belong to its weights.

        Args:
            gpu: True if it runs on a GPU.

        Raises:
            NotFound: no network serves this tier.
        """
        first = self.default_for(tier, gpu=gpu)
        alike = tuple(model for model in self.models if model.tier == tier and model.gpu == first.gpu)
        return tuple(model for model in alike if model.name in self.tuned) or alike

    def tuned_without(self, name: str) -> tuple[str, ...]:
        """Networks whose thresholds remain if one gets other weights: none, if that one is tuned too."""
        return () if name in self.tuned else self.tuned

    def preferring(self, entry: ModelEntry) -> Manifest:
        """The manifest with one network before all others, which makes it the default of its tier."""
        if entry == self.default_for(entry.tier, gpu=entry.gpu):
            return self
        return self.model_copy(update={"models": (entry, *(model for model in self.models if model != entry))})

    def encoder(self, name: str) -> EncoderEntry:
        """The encoder called `name` ("NETWORK.KIND").

        Raises:
            NotFound: there is none; the message lists those that there are.
        """
        for encoder in self.encoders:
            if encoder.name == name:
                return encoder
        have = ", ".join(encoder.name for encoder in self.encoders) or "none"
        raise NotFound(f"no encoder {name!r}; the manifest has: {have}")

    def weights(self, name: str) -> WeightsFile:
        """The weights file that is fetched under this name: a network's, or one of an encoder.

        Raises:
            NotFound: there is none.
        """
        files = [encoder.weights(side) for encoder in self.encoders for side in _SIDES]
        return next((file for file in files if file.name == name), None) or self.entry(name)

    def labels(self, entry: ModelEntry) -> tuple[str, ...]:
        """Class names of a network's outputs."""
        return self.hierarchy.labels(entry.target)


def weights_folder() -> Path:
    """The folder of the weights that ship with Terrace."""
    return Path(__file__).parent / "weights"


def records_folder(weights: Path) -> Path:
    """Folder of the training records of a weights folder: inside it, or next to it for the bundled one."""
    bundled = weights.resolve() == weights_folder().resolve()
    return weights.parent / "records" if bundled else weights / "records"


def begin_weights(folder: Path, like: Path) -> Manifest:
    """Return the manifest of a weights folder before writing to it. A new folder becomes a copy of `like` with its
    records.

    Raises:
        InvalidInput: the folder holds something else.
        WeightsError: there is no manifest, or it is wrong.
        SetupError: the folder could not be written.
    """

    def copy(source: str, target: str) -> None:
        try:
            shutil.copy2(source, target)
        except OSError as error:  # copytree would go on, and lose which it was
            raise SetupError(f"cannot copy {source} to {folder}: {error.strerror or error}") from error

    if not (folder / MANIFEST_NAME).is_file():
        load_manifest(like)
        try:
            if folder.exists() and any(folder.iterdir()):
                raise InvalidInput(f"{folder} holds files but no {MANIFEST_NAME}: name a model set, or a new folder")
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a copy that was broken off would be taken for a model set.
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
                whole = Path(shutil.copytree(like, Path(temporary) / "set", copy_function=copy))
                if (records := records_folder(like)).is_dir():
                    shutil.copytree(records, records_folder(whole), dirs_exist_ok=True, copy_function=copy)
                whole.replace(folder)
        except OSError as error:
            raise SetupError(f"cannot write {folder}: {error.strerror or error}") from error
    return load_manifest(folder)


def load_manifest(folder: Path | None = None) -> Manifest:
    """Read `manifest.json` of `folder`, by default the bundled weights.

    Raises:
        WeightsError: there is no manifest, or it is wrong; the message says why.
    """
    path = (folder or weights_folder()) / MANIFEST_NAME
    try:
        manifest = read_json(path, Manifest, what="manifest", error=WeightsError)
    except WeightsError as error:
        if folder is None or not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        why = "it is a file" if folder.exists() else "there is no such folder"
        if folder.is_dir():
            why = f"it holds no {MANIFEST_NAME}"
        raise WeightsError(
            f"{folder} is not a model set ({why}): name a folder that 'terrace models import' or 'quantize' has made"
        ) from error
    return checked_manifest(manifest, str(path))


def parse_manifest(content: bytes, source: str) -> Manifest:
    """Parse a manifest from elsewhere; `source` names it in messages.

    Raises:
        WeightsError: it is wrong; the message says why.
    """
    try:
        return checked_manifest(Manifest.model_validate_json(content), source)
    except ValidationError as exc:
        raise WeightsError(f"the manifest {source} is wrong: {faults(exc, Manifest)}") from exc


def checked_manifest(manifest: Manifest, source: str) -> Manifest:
    """Check that the manifest's parts fit each other, and return it. `source` names it in messages.

    Raises:
        WeightsError: they do not.
    """
    try:
        hierarchy = manifest.hierarchy
    except DataError as error:
        raise WeightsError(f"the manifest {source} is wrong: {error}") from error
    _check_consistency(manifest, hierarchy, source)
    return manifest


def save_manifest(manifest: Manifest, folder: Path) -> None:
    """Write `manifest.json` into `folder`, replacing the old one atomically.

    Raises:
        SetupError: it could not be written; the old one is whole.
    """
    write_atomically(folder / MANIFEST_NAME, manifest.as_json())


def merge_entry(models: Iterable[ModelEntry], entry: ModelEntry) -> tuple[ModelEntry, ...]:
    """`models` with `entry` in the place of the one of its name, or added.

    From the end tier upwards; within a tier those for a GPU come last.
    """
    rank = {"end": 0, "edge": 1, "cloud": 2}
    others = [model for model in models if model.name != entry.name]
    return tuple(sorted([*others, entry], key=lambda model: (rank[model.tier], model.gpu)))


def merge_encoder(encoders: Iterable[EncoderEntry], encoder: EncoderEntry) -> tuple[EncoderEntry, ...]:
    """`encoders` with `encoder` in the place of the one of its name, or added; by name."""
    others = [other for other in encoders if other.name != encoder.name]
    return tuple(sorted([*others, encoder], key=lambda other: other.name))


def _check_consistency(manifest: Manifest, hierarchy: Hierarchy, path: str) -> None:
    if not manifest.models:
        raise WeightsError(f"the manifest {path} lists no network")
    names = [model.name for model in manifest.models]
    if len(set(names)) < len(names):
        raise WeightsError(f"the manifest {path} names a model twice")
    for model in manifest.models:
        want = len(hierarchy.labels(model.target))
        if model.classes != want:
            raise WeightsError(
                f"the manifest {path} is wrong: {model.name!r} has {model.classes} classes, "
                f"hierarchy {hierarchy.name!r} has {want} {model.target} ones"
            )
    _check_encoders(manifest, path)


def _check_encoders(manifest: Manifest, path: str) -> None:
    names = [encoder.name for encoder in manifest.encoders]
    if len(set(names)) < len(names):
        raise WeightsError(f"the manifest {path} names an encoder twice")
    networks = {model.name: model for model in manifest.models}
    for encoder in manifest.encoders:
        network = networks.get(encoder.network)
        if network is None:
            raise WeightsError(f"the manifest {path} is wrong: {encoder.name!r} belongs to no network in it")
        if network.target != "fine":
            raise WeightsError(f"the manifest {path} is wrong: {network.name!r} gives no fine answers to encode for")
        for part in (encoder.head, encoder.tail):
            if part.part != "whole" and (part.file, part.sha256) != (network.file, network.sha256):
                raise WeightsError(
                    f"the manifest {path} is wrong: {encoder.name!r} names another file, or another SHA-256, than "
                    f"{network.name!r}. Take the manifest that came with the files. Or delete that encoder from it and "
                    f"make it again with 'terrace models cut-encoder {network.name} --models SET --out SET'"
                )
