"""Webhooks: what the answer of a receiver means."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from scheduler.core.outbox import SinkEvent
from scheduler.sinks.protocol import SinkContext
from scheduler.sinks.webhook import WEBHOOK, WebhookOptions
from tests.receivers import Receiver, receiving
from tierkit.errors import ReceiverGone, Rejected, TerraceError, Unavailable

EVENT = SinkEvent(number=7, type="job.failed", key="job/1", at=1_700_000_000.25, data={"id": "1"})


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def refusal_by(receiver: Receiver) -> TerraceError:
    context = SinkContext(name="hook", allow_private=True)
    async with WEBHOOK.open(WebhookOptions(url=receiver.url), context) as delivery:
        with pytest.raises(TerraceError) as refused:
            await delivery.deliver(EVENT)
    return refused.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Rejected) for status in (400, 402, 405, 409, 413, 415, 422, 451)),
        *((status, Unavailable) for status in (401, 403, 404, 408, 425, 429, 500, 502, 503, 599)),
        *((status, Unavailable) for status in (301, 302, 303, 307, 308)),
        (410, ReceiverGone),
    ],
)
async def test_a_refusal_is_for_good_for_now_or_of_all(
    receiver: Receiver, status: int, kind: type[TerraceError]
) -> None:
    receiver.status = status
    refused = await refusal_by(receiver)
    assert type(refused) is kind
    assert str(refused).startswith(f"the receiver answered {status}: what the receiver says")


@pytest.mark.parametrize(("said", "wait_s"), [("7", 7.0), ("-7", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)])
async def test_a_receiver_may_say_when_to_try_again(receiver: Receiver, said: str, wait_s: float) -> None:
    receiver.status, receiver.headers = 503, {"Retry-After": said}
    refused = await refusal_by(receiver)
    assert isinstance(refused, Unavailable)
    assert refused.retry_after_s == wait_s


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_any_good_answer_will_do(receiver: Receiver, status: int) -> None:
    receiver.status = status
    context = SinkContext(name="hook", allow_private=True)
    async with WEBHOOK.open(WebhookOptions(url=receiver.url), context) as delivery:
        await delivery.deliver(EVENT)
    assert receiver.heads[0]["webhook-id"] == "evt_7"
    assert "webhook-signature" not in receiver.heads[0]
