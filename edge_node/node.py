"""What an edge node does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

import aiohttp

from edge_node.settings import EdgeSettings
from encryption.heads import Encoders
from encryption.sending import Call, FeatureClient, Reply, TakesFeatures
from tierkit.http.lifecycle import Lifecycle
from tierkit.inference.model import Array, Model
from tierkit.inference.node import InferenceNode, ServedModels
from tierkit.inference.oip_client import OipClient
from tierkit.types import Tier

__all__ = ["EdgeNode"]


class EdgeNode(InferenceNode):
    """Gives the fine answer near the end devices, with a network of medium size; and encodes images for an upper node
    that must not see them, in the place of a weak end device (section 4.4 of the paper).

    Args:
        settings: of the node.
        models: what it serves.
        lifecycle: of the process.
        encoders: that it holds.
        middlewares: that its own requests pass.
    """

    tier: ClassVar[Tier] = Tier.EDGE
    settings: EdgeSettings

    def __init__(
        self,
        settings: EdgeSettings,
        models: Sequence[Model] | ServedModels,
        lifecycle: Lifecycle,
        encoders: Encoders | None = None,
        *,
        middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    ) -> None:
        self._encoders = encoders or Encoders((), settings)
        super().__init__(settings, models, lifecycle, self._encoders, middlewares=middlewares)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._features = FeatureClient(OipClient(self.http), self.settings.node_id)
        return self

    async def pass_on(self, to: TakesFeatures, images: Array, call: Call) -> Reply:
        """Encode images, UINT8 `[n, h, w, 3]`, and ask the upper node about their features, both in the budget of the
        call.

        Raises:
            NotFound, EncoderMismatch: the encoder is not at hand.
            TerraceError: as `ModelRunner.infer` and `OipClient.infer`.
        """
        began = time.monotonic()
        encoded = await self._encoders.encode(images, to.encoding, budget_s=call.budget_s)
        if call.budget_s is not None:
            call = replace(call, budget_s=call.budget_s - (time.monotonic() - began))
        return await self._features.infer(to, encoded.features, call, encode_s=encoded.encode_s)
