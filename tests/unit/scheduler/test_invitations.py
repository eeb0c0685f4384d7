"""How many invitations the file of tokens takes, and which make room for others. Times are passed in."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from scheduler.runs.invitations import invited
from tierkit.access import TokenEntry, digest_of, read_book
from tierkit.access.editing import editing
from tierkit.errors import LimitReached, Overloaded

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
RUN, ENDED = "a" * 32, "b" * 32


def invitation(number: int, inviter: str = "alice", *, uses: int = 1, run: str = RUN, lasts_s: int = 60) -> TokenEntry:
    name = f"{inviter[:20]}.{number:06x}"
    return TokenEntry(
        name=name,
        role="worker",
        sha256=digest_of(name.encode()).hex(),
        created=datetime.fromtimestamp(NOON, UTC),
        expires=datetime.fromtimestamp(NOON + lasts_s, UTC),
        nodes=(f"{name}-*",),
        run=run,
        uses=uses,
        inviter=inviter,
    )


def test_nobody_has_more_than_twenty_or_more_than_a_thousand_uses() -> None:
    for full in (
        [invitation(number) for number in range(20)],
        [invitation(1, uses=400), invitation(2, uses=600)],
    ):
        with pytest.raises(LimitReached):
            invited(full, invitation(99), now=NOON, ended=())
        assert len(invited(full, invitation(99, "bob", uses=1_000), now=NOON, ended=())) == len(full) + 1


def test_expired_ones_go_and_those_of_ended_runs_where_room_is_needed() -> None:
    expired, ended = invitation(1, lasts_s=-1), invitation(2, run=ENDED, uses=500)
    admin = TokenEntry(name="ada", role="admin", sha256="0" * 64, expires=datetime.fromtimestamp(NOON - 1, UTC))
    few, much = invitation(3), invitation(4, uses=501)
    assert invited([admin, expired, ended], few, now=NOON, ended={ENDED}) == [admin, ended, few]
    assert invited([admin, expired, ended], much, now=NOON, ended={ENDED}) == [admin, much]


def test_all_invitations_leave_half_of_the_file_to_others_when_they_are_used_up(tmp_path: Path) -> None:
    path, number = tmp_path / "tokens.toml", 0
    entries: list[TokenEntry] = []

    def all_of(uses: int) -> None:
        nonlocal number, entries
        while True:
            number += 1
            inviter = f"{number:063}"
            entries = invited(entries, invitation(number, inviter, uses=uses), now=NOON, ended=())

    for uses in (1_000, 1):
        with pytest.raises(Overloaded):
            all_of(uses)
    names = tuple(f"{name:063}" for name in range(1_000))
    with editing(path) as written:
        written += [each.model_copy(update={"used": names[: each.uses]}) for each in entries]
    assert path.stat().st_size <= 2**21
    assert read_book(path)
