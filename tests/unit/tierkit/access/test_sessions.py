"""Session cookies, in time that stands still."""

from datetime import UTC, datetime, timedelta

import pytest

from tierkit.access import SESSION_COOKIE, Sessions, TokenEntry, digest_of
from tierkit.access.sessions import cookie_of
from tierkit.errors import Unauthenticated

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
NOW = NOON.timestamp()
HOURS = 3600
SECRET = bytes(range(32))


def entry(expires: datetime | None = None) -> TokenEntry:
    return TokenEntry(name="alice", role="user", sha256=digest_of(b"token").hex(), expires=expires)


@pytest.mark.parametrize(
    ("expires", "seconds"),
    [
        (None, 12 * HOURS),
        (NOON + timedelta(days=30), 12 * HOURS),
        (NOON + timedelta(hours=1), HOURS),
        (NOON - timedelta(hours=1), 0),
    ],
)
def test_a_session_lasts_no_longer_than_its_token(expires: datetime | None, seconds: int) -> None:
    sessions = Sessions(SECRET)
    value, lasts = sessions.issue(entry(expires), NOW)
    assert lasts == seconds
    if seconds:
        assert sessions.token_of(value, NOW + seconds - 1) == entry().sha256
        assert Sessions(SECRET).token_of(value, NOW) == entry().sha256  # after a restart
    with pytest.raises(Unauthenticated, match="the session has expired"):
        sessions.token_of(value, NOW + seconds)


def test_what_is_not_signed_here_is_no_session() -> None:
    sessions = Sessions(SECRET)
    value, _ = sessions.issue(entry(), NOW)
    sha256, expires, signed = value.split(".")
    forged = [
        "",
        "token",
        f"{sha256}.{expires}",
        f"{sha256}.{expires}.",
        f"{sha256}.{int(expires) + 1}.{signed}",
        f"{sha256}.0{expires}.{signed}",
        f"{digest_of(b'other').hex()}.{expires}.{signed}",
        f"{sha256}.{expires}.{'0' * 64}",
        f"{sha256}.{expires}.{signed.upper()}",
        f"{value} ",
        f"{value}\n",
        f"{value}.{signed}",
        f"{sha256}.{'9' * 5000}.{signed}",
        f"{sha256}.\u0661.{signed}",
        Sessions(bytes(32)).issue(entry(), NOW)[0],
    ]
    for other in forged:
        with pytest.raises(Unauthenticated, match="the session is unknown here"):
            sessions.token_of(other, NOW)


def test_the_token_is_not_in_its_session() -> None:
    value, _ = Sessions(SECRET).issue(entry(), NOW)
    assert "token" not in value
    assert SECRET.hex() not in value


@pytest.mark.parametrize(
    ("cookies", "value"),
    [
        ([f"{SESSION_COOKIE}=a"], "a"),
        ([f"theme=dark; {SESSION_COOKIE}=a ;x=y"], "a"),
        (["theme=dark", f"{SESSION_COOKIE}=a"], "a"),
        ([f"{SESSION_COOKIE}=a=b"], "a=b"),
        ([f"{SESSION_COOKIE}="], ""),
        ([], None),
        (["theme=dark"], None),
        ([f"x{SESSION_COOKIE}=a"], None),
        ([f"{SESSION_COOKIE}2=a"], None),
        ([f"{SESSION_COOKIE}=a; {SESSION_COOKIE}=b"], None),
        ([f"{SESSION_COOKIE}=a", f"{SESSION_COOKIE}=a"], None),
    ],
)
def test_the_only_cookie_of_the_name_is_read(cookies: list[str], value: str | None) -> None:
    headers = [(b"x-cookie", b"terrace_session=c"), *((b"cookie", cookie.encode()) for cookie in cookies)]
    assert cookie_of(headers) == value
