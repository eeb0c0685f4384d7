"""Settings of emulation, in addition to the service's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
from pydantic import ValidationInfo, field_validator

from experiments.emulation.compute import Answers, EmulatedModel, emulate
from experiments.emulation.links import EmulatedMs, read_links
from experiments.emulation.middleware import LinkMiddleware
from tierkit.inference.model import Model
from tierkit.inference.served import ServedModels, Substitutes
from tierkit.settings import NodeSettings, ServiceSettings, UserPath

__all__ = ["EmulatedLinks", "EmulatedNode"]

log = logging.getLogger(__name__)


class EmulatedLinks(ServiceSettings):
    """Options of every emulated service."""

    links: UserPath | None = None
    """TOML file of emulated links that this service's own requests pass. Default: none."""

    def middlewares(self) -> Sequence[aiohttp.ClientMiddlewareType]:
        """The links, which the log names.

        Raises:
            SetupError: the file cannot be used.
        """
        if self.links is None:
            return ()
        links = read_links(self.links)
        names = ", ".join(link.name for link in links.link)
        log.warning("EMULATED LINKS are active: requests are delayed on purpose", extra={"links": names})
        return (LinkMiddleware(links),)


class EmulatedNode(EmulatedLinks, NodeSettings):
    """Further options of an emulated node."""

    emulate_ms_per_image: EmulatedMs | None = None
    """Milliseconds that the models take for an image instead of their real time; at most an hour. Default: none."""

    emulate_encode_ms_per_image: EmulatedMs | None = None
    """Milliseconds that encoding an image takes instead of its real time; at most an hour. Default: none."""

    emulate_answers: UserPath | None = None
    """File of answers computed beforehand. A model that is slower here than `emulate_ms_per_image` needs it."""

    @field_validator("emulate_answers")
    @classmethod
    def _for_emulated_models(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("emulate_ms_per_image") is None:
            raise ValueError("needs emulate_ms_per_image as well")
        return value

    def substitutes(self) -> Substitutes:
        """Return the parts that replace the node's own."""
        return Substitutes(served=self._served, head=self._head, middlewares=self.middlewares())

    def _served(self, models: ServedModels) -> ServedModels:
        ms_per_image = self.emulate_ms_per_image
        if ms_per_image is None:
            return models
        answers = None if self.emulate_answers is None else Answers.load(self.emulate_answers, models.ready)

        def emulated(some: Sequence[Model]) -> Sequence[Model]:
            return emulate(some, ms_per_image, answers)

        standby = {like: emulated(others) for like, others in models.standby.items()}
        return replace(models, ready=emulated(models.ready), standby=standby)

    def _head(self, head: Model) -> Model:
        pace = self.emulate_encode_ms_per_image
        return head if pace is None else EmulatedModel(head, pace)
