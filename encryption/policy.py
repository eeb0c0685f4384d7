"""The form in which images may go to a node: pixels only to trusted nodes, features to untrusted ones."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from tierkit.errors import Conflict, Forbidden
from tierkit.types import EncoderKind, Privacy

__all__ = ["Form", "Trust", "decide_form", "preferred"]


class Trust(StrEnum):
    """True if a node may see the user's pixels. The scheduler's own list says so, never the node."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class Form(StrEnum):
    """Form in which an image is sent."""

    PIXELS = "pixels"
    CONV1 = EncoderKind.CONV1.value
    BOTTLENECK = EncoderKind.BOTTLENECK.value


_PREFERRED = (EncoderKind.BOTTLENECK, EncoderKind.CONV1)


def preferred(kinds: Collection[EncoderKind]) -> EncoderKind | None:
    """The encoder that hides the most; None without any."""
    return next((kind for kind in _PREFERRED if kind in kinds), None)


def decide_form(
    privacy: Privacy,
    trust: Trust,
    encoders: Collection[EncoderKind] = (),
    *,
    encodes: bool = False,
    lacking: str = "the upstream node lacks the tail",
) -> Form:
    """Return the form in which images go to a node of this trust.

    Args:
        encoders: kinds that the node takes features of, and of which the sender holds the head.
        encodes: True if the node encodes for others in this job, so that it needs pixels.
        lacking: reason that an encoder is missing, used in messages.

    Raises:
        Forbidden: only pixels could be sent, and may not; the message names a way out.
        Conflict: the job asks for an encoder that is missing on one of the two sides.
    """
    trusted = trust is Trust.TRUSTED
    if trusted and encodes:
        return Form.PIXELS
    match privacy:
        case Privacy.NONE:
            if trusted:
                return Form.PIXELS
            raise Forbidden(
                "privacy 'none' would send pixels to an untrusted node: ask for privacy 'auto', "
                "or have the node listed as trusted"
            )
        case Privacy.AUTO:
            if trusted:
                return Form.PIXELS
            wanted = preferred(encoders)
            if wanted is None:
                raise Forbidden(
                    "pixels may not go to an untrusted node, and there is no encoder to hide them "
                    f"({lacking}): choose a scheme that stays on trusted nodes, or have the node listed as trusted"
                )
            return Form(wanted.value)
        case Privacy.CONV1 | Privacy.BOTTLENECK:
            if EncoderKind(privacy.value) not in encoders:
                raise Conflict(
                    f"privacy '{privacy}' needs that encoder's head where images are encoded and its tail on the upper "
                    f"node, and {lacking}: ask for privacy 'auto', or choose a scheme without that node"
                )
            return Form(privacy.value)
