"""An engine that answers with the mean brightness of an image: the brighter, the higher the number of its class."""

from collections.abc import Sequence

import numpy as np

from cloud_node.engines.kind import EngineKind
from cloud_node.engines.model import EngineModel
from cloud_node.settings import CloudSettings
from encryption.loading import load_served
from models.manifest import EncoderEntry, Manifest, ModelEntry
from models.serving import decode_of
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.served import ServedModels
from tierkit.tensors import Array, TensorSpec
from tierkit.types import Tier


class _Brightness:
    replicas = 1

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def compute(self, model: str, pieces: Sequence[Array]) -> Sequence[Array]:
        return [self._logits(piece) for piece in pieces]

    def _logits(self, images: Array) -> Array:
        place = images.mean(axis=(1, 2, 3)) / 256 * self._classes
        return 10 * np.eye(self._classes, dtype=np.float32)[place.astype(int)]


class _Loader:
    def __init__(self, settings: CloudSettings, manifest: Manifest) -> None:
        self._settings, self._manifest = settings, manifest

    async def network(self, entry: ModelEntry) -> EngineModel:
        labels = self._manifest.labels(entry)
        decode = decode_of(self._manifest, entry)
        takes = TensorSpec(name="images", datatype="UINT8", shape=(-1, *entry.input_shape), decode=decode)
        most = self._settings.max_batch_size
        return EngineModel(
            entry, takes, labels, platform="brightness", engine=_Brightness(len(labels)), most_images=most
        )

    async def tail(self, encoder: EncoderEntry) -> None:
        return None  # it takes no features


class _Mean(EngineKind):
    async def load(self, settings: CloudSettings, manifest: Manifest, lifecycle: Lifecycle) -> ServedModels:
        return await load_served(settings, Tier.CLOUD, manifest, _Loader(settings, manifest))


ENGINE = _Mean()
