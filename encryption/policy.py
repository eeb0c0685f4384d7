"""In which form the images of a task may go to a node."""

from __future__ import annotations

from enum import StrEnum

from tierkit.errors import Forbidden
from tierkit.types import Privacy

__all__ = ["Form", "Trust", "decide_form"]


class Trust(StrEnum):
    """Whether a node may see the user's pixels. The scheduler's own list says so, never the node."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"


class Form(StrEnum):
    """What stands on the wire for an image."""

    PIXELS = "pixels"
    FEATURES = "features"
    """The output of the upper network's first layers, which run below."""


def decide_form(privacy: Privacy, trust: Trust, *, encoder_at_hand: bool = False) -> Form:
    """The form in which images go to a node of this trust.

    Args:
        encoder_at_hand: whether the sender holds the encoder of the node's model.

    Raises:
        Forbidden: no form is allowed; the sentence says what to do.
    """
    if trust is Trust.TRUSTED:
        return Form.PIXELS
    if privacy is Privacy.NONE:
        raise Forbidden(
            "privacy 'none' would send pixels to an untrusted node: ask for privacy 'auto', "
            "or have the node listed as trusted"
        )
    if not encoder_at_hand:
        raise Forbidden(
            "pixels may not go to an untrusted node, and there is no encoder to hide them: "
            "choose a scheme that stays on trusted nodes, or have the node listed as trusted"
        )
    return Form.FEATURES
