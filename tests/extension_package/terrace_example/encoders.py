"""Features whose channels go over the wire in reverse order."""

from encryption.hiding import Hiding
from models.manifest import EncoderEntry
from tierkit.tensors import Array


class _Reversed(Hiding):
    def hide(self, encoder: EncoderEntry, images: Array, features: Array, keys: Array | None) -> Array:
        return features[:, ::-1].copy()

    def restore(self, encoder: EncoderEntry, features: Array) -> Array:
        return features[:, ::-1].copy()


REVERSED = _Reversed()
