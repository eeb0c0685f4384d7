"""What a cloud node does."""

from __future__ import annotations

from typing import ClassVar

from tierkit.inference.node import InferenceNode
from tierkit.types import Tier

__all__ = ["CloudNode"]


class CloudNode(InferenceNode):
    """Gives the fine answer of the strongest network, far away and, unless the scheduler says otherwise, untrusted."""

    tier: ClassVar[Tier] = Tier.CLOUD
