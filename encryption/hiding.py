"""The step between an encoder's head and the wire that hides the picture further, and its reverse before the tail."""

from __future__ import annotations

from typing import Protocol, cast

from models.manifest import EncoderEntry
from tierkit.extensions import load
from tierkit.tensors import Array

__all__ = ["GROUP", "Hiding", "hiding_of"]

GROUP = "terrace.encoders"


class Hiding(Protocol):
    """An entry point of `terrace.encoders`: changes the features of a head before they are rounded and sent.

    The manifest names it in the field `hiding` of an encoder. Both sides need the package: a node without it does not
    offer the encoder, and so sends or takes nothing in its place. A class that derives from it has to write only
    `hide`.
    """

    def hide(self, encoder: EncoderEntry, images: Array, features: Array, keys: Array | None) -> Array:
        """The features as they leave the device, which rounds them after that.

        Args:
            images: UINT8 `[n, h, w, 3]`.
            features: FP32 `[n, channels, h, w]`, as the head gives them. Not to be changed.
            keys: secrets of each image's job, UINT8 `[n, 32]`, which only nodes that see its pixels get. None if
                `encoder.noise` is 0.

        Returns:
            FP32 of the shape of `features`. For the same image and key it must be the same each time. Otherwise, an
            attacker could average several copies.
        """
        ...

    def restore(self, encoder: EncoderEntry, features: Array) -> Array:
        """Return the features that the tail gets, FP32 of the same shape.

        Args:
            features: FP32 `[n, channels, h, w]`, rounded. Not to be changed.
        """
        return features


def hiding_of(encoder: EncoderEntry) -> Hiding | None:
    """The hiding of an encoder; None without any. An encoder with noise has `encryption.noise.NOISE` by default.

    Raises:
        InvalidInput: no installed package adds it.
        BrokenExtension: its package cannot be used.
    """
    name = encoder.hiding or ("noise" if encoder.noise else None)
    return None if name is None else cast(Hiding, load(GROUP, name))
