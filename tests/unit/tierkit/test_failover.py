"""Which error means that another scheduler is to be asked, and which address is asked then."""

import pytest

from tierkit.errors import (
    CertificateError,
    Conflict,
    DeadlineExceeded,
    Draining,
    Forbidden,
    InvalidInput,
    LimitReached,
    NotFound,
    Overloaded,
    Standby,
    TerraceError,
    Unauthenticated,
    Unavailable,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from tierkit.http.failover import Ring, Round, leads_elsewhere

A, B, C = "http://a:8070", "http://b:8070", "http://c:8070"


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (Standby("a standby"), True),
        (UpstreamUnavailable("refused"), True),
        (UpstreamTimeout("silent"), True),
        (CertificateError("expired"), True),
        (UpstreamError("a page of a proxy", status_code=502), True),
        (UpstreamError("a page of a proxy", status_code=503), True),
        (UpstreamError("a page of a proxy", status_code=504), True),
        (UpstreamError("a mistake of the one that leads", status_code=500), False),
        (UpstreamError("no lease"), False),
        (Unauthenticated("no token"), False),
        (Forbidden("not yours"), False),
        (NotFound("no such node"), False),
        (Conflict("two of one name"), False),
        (InvalidInput("no"), False),
        (Unavailable("starting"), False),
        (Overloaded("full"), False),
        (Draining("ends"), False),
        (LimitReached("slower"), False),
        (DeadlineExceeded("the job's budget"), False),
    ],
    ids=lambda value: f"{type(value).__name__} {value}" if isinstance(value, TerraceError) else "",
)
def test_which_errors_send_to_the_next_one(error: TerraceError, elsewhere: bool) -> None:
    assert leads_elsewhere(error) is elsewhere
    ring = Ring([A, B])
    assert (Round(ring).failed(A, error) is None) is elsewhere
    assert ring.current == (B if elsewhere else A)


def test_the_ring_goes_round() -> None:
    ring = Ring([A, B, A, C])
    seen = []
    for _ in range(5):
        seen.append(ring.current)
        ring.leave(ring.current)
    assert seen == [A, B, C, A, B]


def test_an_address_is_left_once_however_many_requests_met_its_end() -> None:
    ring = Ring([A, B, C])
    for _ in range(3):
        ring.leave(A)
    assert ring.current == B


def test_each_address_is_asked_once_in_a_round() -> None:
    ring = Ring([A, B, C])
    ring.leave(A)
    asked = Round(ring)
    for _ in range(2):
        assert asked.failed(B, Standby("waits", retry_after_s=7)) is None
        assert asked.failed(C, UpstreamUnavailable("refused")) is None
        end = asked.failed(A, UpstreamTimeout("silent"))
        assert isinstance(end, Standby), "somebody is there to lead"
        assert all(word in str(end) for word in (A, B, C, "waits", "refused", "silent"))
        assert end.retry_after_s == 7
        assert ring.current == B


def test_where_nobody_stands_by_the_error_says_so() -> None:
    asked = Round(Ring([A, B]))
    assert asked.failed(A, UpstreamUnavailable("refused")) is None
    end = asked.failed(B, UpstreamUnavailable(f"no route to {B}"))
    assert type(end) is UpstreamUnavailable
    assert str(end).count(B) == 1


def test_a_refusal_of_the_one_that_leads_ends_the_round_as_it_is() -> None:
    asked, refusal = Round(Ring([A, B, C])), NotFound("no such node")
    assert asked.failed(A, Standby("waits")) is None
    assert asked.failed(B, refusal) is refusal
    assert asked.failed(B, UpstreamUnavailable("refused")) is None, "of a new round"
    assert asked.failed(C, UpstreamUnavailable("refused")) is None


def test_the_error_of_an_only_address_is_its_own() -> None:
    ring, error = Ring([A]), Standby("waits", retry_after_s=3)
    asked = Round(ring)
    assert asked.failed(A, error) is error
    assert asked.failed(A, error) is error
    assert ring.current == A
