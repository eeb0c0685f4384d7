"""ONNX Runtime behind the `Model` protocol. The runtime is imported when the first model is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from models.manifest import EncoderEntry, ModelEntry, Side, WeightsFile, load_manifest, weights_folder
from models.split import FEATURES, Part, extract_part
from tierkit.errors import MissingExtra, ProviderUnavailable, SetupError, WeightsError
from tierkit.inference.model import CORES
from tierkit.tensors import Array, Decode, TensorSpec

__all__ = [
    "OnnxModel",
    "check_threads",
    "entry_of",
    "facts_of",
    "import_runtime",
    "load_encoder",
    "load_model",
    "open_session",
    "plain",
    "run_session",
    "softmax",
    "verify_file",
]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_DATATYPES = {"tensor(uint8)": "UINT8", "tensor(float)": "FP32"}
_MOST_READ, _MOST_SAID = 5_000, 500
"""Most characters of ONNX Runtime's error that are read, and that a message repeats."""
_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
_PLACE = re.compile(r"\S+\.(?:h|hpp|cc|cpp|cu):\d+ [^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()\s]*)+ (?:const )?")
"""File, line and signature of the C++ function that failed; parentheses may be nested once."""
_PIECE_PIXELS = 2 * 224**2
"""Pixels of the images that run at once on a core. See `OnnxModel`."""
_UNCUT = 2**31
_LEAST_SLICE = 4
"""Images per slice below which a further thread is not worth it."""


class OnnxModel:
    """A loaded network, or its head or tail; implements `tierkit.inference.model.Model` and `Loadable`.

    The whole network and a tail give `logits` and `probabilities` (FP32 `[n, classes]`), a head gives `features`
    (FP32 `[n, channels, h, w]`). The whole and a head take `images` (UINT8 `[n, h, w, 3]`), a tail takes `features`.

    Large images run in pieces of a few, because the intermediate values of a piece fit the processor's caches.

    With more than one thread a batch is cut into one slice for each thread, and the slices run at the same time. ONNX
    Runtime would put all threads on each operator in turn: they would wait for each other about a hundred times a
    batch, which costs processor time, in particular on cores that other programs use. A single image takes one thread.

    A network whose graph fixes the batch at one image runs one image after another, and takes batches as the others.

    Args:
        opened: makes ONNX Runtime's session; called at once, and for each load after an unload.
    """

    def __init__(
        self,
        entry: ModelEntry,
        part: Part,
        sha256: str,
        opened: Callable[[], Any],
        labels: tuple[str, ...],
        provider: str,
        *,
        name: str | None = None,
        threads: int = 1,
        decode: Decode | None = None,
    ) -> None:
        self.entry = entry
        self._decode = decode
        self.part: Part = part
        self._name = name or (entry.name if part == "whole" else f"{entry.name}-{part}")
        self.provider = provider
        self._sha256 = sha256
        self._opened = opened
        self._session = opened()
        self._by_one = takes_one(self._session)
        self._labels = labels
        self._threads = threads
        height, width, _ = entry.input_shape
        self._piece = max(1, _PIECE_PIXELS // (height * width)) if provider == "cpu" else _UNCUT
        if self._by_one:
            self._piece = 1
        self._helpers = _helpers(threads)

    @property
    def name(self) -> str:
        """Name in the manifest. A part of a network has `-head` or `-tail` after it; an encoder's tail is called as the
        encoder is."""
        return self._name

    @property
    def platform(self) -> str:
        return "onnxruntime_onnx"

    @property
    def threads(self) -> int:
        """See `tierkit.inference.model.Divisible`."""
        return self._threads

    @property
    def steady(self) -> bool:
        """True if it computes on this machine's own processor; see `tierkit.inference.model.Steady`."""
        return self.provider == "cpu"

    @property
    def sha256(self) -> str:
        """Digest of the network's weights file; a part has the digest of the whole file."""
        return self._sha256

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """`images`, or `features` for a tail."""
        return tuple(replace(_any_batch(_spec(each)), decode=self._decode) for each in self._session.get_inputs())

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """`logits` and `probabilities`, or `features` for a head."""
        stored = tuple(_any_batch(_spec(each)) for each in self._session.get_outputs())
        if self.part == "head":
            return stored
        return (*stored, TensorSpec(name="probabilities", datatype="FP32", shape=stored[0].shape))

    @property
    def labels(self) -> Mapping[str, Sequence[str]]:
        """Class names of `logits` and `probabilities`; a head has none."""
        return {} if self.part == "head" else {"logits": self._labels, "probabilities": self._labels}

    @property
    def parameters(self) -> Mapping[str, str | int | float | bool]:
        """Facts from the manifest about the network; accuracies that it lacks are left out."""
        entry = self.entry
        if self.part == "head":
            entry = entry.model_copy(update={"parameters": entry.head_parameters})
        return facts_of(entry) | {"provider": self.provider}

    def load(self) -> None:
        """See `tierkit.inference.model.Loadable`."""
        if self._session is None:
            self._session, self._helpers = self._opened(), _helpers(self._threads)

    def unload(self) -> None:
        """See `tierkit.inference.model.Loadable`."""
        _ = self.inputs, self.outputs  # which are read from the session
        self._session = None
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Map a batch to the outputs asked for; see `tierkit.inference.model.Model.run`."""
        if not outputs:
            return {}
        stored = FEATURES if self.part == "head" else "logits"
        value = self._run(stored, dict(inputs))
        answer: dict[str, Array] = {stored: value} if stored in outputs else {}
        if "probabilities" in outputs:
            answer["probabilities"] = softmax(value, self.entry.temperature)
        return answer

    def _run(self, output: str, inputs: dict[str, Array]) -> Array:
        images = len(next(iter(inputs.values())))
        slices = min(CORES.get() or self._threads, images // min(self._piece, _LEAST_SLICE))
        if self._helpers is None or slices < 2:
            return self._run_slice(output, inputs)
        ends = [images * number // slices for number in range(slices + 1)]
        first, *rest = ({name: array[a:b] for name, array in inputs.items()} for a, b in pairwise(ends))
        others = [self._helpers.submit(self._run_slice, output, part) for part in rest]
        try:
            own = self._run_slice(output, first)
        finally:
            wait(others)
        return np.concatenate([own, *(other.result() for other in others)])

    def _run_slice(self, output: str, inputs: dict[str, Array]) -> Array:
        """Run images on one core, piece by piece."""
        starts = range(0, max(1, len(next(iter(inputs.values())))), self._piece)
        pieces = [{name: array[at : at + self._piece] for name, array in inputs.items()} for at in starts]
        answers = [np.asarray(self._session.run([output], piece)[0]) for piece in pieces]
        return answers[0] if len(answers) == 1 else np.concatenate(answers)


def _helpers(threads: int) -> ThreadPoolExecutor | None:
    """Threads that compute slices next to the caller's; they begin with the first slice."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="slice") if threads > 1 else None


def takes_one(session: Any) -> bool:
    """True if a graph fixes the batch at one image."""
    return bool(session.get_inputs()[0].shape[0] == 1)


def run_session(session: Any, output: str, inputs: Mapping[str, Array]) -> Array:
    """An output for a batch; one image after another if the graph takes no more at once."""
    images = len(next(iter(inputs.values())))
    if images <= 1 or not takes_one(session):
        (value,) = session.run([output], dict(inputs))
        return np.asarray(value)
    singles = ({name: array[at : at + 1] for name, array in inputs.items()} for at in range(images))
    return np.concatenate([session.run([output], one)[0] for one in singles])


def facts_of(entry: ModelEntry) -> dict[str, str | int | float | bool]:
    """Facts from the manifest about a network, used as its metadata; accuracies that it lacks are left out."""
    facts: dict[str, str | int | float | None] = {
        "target": entry.target,
        "tier": entry.tier,
        "precision": entry.precision,
        "parameters": entry.parameters,
        "temperature": entry.temperature,
        "reading": entry.reading,
        "coarse_accuracy": entry.coarse_accuracy,
        "fine_accuracy": entry.fine_accuracy,
    }
    return {key: value for key, value in facts.items() if value is not None}


def softmax(logits: Array, temperature: float = 1.0) -> Array:
    """`softmax(logits / temperature)` along the last axis, in the dtype of `logits`."""
    scaled = logits / logits.dtype.type(temperature)
    # The largest logit is subtracted so that no exponential overflows.
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def verify_file(entry: WeightsFile, folder: Path) -> Path:
    """Path of the entry's weights file, whose sha256 was compared with the manifest's.

    Raises:
        WeightsError: the file is missing or differs; the message names it.
    """
    path, _ = _read_verified(entry, folder)
    return path


def check_threads(threads: int) -> None:
    """Refuse what would only make the threads wait for one another.

    Raises:
        SetupError: more threads than the machine has cores.
    """
    cores = os.cpu_count() or 1
    if threads > cores:
        noun = "core" if cores == 1 else "cores"
        raise SetupError(f"{threads} threads are asked for, and this machine has {cores} {noun}: take at most {cores}")


def load_model(
    entry: ModelEntry,
    folder: Path | None = None,
    *,
    provider: str = "cpu",
    threads: int = 1,
    part: Part = "whole",
    labels: Sequence[str] | None = None,
    decode: Decode | None = None,
) -> OnnxModel:
    """Load a network, or its head or tail, ready to run.

    Args:
        entry: the network's entry in the manifest.
        folder: folder of its file; the bundled weights by default.
        provider: "cpu" or "cuda".
        threads: CPU threads per call of `run`; a GPU takes the batch whole.
        part: "whole", "head" (`images` to `features`) or "tail" (`features` to `logits`).
        labels: class names of the outputs; by default from the manifest in `folder`, else from the bundled one.
        decode: decoder of images that come as files.

    Raises:
        WeightsError: the file is missing, differs from the manifest, or does not fit it.
        SetupError: more threads than the machine has cores.
        MissingExtra: ONNX Runtime is not installed.
        ProviderUnavailable: the installed ONNX Runtime cannot use `provider`.
    """
    return _load(entry, folder, part, part, None, provider=provider, threads=threads, labels=labels, decode=decode)


def load_encoder(
    encoder: EncoderEntry,
    network: ModelEntry,
    side: Side,
    folder: Path | None = None,
    *,
    provider: str = "cpu",
    threads: int = 1,
    labels: Sequence[str] | None = None,
) -> OnnxModel:
    """Load the head (`images` to `features`) or the tail (`features` to `logits`) of an encoder. The tail is called
    `encoder.name`, the head `encoder.name` plus `-head`.

    Args:
        encoder: the encoder's entry in the manifest.
        network: the manifest's entry for `encoder.network`.
        side: "head" or "tail".
        folder: folder of that side's file; the bundled weights by default.
        provider, threads, labels: see `load_model`.

    Raises:
        The errors of `load_model`.
    """
    file = encoder.head if side == "head" else encoder.tail
    as_network = entry_of(encoder, network, side)
    name = encoder.head_name if side == "head" else encoder.name
    return _load(as_network, folder, side, file.part, name, provider=provider, threads=threads, labels=labels)


def entry_of(encoder: EncoderEntry, network: ModelEntry, side: Side) -> ModelEntry:
    """The head or tail of an encoder as if it were a network of the manifest, called as the encoder is."""
    file = encoder.head if side == "head" else encoder.tail
    return network.model_copy(
        update={
            "name": encoder.name,
            "file": file.file,
            "sha256": file.sha256,
            "size_bytes": file.size_bytes,
            "costs": file.costs,
            "feature_shape": encoder.feature_shape,
            "temperature": encoder.temperature,
            "coarse_accuracy": encoder.coarse_accuracy,
            "fine_accuracy": encoder.fine_accuracy,
            "head_parameters": encoder.head_parameters,
            "parameters": encoder.parameters,
        }
    )


def _load(
    entry: ModelEntry,
    folder: Path | None,
    part: Part,
    cut: Part,
    name: str | None,
    *,
    provider: str,
    threads: int,
    labels: Sequence[str] | None,
    decode: Decode | None = None,
) -> OnnxModel:
    """`part`: the part that the loaded graph is; `cut`: the part of the file to take."""
    import_runtime()  # told before the file is read
    check_threads(threads)
    place = folder or weights_folder()
    names = tuple(labels) if labels is not None else _labels(entry, place)

    def opened() -> Any:
        path, network = _read_verified(entry, place)
        try:
            network = extract_part(network, cut)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        return open_session(network, str(path), provider=provider)

    threads = threads if provider == "cpu" else 1
    model = OnnxModel(entry, part, entry.sha256, opened, names, provider, name=name, threads=threads, decode=decode)
    _check_fit(model, place / entry.file)
    return model


def open_session(network: bytes, source: str, *, provider: str = "cpu") -> Any:
    """ONNX Runtime's session for a network, on one thread.

    Args:
        source: names the network in messages.

    Raises:
        WeightsError: ONNX Runtime cannot load it.
        MissingExtra, ProviderUnavailable: see `load_model`.
    """
    runtime = import_runtime()
    wanted = _PROVIDERS.get(provider)
    if wanted is None:
        raise ProviderUnavailable(f"no execution provider {provider!r}; there is: {', '.join(_PROVIDERS)}")
    if wanted not in runtime.get_available_providers():
        raise ProviderUnavailable(
            f"the installed ONNX Runtime has no {wanted}; provider {str(provider)!r} needs the extra "
            f"'{'gpu' if provider == 'cuda' else 'cpu'}' and its drivers"
        )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Several nodes share the cores of one machine: a thread that waits must sleep, not spin.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        session = runtime.InferenceSession(network, options, providers=[wanted])
    except Exception as error:  # the runtime's own classes share no base but Exception
        raise WeightsError(f"ONNX Runtime cannot load {source}: {plain(str(error))}") from error
    if wanted not in session.get_providers():
        raise ProviderUnavailable(
            f"ONNX Runtime could not start {wanted}; its libraries or a device are missing on this machine"
        )
    return session


def plain(message: str) -> str:
    """An error message of ONNX Runtime as part of a sentence: without error codes, source files and signatures."""
    text = _CODE.sub("", " ".join(message[:_MOST_READ].split()))
    return _PLACE.sub("", text)[:_MOST_SAID].rstrip(" .")


def _read_verified(entry: WeightsFile, folder: Path) -> tuple[Path, bytes]:
    path = folder / entry.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot read the weights of {entry.name!r}, {path}: {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise WeightsError(
            f"{path} is not the file of the manifest: {len(content)} bytes with sha256 {found}, "
            f"expected {entry.size_bytes} with {entry.sha256}"
        )
    return path, content


def _labels(entry: ModelEntry, folder: Path) -> tuple[str, ...]:
    try:
        return load_manifest(folder).labels(entry)
    except WeightsError:
        # A node's cache folder holds weights but no manifest; its networks are those of the bundled one.
        return load_manifest().labels(entry)


def _check_fit(model: OnnxModel, path: Path) -> None:
    entry = model.entry
    images = TensorSpec(name="images", datatype="UINT8", shape=(-1, *entry.input_shape))
    features = TensorSpec(
        name=FEATURES, datatype="FP32", shape=(-1, *(() if model.part == "whole" else entry.cut.shape))
    )
    logits = TensorSpec(name="logits", datatype="FP32", shape=(-1, entry.classes))
    want = (features if model.part == "tail" else images, features if model.part == "head" else logits)
    have = (model.inputs[0], model.outputs[0])
    if have != want:
        raise WeightsError(f"{path} does not fit its manifest entry {entry.name!r}: {have}, expected {want}")
    if model.part != "head" and len(model.labels["logits"]) != entry.classes:
        raise WeightsError(
            f"{entry.name!r} gives {entry.classes} classes, the hierarchy names {len(model.labels['logits'])}"
        )


def _any_batch(spec: TensorSpec) -> TensorSpec:
    """Return the spec for any number of images. A graph that takes one image is run once for each."""
    return replace(spec, shape=(-1, *spec.shape[1:]))


def _spec(tensor: Any) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(name=tensor.name, datatype=_DATATYPES.get(tensor.type, tensor.type), shape=shape)


def import_runtime() -> Any:
    """ONNX Runtime.

    Raises:
        MissingExtra: it is not installed.
        SetupError: it is installed, and does not start here.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingExtra("cpu", "running a network with ONNX Runtime") from error
    except ImportError as error:
        raise SetupError(
            f"ONNX Runtime is installed, but does not start: {error}. Too little memory is a usual reason"
        ) from error
    return onnxruntime
