"""Routes about the service: version, limits, classes, and sample pictures."""

from __future__ import annotations

import asyncio
import io
from functools import cache
from typing import Annotated

from fastapi import APIRouter, Path, Response
from PIL import Image

from models.data import ImageSet, read_sample
from models.hierarchy import bundled_hierarchy
from models.manifest import ModelEntry
from scheduler.api.privacy import has_audit
from scheduler.api.routing import (
    CHECKS,
    NOSNIFF,
    USERS,
    CallerOf,
    Service,
    SmallBody,
    sites_of,
)
from scheduler.api.schemas import ClassTree, NetworkInput, SchedulerInfo, UploadLimits
from scheduler.jobs.classify import CLASSIFY_MAX_IMAGES
from scheduler.jobs.service import Scheduler
from tierkit.distribution import installed_version
from tierkit.errors import NotFound
from tierkit.types import Tier

__all__ = ["about"]

_SAMPLES = 1000
"""Pictures of the bundled sample."""


about = APIRouter(tags=["about"], dependencies=CHECKS, route_class=SmallBody)


@about.get(
    "/v1/samples/{index}",
    summary="A test picture of Terrace",
    response_class=Response,
    responses={200: {"content": {"image/png": {}}}, 404: {"description": "There is none, or the set has none."}},
    dependencies=USERS,
)
async def get_sample(
    scheduler: Service,
    index: Annotated[
        int, Path(ge=0, le=999_999_999, description="Index of the picture, below `samples` of `GET /v1/info`.")
    ],
) -> Response:
    """One of the test pictures that come with Terrace, as PNG. The header `Terrace-Sample` holds its class. 404 if the
    fleet answers other classes; `samples` of `GET /v1/info` is then 0."""
    if index >= (samples := _samples(scheduler)):
        raise NotFound(f"no sample {index}: there are {samples}")
    content, label = await asyncio.to_thread(_sample, index)
    headers = {"Terrace-Sample": label, "Cache-Control": "private, max-age=86400", **NOSNIFF}
    return Response(content, media_type="image/png", headers=headers)


def _samples(scheduler: Scheduler) -> int:
    """Pictures that come with Terrace and have classes of this fleet."""
    return _SAMPLES if scheduler.manifest.hierarchy.digest == bundled_hierarchy().digest else 0


@cache
def _sample_set() -> ImageSet:
    return read_sample()


def _sample(index: int) -> tuple[bytes, str]:
    """A picture as PNG, and its class. Blocks."""
    sample, file = _sample_set(), io.BytesIO()
    assert sample.fine is not None
    Image.fromarray(sample.images[index]).save(file, "PNG")
    return file.getvalue(), bundled_hierarchy().fine[sample.fine[index]]


def _input_of(entry: ModelEntry) -> NetworkInput:
    """The input size of a network and its resize rule."""
    height, width, rule, resize_to, resample = entry.fit
    return NetworkInput(
        name=entry.name,
        tier=Tier(entry.tier),
        height=height,
        width=width,
        resize=rule,
        resize_to=resize_to,
        resample=resample,
    )


@about.get("/v1/info", response_model=SchedulerInfo, summary="Version, limits and class names", dependencies=USERS)
async def get_info(scheduler: Service, caller: CallerOf) -> SchedulerInfo:
    """Limits of uploads, networks with their input size, and the names of the classes."""
    limits, hierarchy = scheduler.settings, scheduler.manifest.hierarchy
    allowed = sites_of(caller)
    return SchedulerInfo(
        version=installed_version(),
        limits=UploadLimits(
            max_images=limits.max_images,
            max_upload_bytes=limits.max_body_bytes,
            max_pixels=limits.max_pixels,
            max_file_bytes=limits.max_file_bytes,
            max_inflated_bytes=limits.max_inflated_bytes,
            classify_max_images=CLASSIFY_MAX_IMAGES,
        ),
        input_shape=list(scheduler.manifest.models[0].input_shape),
        samples=_samples(scheduler),
        audit=has_audit(limits),
        # Names of other sites are not for a user who is limited to some.
        share=[rule for rule in limits.share if not allowed or rule.rpartition("=")[0] in ("", *allowed)],
        networks=[_input_of(entry) for entry in scheduler.manifest.models],
        hierarchy=ClassTree(
            name=hierarchy.name,
            fine=list(hierarchy.fine),
            coarse=list(hierarchy.coarse),
            parent=list(hierarchy.parent),
        ),
    )
