"""Routes of learning: labels of people, agreement between the tiers, and improvements of releases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.exceptions import RequestValidationError

from scheduler.api.observations import OwnName, in_sight
from scheduler.api.parameters import CURSOR, LIMIT, NodePath, OnlyNode, OnlySource, SequencePath, SourcePath
from scheduler.api.routing import (
    CHECKS,
    MISSING,
    NODES,
    NOSNIFF,
    OPERATORS,
    USERS,
    CallerOf,
    Service,
    SmallBody,
    only_of,
)
from scheduler.api.streams import NO_STORE
from scheduler.core.learning import SoughtPictures, Which
from tierkit.errors import InvalidInput
from tierkit.wire.learning import Improvement, ImprovementList, LabelNews, LearningNow, NewLabel
from tierkit.wire.messages import NODE_ID_PATTERN
from tierkit.wire.sources import ObservationPage

__all__ = ["learning"]

IN_SIGHT = [*USERS, Depends(in_sight)]
_PAGE = ObservationPage.model_json_schema(mode="serialization")


async def _picture(node_id: NodePath, source: SourcePath, sequence: SequencePath) -> tuple[str, str, int]:
    return node_id, source, sequence


PictureName = Annotated[tuple[str, str, int], Depends(_picture)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureQuery:
    """Query parameters that choose pictures."""

    which: Annotated[
        Which,
        Query(
            description="`disagree`: pictures without a label whose answers differ, or of which the device was unsure; "
            "the most useful first. `labelled`: pictures with a label. `answered`: pictures without a "
            "label that an upstream node has answered."
        ),
    ] = "disagree"
    node: OnlyNode = None
    source: OnlySource = None
    site: Annotated[str | None, Query(pattern=NODE_ID_PATTERN, description="Only sources of this site.")] = None
    least: Annotated[
        float, Query(ge=0, le=1, description="Least confidence of the upstream answers, with `answered`.")
    ] = 0.0


learning = APIRouter(tags=["learning"], dependencies=CHECKS, route_class=SmallBody)


@learning.put(
    "/v1/observations/{node_id}/{source}/{sequence}/label",
    status_code=204,
    responses={**MISSING, 409: {"description": "Too many pictures of this source are labelled."}},
    summary="Label the picture of an observation",
    dependencies=IN_SIGHT,
)
async def put_label(scheduler: Service, caller: CallerOf, picture: PictureName, new: NewLabel) -> None:
    """Only pictures that the scheduler has can be labelled, with the name of a class. A new label replaces the old one.
    422: the fleet has no class with this name."""
    try:
        label = scheduler.learning.class_called(new.label)
    except InvalidInput as exc:
        raise RequestValidationError([{"loc": ("body", "label"), "msg": str(exc), "type": "value_error"}]) from exc
    await scheduler.learning.label(picture, label, None if caller is None else caller.name)


@learning.delete(
    "/v1/observations/{node_id}/{source}/{sequence}/label",
    status_code=204,
    responses={**MISSING, 403: {"description": "Another user has set it."}},
    summary="Take a label back",
    dependencies=IN_SIGHT,
)
async def delete_label(scheduler: Service, caller: CallerOf, picture: PictureName) -> None:
    """Operators take back any label, other users only their own."""
    by, only_own = None if caller is None else caller.name, only_of(caller) is not None
    await scheduler.learning.take_back(picture, by, only_own=only_own)


@learning.get(
    "/v1/learning/pictures",
    summary="Pictures to label, with labels, or with answers from above",
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": _PAGE}}}},
    dependencies=USERS,
)
async def list_pictures(
    scheduler: Service,
    caller: CallerOf,
    wanted: Annotated[PictureQuery, Depends()],
    limit: Annotated[int, Query(ge=1, le=500, description=LIMIT)] = 50,
    cursor: Annotated[str | None, Query(max_length=500, description=CURSOR)] = None,
) -> Response:
    """Only pictures that the scheduler has. A page may be short or empty and still have a `next_cursor`: continue until
    it is null."""
    sought = SoughtPictures(
        which=wanted.which,
        node_id=wanted.node,
        source=wanted.source,
        site=wanted.site,
        least=wanted.least,
        reader=only_of(caller),
    )
    rows, next_cursor = await scheduler.learning.pictures(sought, limit, cursor)
    content = msgspec.json.encode({"observations": rows, "next_cursor": next_cursor})
    return Response(content, media_type="application/json", headers={**NO_STORE, **NOSNIFF})


@learning.get(
    "/v1/devices/{node_id}/labels",
    response_model=LabelNews,
    summary="New labels of a node's own pictures",
    dependencies=NODES,
)
async def list_labels(
    scheduler: Service,
    node_id: OwnName,
    after: Annotated[
        int, Query(ge=0, le=2**53, description="Only higher numbers: the newest one that the node knows.")
    ] = 0,
) -> LabelNews:
    """For nodes: labels that were set or taken back after a number, each picture once. Answers to heartbeats and
    observations have the newest number in the header `Terrace-Labels`."""
    return await scheduler.learning.news(node_id, after)


@learning.get(
    "/v1/learning", response_model=LearningNow, summary="Kept pictures and agreement of the tiers", dependencies=USERS
)
async def get_learning(scheduler: Service, caller: CallerOf) -> LearningNow:
    """Limited to the sources that the caller may see. A picture counts as audited if its device was sure and sent it up
    nevertheless (`audit_share`). The figures cover the latest 1,000 audited pictures of each source."""
    return await scheduler.learning.now(only_of(caller))


@learning.get(
    "/v1/improvements", response_model=ImprovementList, summary="Improvements of releases", dependencies=USERS
)
async def list_improvements(scheduler: Service) -> ImprovementList:
    """The newest 100, the newest first."""
    return ImprovementList(improvements=scheduler.learning.improvements)


@learning.put(
    "/v1/improvements/{id}",
    response_model=Improvement,
    summary="Store the state of an improvement",
    dependencies=OPERATORS,
)
async def put_improvement(
    scheduler: Service,
    caller: CallerOf,
    id: Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="Id of the improvement, 32 hex digits.")],
    improvement: Improvement,
) -> Improvement:
    """For operators. Replaces the whole document; the scheduler fills in `created_at`, `told_at` and `by`."""
    if improvement.id != id:
        raise InvalidInput("id: it must be the id in the path")
    return await scheduler.learning.put_improvement(improvement, None if caller is None else caller.name)
