"""Routes of hosts that wait for a person to start a run on them. docs/how-to/volunteers.md describes them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.exceptions import RequestValidationError

from scheduler.api.routing import CHECKS, MISSING, USERS, CallerOf, Service, SmallBody, only_of
from tierkit.wire.offers import HostOffer, OfferedStart, OfferList, OfferOrders, StartWish
from tierkit.wire.runs import RUN_ID_PATTERN

__all__ = ["offers"]

OfferId = Annotated[
    str, Path(pattern=RUN_ID_PATTERN, description="Id of the offer: 32 hex digits, chosen by the host.")
]

offers = APIRouter(tags=["training runs"], dependencies=CHECKS, route_class=SmallBody)


@offers.put(
    "/v1/offers/{offer_id}",
    response_model=OfferOrders,
    responses={
        409: {"description": "The id is the offer of somebody else."},
        429: {"description": "This caller has as many offers as are left for others."},
    },
    summary="Offer to train networks, every second",
    dependencies=USERS,
)
async def put_offer(scheduler: Service, caller: CallerOf, offer_id: OfferId, said: HostOffer) -> OfferOrders:
    """For hosts that wait for a start, every second. An offer ends when the host has not reported for 10 s. 409: the id
    belongs to another owner."""
    return scheduler.runs.offers.tell(offer_id, said, None if caller is None else caller.name)


@offers.get("/v1/offers", response_model=OfferList, summary="Hosts on which a run can be started", dependencies=USERS)
async def list_offers(scheduler: Service, caller: CallerOf) -> OfferList:
    """All hosts for operators, and only their own for users."""
    return OfferList(offers=scheduler.runs.offers.seen_by(only_of(caller)))


@offers.post(
    "/v1/offers/{offer_id}/runs",
    status_code=202,
    response_model=OfferedStart,
    responses=MISSING,
    summary="Start a training run on a host that offers it",
    dependencies=USERS,
)
async def start_run(scheduler: Service, caller: CallerOf, offer_id: OfferId, wish: StartWish) -> OfferedStart:
    """The host takes the start with its next report, or after the runs before it. Then `latest` of the offer has the id
    of the run. 422: the values are beyond the host's limits. 503: four starts already wait for this host."""
    only = only_of(caller)
    fault = scheduler.runs.offers.offer_of(offer_id, only).said.fault_of(wish)
    if fault is not None:
        field, why = fault
        raise RequestValidationError(
            [{"loc": ("body", field), "msg": why, "type": "value_error", "input": getattr(wish, field)}]
        )
    return scheduler.runs.offers.start(offer_id, wish, only)
