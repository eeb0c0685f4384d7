"""Tickets of training runs, in time that stands still."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tierkit.access import Authenticator, Role, Tickets, TokenEntry, digest_of, issued, secret_of_run, write_book
from tierkit.errors import Forbidden, Unauthenticated, Unavailable

RUN, OTHER = "a" * 32, "b" * 32
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
SECRET = secret_of_run(bytes(32), RUN, "alice", 1.5)
TOKEN = "terrace_of-a-person-who-is-called-eve"


def token(**fields: Any) -> TokenEntry:
    return TokenEntry.model_validate({"name": "vol", "role": "worker", "sha256": "1" * 64, **fields})


def ticket(secret: str = SECRET, run: str = RUN, worker: str = "vol-2", **fields: Any) -> str:
    return issued(secret, run, token(**fields), worker, NOON)[0]


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    """Of the run's host, at noon."""
    book = tmp_path / "tokens.toml"
    book.touch(mode=0o600)
    book.write_text(write_book([token(name="eve", sha256=digest_of(TOKEN.encode()).hex())]))
    authenticator = Authenticator(book, roles=("worker", "user"), wall=lambda: NOON)
    authenticator.tickets = Tickets(RUN)
    authenticator.tickets.secret = SECRET
    return authenticator


def headers(*tickets: str) -> list[tuple[bytes, bytes]]:
    return [(b"terrace-ticket", each.encode()) for each in tickets]


def test_a_ticket_opens_the_host_of_its_run_for_one_worker(authenticator: Authenticator) -> None:
    caller = authenticator.admit(headers(ticket()), method="POST")
    assert (caller.name, caller.role) == ("vol", "worker")
    caller.check_claim("vol-2")
    for other in ("vol", "vol-3", "vic", "vol-22"):
        with pytest.raises(Forbidden):
            caller.check_claim(other)
    with pytest.raises(Forbidden):
        caller.need("user")


@pytest.mark.parametrize(
    "wrong",
    [
        ticket(run=OTHER),
        ticket(secret=secret_of_run(bytes(32), OTHER, "alice", 1.5)),
        ticket(secret=secret_of_run(bytes(32), RUN, "mallory", 1.5)),
        ticket(secret=secret_of_run(bytes(32), RUN, "alice", 2.5)),
        ticket().replace("vol-2", "vic"),
        ticket().replace(":vol:", ":vic:"),
        ticket()[:-1],
        ticket() + "0",
        "",
        ":::::",
        "\xe9",
        TOKEN,
        f"Bearer {TOKEN}",
    ],
)
def test_what_is_no_ticket_of_the_run_opens_nothing(authenticator: Authenticator, wrong: str) -> None:
    with pytest.raises(Unauthenticated):
        authenticator.admit(headers(wrong))


def test_a_ticket_ends_with_its_time_and_with_its_token(authenticator: Authenticator) -> None:
    assert authenticator.tickets is not None
    short = datetime.fromtimestamp(NOON + 60, UTC)
    value, seconds = issued(SECRET, RUN, token(expires=short), "vol", NOON)
    assert seconds == 60
    authenticator.tickets.holder(value, NOON + 59)
    _, whole = issued(SECRET, RUN, token(), "vol", NOON)
    for kept, over in ((value, 60.0), (ticket(), whole)):
        with pytest.raises(Unauthenticated):
            authenticator.tickets.holder(kept, NOON + over)
    assert authenticator.tickets.seen == (token().id,)
    authenticator.tickets.revoked = frozenset(authenticator.tickets.seen)
    with pytest.raises(Unauthenticated):
        authenticator.admit(headers(ticket()))


def test_a_host_that_knows_no_secret_yet_asks_for_patience_and_stays_healthy(authenticator: Authenticator) -> None:
    authenticator.tickets = Tickets(RUN)
    with pytest.raises(Unavailable):
        authenticator.admit(headers(ticket()))
    assert not authenticator.knows(headers(ticket()))
    assert authenticator.admit([(b"authorization", f"Bearer {TOKEN}".encode())]).name == "eve"


def test_tickets_count_for_nothing_beside_a_token_or_twice_or_elsewhere(authenticator: Authenticator) -> None:
    with pytest.raises(Unauthenticated):
        authenticator.admit([*headers(ticket()), (b"authorization", b"Bearer nonsense")])
    with pytest.raises(Unauthenticated):
        authenticator.admit(headers(ticket(), ticket()))
    authenticator.tickets = None
    with pytest.raises(Unauthenticated):
        authenticator.admit(headers(ticket()))


def test_what_a_host_remembers_of_tickets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkit.access.tickets._MOST_SEEN", 3)
    tickets = Tickets(RUN)
    tickets.secret = SECRET
    for number in (1, 2, 3, 4, 2):
        tickets.holder(ticket(sha256=f"{number:08x}" + "0" * 56), NOON)
    assert tickets.seen == ("00000003", "00000004", "00000002")


def test_a_secret_is_as_long_as_what_it_is_made_from() -> None:
    assert len(bytes.fromhex(SECRET)) == 32


def test_a_host_that_has_the_schedulers_own_file_takes_no_invitation_in_place_of_a_ticket(tmp_path: Path) -> None:
    book = tmp_path / "tokens.toml"
    book.touch(mode=0o600)
    invitation = token(sha256=digest_of(TOKEN.encode()).hex(), run=RUN, uses=2, used=("vol-a",))
    book.write_text(write_book([invitation]))
    shown = [(b"authorization", f"Bearer {TOKEN}".encode())]
    with pytest.raises(Forbidden):
        Authenticator(book, roles=("worker", "user"), wall=lambda: NOON).admit(shown)
    guests: tuple[Role, ...] = ("guest",)
    caller = Authenticator(book, roles=guests, wall=lambda: NOON).admit(shown)
    assert (caller.role, caller.entry) == ("guest", invitation)
    with pytest.raises(ValidationError):
        token(uses=1)
    with pytest.raises(ValidationError):
        token(run=RUN)
    with pytest.raises(ValidationError):
        token(role="user", run=RUN, uses=1)
