"""What the commands do to a file of tokens."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tierkit.access import TokenEntry, digest_of, read_book
from tierkit.access.editing import added, editing, revoked, rotated
from tierkit.errors import Conflict, NotFound, SetupError

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def entry(token: str, name: str = "alice", **fields: Any) -> TokenEntry:
    return TokenEntry.model_validate(
        {"name": name, "role": "user", "sha256": digest_of(token.encode()).hex(), **fields}
    )


def test_a_name_gets_its_second_token_by_rotation_alone() -> None:
    one = entry("one")
    assert added([one], entry("two", "bob")) == [one, entry("two", "bob")]
    with pytest.raises(Conflict, match="terrace token rotate alice"):
        added([one], entry("two"))


def test_rotation_keeps_the_rights_and_lets_the_old_one_end() -> None:
    old = entry("old", created=NOON - 20 * DAY, expires=NOON + 10 * DAY, requests_per_minute=7)
    bob = entry("other", "bob")
    ended, kept, fresh = rotated([old, bob], "alice", "new", now=NOON, grace=DAY, lifetime=None)
    assert ended == old.model_copy(update={"expires": NOON + DAY})
    assert kept == bob
    assert fresh == entry("new", created=NOON, expires=NOON + 30 * DAY, requests_per_minute=7)


@pytest.mark.parametrize(
    ("expires", "lifetime", "old_until", "new_until"),
    [
        (None, None, NOON + DAY, None),
        (None, 2 * DAY, NOON + DAY, NOON + 2 * DAY),
        (NOON + timedelta(hours=1), 2 * DAY, NOON + timedelta(hours=1), NOON + 2 * DAY),
        (NOON - DAY, None, NOON - DAY, NOON + 9 * DAY),
    ],
)
def test_until_when_after_a_rotation(
    expires: datetime | None, lifetime: timedelta | None, old_until: datetime, new_until: datetime | None
) -> None:
    old = entry("old", created=NOON - 10 * DAY, expires=expires)
    ended, fresh = rotated([old], "alice", "new", now=NOON, grace=DAY, lifetime=lifetime)
    assert (ended.expires, fresh.expires) == (old_until, new_until)


def test_an_invitation_is_not_exchanged() -> None:
    one = entry("one", "alice.3fa9c1", role="worker", run="a" * 32, uses=1)
    with pytest.raises(Conflict, match="invite again"):
        rotated([one], one.name, "new", now=NOON, grace=DAY, lifetime=None)


def test_revocation_by_name_or_by_id() -> None:
    first, second, bob = entry("one"), entry("two"), entry("three", "bob")
    assert revoked([first, second, bob], "alice") == [bob]
    assert revoked([first, second, bob], second.id) == [first, bob]
    for which in ("carol", "", first.sha256):
        with pytest.raises(NotFound, match="no token has the name or id"):
            revoked([first], which)
    with pytest.raises(NotFound, match="'carol' has no token"):
        rotated([first], "carol", "new", now=NOON, grace=DAY, lifetime=None)


def test_the_file_is_made_for_its_owner_alone_and_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tokens.toml"
    with editing(path) as entries:
        entries.append(entry("one"))
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(NotFound), editing(path) as entries:
        entries[:] = revoked(entries[1:], "alice")
    assert list(read_book(path)) == [entry("one")]
    assert [found.name for found in path.parent.iterdir()] == ["tokens.toml"]


@pytest.mark.parametrize(
    "more",
    [
        [entry(f"token {number}", f"user-{number}") for number in range(10_001)],
        [
            entry(
                f"token {number}", "w", role="worker", run="a" * 32, uses=1_000, used=[f"{n:063}" for n in range(999)]
            )
            for number in range(70)
        ],
    ],
    ids=["tokens", "bytes"],
)
def test_a_file_that_could_not_be_read_again_is_not_written(more: list[TokenEntry], tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    with editing(path) as entries:
        entries.append(entry("one"))
    with pytest.raises(SetupError, match="revoke"), editing(path) as entries:
        entries += more
    assert list(read_book(path)) == [entry("one")]


def test_nobody_writes_over_the_change_of_another(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"

    def add(number: int) -> None:
        with editing(path) as entries:
            entries.append(entry(f"token {number}", f"user-{number}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert len(read_book(path)) == 24


@pytest.mark.parametrize(
    "spoil", [lambda path: path.chmod(0o644), lambda path: path.write_text("x"), lambda path: path.write_bytes(b"\xff")]
)
def test_a_file_that_cannot_be_trusted_is_not_written_over(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    with editing(path) as entries:
        entries.append(entry("one"))
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(SetupError, match=str(path)), editing(path):
        pass
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_leaves_the_file_to_the_services_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    path = tmp_path / "tokens.toml"
    with editing(path) as entries:
        entries.append(entry("one"))
    assert path.stat().st_uid == 12345
    # Root may read and write on what belongs to the service.
    with editing(path) as entries:
        entries.append(entry("two", "bob"))
    assert path.stat().st_uid == 12345
    with pytest.raises(SetupError, match="belongs to another user"):
        read_book(path)
