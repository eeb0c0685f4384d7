"""Authentication and the limits, in time that stands still."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tierkit.access import (
    SESSION_COOKIE,
    Allowance,
    Authenticator,
    Caller,
    Role,
    Sessions,
    TokenEntry,
    digest_of,
    write_book,
)
from tierkit.errors import Forbidden, LimitReached, SetupError, Unauthenticated
from tierkit.testing import FakeClock
from tierkit.types import Tier

KEY = "the-key-of-this-node-and-no-other"
USER = "terrace_user-token-of-alice"
NODE = "terrace_node-token-of-the-pi"
OLD = "terrace_old-token-of-the-pi"
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def entry(token: str, **fields: Any) -> TokenEntry:
    return TokenEntry.model_validate({"sha256": digest_of(token.encode()).hex(), **fields})


ENTRIES = (
    entry(USER, name="alice", role="user", requests_per_minute=3),
    entry(NODE, name="pi", role="node", tiers=(Tier.END,)),
    entry(OLD, name="pi", role="node", expires=NOON),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(write_book(ENTRIES))
    path.chmod(0o600)
    return path


def authenticator(
    file: Path | None, *, key: str = "", roles: tuple[Role, ...] = ("user", "node"), at: datetime = NOON
) -> tuple[Authenticator, FakeClock]:
    clock = FakeClock()
    return Authenticator(file, keys=[key] if key else [], roles=roles, wall=at.timestamp, clock=clock), clock


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {token}".encode())]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", USER.encode())],
        [(b"authorization", b"Basic " + USER.encode())],
        [(b"authorization", b"Bearer " + b"x" * 513)],
        [*bearer(USER), *bearer(USER)],
        [*bearer(USER), *bearer(NODE)],
        [(b"x-authorization", b"Bearer " + USER.encode())],
    ],
)
def test_without_one_bearer_token_nobody_gets_in(headers: list[tuple[bytes, bytes]], file: Path) -> None:
    with pytest.raises(Unauthenticated, match="a token is needed: Authorization: Bearer TOKEN"):
        authenticator(file)[0].admit(headers)


@pytest.mark.parametrize("token", ["terrace_foreign", USER[:-1], USER + "x", USER.upper(), "\xff" * 20, "None"])
def test_foreign_tokens_are_refused_and_not_repeated(token: str, file: Path) -> None:
    with pytest.raises(Unauthenticated, match="unknown here") as caught:
        authenticator(file, key=KEY)[0].admit(bearer(token))
    assert token not in str(caught.value)


def test_the_holders_get_in(file: Path) -> None:
    here, _ = authenticator(file, key=KEY, roles=("user", "node", "fleet"))
    for token, name, role in ((USER, "alice", "user"), (NODE, "pi", "node"), (KEY, "the fleet", "fleet")):
        caller = here.admit(bearer(token))
        assert (caller.name, caller.role) == (name, role)
        assert here.knows(bearer(token))
    assert here.admit([(b"authorization", b"bEaReR  " + USER.encode() + b" ")]).name == "alice"
    for other in ("terrace_foreign", USER[:-1], USER + "a", USER.upper(), digest_of(USER.encode()).hex()):
        assert not here.knows(bearer(other))


def test_a_key_opens_a_service_without_a_file() -> None:
    here, _ = authenticator(None, key=KEY, roles=("fleet",))
    assert here.admit(bearer(KEY)).role == "fleet"
    with pytest.raises(Unauthenticated):
        here.admit(bearer(USER))


def test_no_key_is_no_empty_key(file: Path) -> None:
    with pytest.raises(Unauthenticated):
        authenticator(file)[0].admit([(b"authorization", b"Bearer  ")])


@pytest.mark.parametrize(
    ("at", "admitted"),
    [(datetime(2026, 6, 1, 11, 59, 59, tzinfo=UTC), True), (NOON, False), (datetime(2027, 1, 1, tzinfo=UTC), False)],
)
def test_expiry(at: datetime, admitted: bool, file: Path) -> None:
    here, _ = authenticator(file, at=at)
    if admitted:
        assert here.admit(bearer(OLD)).name == "pi"
        return
    with pytest.raises(Unauthenticated, match=r"the token of 'pi' has expired \(2026-06-01 12:00 UTC\)"):
        here.admit(bearer(OLD))


def test_other_roles_are_forbidden(file: Path) -> None:
    here, _ = authenticator(file, key=KEY, roles=("user", "fleet"))
    with pytest.raises(Forbidden, match="'pi' has the role node, which is not served here"):
        here.admit(bearer(NODE))


@pytest.mark.parametrize(
    ("node_id", "tier", "message"),
    [
        ("pi", Tier.END, ""),
        ("pi-end-1", None, ""),
        ("edge-1", Tier.END, "not for the node id 'edge-1'; it is for pi and pi-"),
        ("pi", Tier.CLOUD, "not for cloud nodes, only for end"),
    ],
)
def test_a_node_speaks_for_itself_alone(node_id: str, tier: Tier | None, message: str, file: Path) -> None:
    caller = authenticator(file)[0].admit(bearer(NODE))
    if not message:
        caller.check_claim(node_id, tier)
        return
    with pytest.raises(Forbidden, match=message):
        caller.check_claim(node_id, tier)


@pytest.mark.parametrize(
    ("worker", "allowed"), [("laptop", True), ("laptop-2", True), ("door-1", True), ("pi", False), ("door-12", False)]
)
def test_a_worker_speaks_for_itself_alone(worker: str, allowed: bool) -> None:
    named = entry(USER, name="laptop", role="worker", nodes=("laptop", "laptop-*", "door-?"))
    caller = Caller(name="laptop", role="worker", entry=named)
    with nullcontext() if allowed else pytest.raises(Forbidden, match=f"not for the worker id '{worker}'; .* --name"):
        caller.check_claim(worker)


def test_a_user_may_speak_of_all_nodes(file: Path) -> None:
    authenticator(file)[0].admit(bearer(USER)).check_claim("edge-1", Tier.CLOUD)


def test_requests_are_limited_and_the_wait_is_told(file: Path) -> None:
    here, clock = authenticator(file)
    for _ in range(3):
        here.admit(bearer(USER))
    with pytest.raises(LimitReached, match="'alice' has used up its 3 requests a minute") as caught:
        here.admit(bearer(USER))
    assert caught.value.retry_after_s == pytest.approx(20)
    here.admit(bearer(NODE))  # others are not held up
    clock.advance(20.1)
    here.admit(bearer(USER))
    with pytest.raises(LimitReached):
        here.admit(bearer(USER))


def test_reading_again_revokes_adds_and_keeps_what_was_used_up(file: Path) -> None:
    here, _ = authenticator(file)
    for _ in range(3):
        here.admit(bearer(USER))
    second = entry("terrace_second-token-of-alice", name="alice", role="user", requests_per_minute=3)
    file.write_text(write_book([ENTRIES[0], second]))
    here.load()
    with pytest.raises(Unauthenticated):
        here.admit(bearer(NODE))
    for token in (USER, "terrace_second-token-of-alice"):
        with pytest.raises(LimitReached):
            here.admit(bearer(token))


def test_a_file_that_has_become_unusable_changes_nothing(file: Path) -> None:
    here, _ = authenticator(file)
    file.write_text("[[token]")
    with pytest.raises(SetupError, match="not valid TOML"):
        here.load()
    assert here.admit(bearer(NODE)).name == "pi"


def with_sessions(file: Path, *, at: datetime = NOON) -> Authenticator:
    here, _ = authenticator(file, at=at)
    here.sessions = Sessions(bytes(32))
    return here


def cookie(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"cookie", f"{SESSION_COOKIE}={value}".encode())]


def test_a_session_stands_for_the_token_of_a_user(file: Path) -> None:
    here = with_sessions(file)
    caller, value, seconds = here.sign_in(USER)
    assert (caller.name, seconds) == ("alice", 12 * 3600)
    assert here.admit(cookie(value)) == caller
    assert here.knows(cookie(value))
    with pytest.raises(Forbidden, match="Origin"):
        here.admit(cookie(value), method="POST")
    own = [*cookie(value), (b"origin", b"https://x")]
    assert here.admit(own, method="POST", scheme="https") == caller
    with pytest.raises(LimitReached):  # three requests, with the sign-in
        here.admit(cookie(value))


def test_when_a_session_ends(file: Path) -> None:
    _, value, seconds = with_sessions(file).sign_in(USER)
    assert with_sessions(file, at=NOON + timedelta(seconds=seconds - 1)).admit(cookie(value)).name == "alice"
    with pytest.raises(Unauthenticated, match="the session has expired"):
        with_sessions(file, at=NOON + timedelta(seconds=seconds)).admit(cookie(value))
    here = with_sessions(file)
    file.write_text(write_book(ENTRIES[1:]))
    here.load()
    with pytest.raises(Unauthenticated, match="revoked"):
        here.admit(cookie(value))
    assert not here.knows(cookie(value))


def test_who_gets_no_session(file: Path) -> None:
    here = with_sessions(file)
    for token, error in (
        (NODE, Forbidden),
        (OLD, Unauthenticated),
        ("unknown", Unauthenticated),
        ("", Unauthenticated),
    ):
        with pytest.raises(error):
            here.sign_in(token)


def test_without_sessions_a_cookie_is_nothing(file: Path) -> None:
    _, value, _ = with_sessions(file).sign_in(USER)
    with pytest.raises(Unauthenticated, match="a token is needed"):
        authenticator(file)[0].admit(cookie(value))


def test_a_token_counts_before_a_cookie(file: Path) -> None:
    here = with_sessions(file)
    _, value, _ = here.sign_in(USER)
    assert here.admit([*cookie(value), *bearer(NODE)[1:]], method="POST").name == "pi"
    with pytest.raises(Unauthenticated):
        here.admit([*cookie(value), *bearer("unknown")[1:]])


def test_pages_of_other_origins_change_nothing_with_a_token_either(file: Path) -> None:
    foreign = [*bearer(USER), (b"origin", b"http://evil.example")]
    assert authenticator(file)[0].admit(foreign).name == "alice"
    with pytest.raises(Forbidden, match="another origin"):
        authenticator(file)[0].admit(foreign, method="DELETE")


def test_uploads_and_jobs_are_limited() -> None:
    allowance = Allowance("alice")
    allowance.adopt(entry(USER, name="alice", role="user", upload_bytes_per_minute=600, unfinished_jobs=2))
    allowance.check_upload(0.0)
    allowance.count_bytes(1200, 0.0)
    with pytest.raises(LimitReached, match="600 bytes of uploads a minute") as caught:
        allowance.check_upload(0.0)
    assert caught.value.retry_after_s == pytest.approx(60.1)
    allowance.check_upload(60.2)
    with allowance.submits(1):
        with pytest.raises(LimitReached, match="may have 2 unfinished jobs"), allowance.submits(1):
            pass
        with allowance.submits(1, check=False):
            pass
    assert allowance.submitting == 0


def test_a_batch_of_observations_may_overdraw_and_the_next_one_waits() -> None:
    allowance = Allowance("camera")
    allowance.adopt(entry(USER, name="camera", role="node", observations_per_minute=60))
    allowance.check_observations(0.0)
    allowance.count_observations(500, 0.0)
    with pytest.raises(LimitReached, match="used up its 60 observations a minute") as caught:
        allowance.check_observations(0.0)
    assert caught.value.retry_after_s == pytest.approx(441.0)
    allowance.check_observations(441.1)


@pytest.mark.parametrize("what", ["uploads", "streams"])
def test_what_is_under_way_at_a_time_is_limited(what: str) -> None:
    allowance = Allowance("alice")
    allowance.adopt(entry(USER, name="alice", role="user", **{what: 2}))
    begin = allowance.uploading if what == "uploads" else allowance.streaming
    with begin():
        with begin(), pytest.raises(LimitReached, match=f"may have 2 .*{what[:-1]}"), begin():
            pass
        with begin():
            pass


@pytest.mark.parametrize(
    ("role", "may"),
    [
        ("user", {"user"}),
        ("operator", {"user", "operator"}),
        ("admin", {"user", "operator", "admin"}),
        ("node", {"node"}),
        ("worker", {"worker"}),
        ("fleet", {"fleet"}),
    ],
)
def test_a_role_has_the_rights_of_those_below(role: Role, may: set[Role]) -> None:
    caller = Caller(name="alice", role=role)
    for wanted in ("user", "operator", "admin", "node", "worker", "fleet"):
        assert caller.may(wanted) is (wanted in may)
        with nullcontext() if wanted in may else pytest.raises(Forbidden, match=f"role {role}; this takes {wanted}"):
            caller.need(wanted)
    with nullcontext() if may & {"user", "node"} else pytest.raises(Forbidden, match="takes user or node"):
        caller.need("user", "node")


def test_without_limits_nothing_is_counted() -> None:
    allowance = Allowance("alice")
    allowance.adopt(entry(USER, name="alice", role="user"))
    for _ in range(1000):
        allowance.take_request(0.0)
        allowance.count_bytes(10**9, 0.0)
        allowance.check_upload(0.0)
        with allowance.submits(1000):
            pass
