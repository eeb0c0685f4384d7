"""Which run a worker is sent to, and how often it may ask. Times are passed in."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.runs.matching import THERE_S, Matchmaker, Wanting, chosen, unfit
from tierkit.errors import Conflict, LimitReached, Unavailable
from tierkit.wire.runs import RunWants, WorkerOffer

OLD, MIDDLE, NEW = "a" * 32, "b" * 32, "c" * 32


def wanting(run: str, since: float, there: tuple[str, ...] = (), **wants: Any) -> Wanting:
    return Wanting(id=run, since=since, wants=RunWants(**wants), there=there)


def offer(name: str = "pi", **told: Any) -> WorkerOffer:
    return WorkerOffer(name=name, **told)


@pytest.mark.parametrize(
    ("runs", "asked", "expected"),
    [
        ([wanting(NEW, 2.0), wanting(OLD, 1.0)], offer(), OLD),
        ([wanting(OLD, 1.0, ("x", "y"), workers=2), wanting(NEW, 2.0, workers=2)], offer(), NEW),
        # A worker that comes back to its run takes no further place there.
        ([wanting(OLD, 1.0, ("x", "pi"), workers=2), wanting(NEW, 2.0)], offer(), OLD),
        ([wanting(OLD, 1.0, ("x",) * 50), wanting(NEW, 2.0)], offer(), OLD),
        ([wanting(OLD, 1.0, min_gflops=5.0), wanting(NEW, 2.0)], offer(gflops=4.9), NEW),
        ([wanting(OLD, 1.0, min_gflops=5.0), wanting(NEW, 2.0)], offer(gflops=5.0), OLD),
        ([wanting(OLD, 1.0, min_gflops=5.0), wanting(NEW, 2.0)], offer(), NEW),
        ([wanting(OLD, 1.0, min_memory_bytes=10**9), wanting(NEW, 2.0)], offer(memory_bytes=10**9 - 1), NEW),
        ([wanting(OLD, 1.0, min_memory_bytes=10**9), wanting(NEW, 2.0)], offer(memory_bytes=10**9), OLD),
        # A worker with kept pictures trains on these only, and others have none.
        ([wanting(OLD, 1.0), wanting(NEW, 2.0, kept=True)], offer(kept=True), NEW),
        ([wanting(OLD, 1.0, kept=True), wanting(NEW, 2.0)], offer(), NEW),
        # Whoever chooses may be one more than the run wants.
        ([wanting(NEW, 2.0, ("x", "y"), workers=2)], offer(run=NEW), NEW),
    ],
)
def test_the_oldest_run_that_wants_a_worker_gets_it(runs: list[Wanting], asked: WorkerOffer, expected: str) -> None:
    assert chosen(runs, asked) == expected


@pytest.mark.parametrize(
    ("runs", "asked", "error", "words"),
    [
        ([], offer(), Unavailable, "under way"),
        ([wanting(OLD, 1.0, ("x",), workers=1)], offer(), Unavailable, "have the workers"),
        ([wanting(OLD, 1.0, min_gflops=5.0)], offer(gflops=1.0), Unavailable, "at least 5 GFLOP/s"),
        ([wanting(OLD, 1.0, min_memory_bytes=10**9)], offer(run=OLD), Conflict, "at least 1,000 MB"),
        ([wanting(OLD, 1.0, kept=True)], offer(run=OLD), Conflict, "--kept"),
        ([wanting(OLD, 1.0)], offer(kept=True), Unavailable, "--kept"),
    ],
)
def test_a_worker_that_no_run_wants_is_told_why(
    runs: list[Wanting], asked: WorkerOffer, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        chosen(runs, asked)


def test_what_is_wanted_is_told_with_what_there_is() -> None:
    assert unfit(RunWants(), offer()) == ""
    assert "takes no workers" in unfit(RunWants(workers=0), offer())
    assert "0.5" in unfit(RunWants(min_gflops=1.0), offer(gflops=0.5))


def test_a_caller_that_floods_is_held_up_and_others_are_not() -> None:
    matchmaker = Matchmaker()

    def flood() -> None:
        for _ in range(1_000):
            matchmaker.admit("mallory", 5.0)

    with pytest.raises(LimitReached) as caught:
        flood()
    matchmaker.admit("alice", 5.0)
    matchmaker.admit("mallory", 5.001 + caught.value.retry_after_s)


def test_what_is_remembered_of_callers_and_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.runs.matching._MOST_CALLERS", 3)
    monkeypatch.setattr("scheduler.runs.matching._MOST_PROMISES", 3)
    matchmaker = Matchmaker()
    for number in range(10):
        matchmaker.admit(f"caller-{number}", 0.0)
        matchmaker.sent(f"w{number}", OLD, 0.0)
    assert {run: set(names) for run, names in matchmaker.coming(0.0).items()} == {OLD: {"w7", "w8", "w9"}}


def test_of_the_tokens_that_hold_no_places_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.runs.matching._MOST_DISTRUSTED", 1)
    matchmaker = Matchmaker()
    for name in ("a", "b"):
        matchmaker.sent(name, OLD, 0.0, name)
    for name in ("a", "b"):
        matchmaker.sent(name, OLD, THERE_S + 1, name)
    assert matchmaker.coming(THERE_S + 1) == {OLD: {"a": "a"}}


def test_a_worker_that_was_sent_counts_for_a_minute_and_where_it_was_sent_last() -> None:
    matchmaker = Matchmaker()
    matchmaker.sent("pi", OLD, 0.0)
    matchmaker.sent("pi", NEW, 1.0)
    matchmaker.sent("mac", NEW, 2.0)
    assert {run: set(names) for run, names in matchmaker.coming(2.0).items()} == {NEW: {"pi", "mac"}}
    assert {run: set(names) for run, names in matchmaker.coming(1.5 + THERE_S).items()} == {NEW: {"mac"}}


def coming(names: str, token: str | None) -> dict[str, str | None]:
    return dict.fromkeys(names, token)


@pytest.mark.parametrize(
    ("wanted", "expected", "taken"),
    [
        (4, coming("abcd", "crowd"), 2),
        (4, coming("ab", "x") | coming("cd", "y"), 4),
        (1, coming("abcd", "crowd"), 1),
        (4, coming("abcd", None), 4),
        (4, coming("wabc", "crowd"), 3),
    ],
    ids=["one token", "two", "a small run", "without tokens", "one has come"],
)
def test_names_of_one_token_that_have_not_come_hold_half_of_the_places(
    wanted: int, expected: dict[str, str | None], taken: int
) -> None:
    there = ("w",) if "w" in expected else ()
    run = Wanting(id=OLD, since=1.0, wants=RunWants(workers=wanted), there=there, coming=expected)
    assert run.taken("vic") == taken


@pytest.mark.parametrize(
    ("there", "idle", "expected", "taken"),
    [
        ("abcd", coming("abcd", "crowd"), {}, 2),
        ("abcd", coming("bcd", "crowd"), {}, 3),
        ("ab", coming("ab", "crowd"), coming("cd", "crowd"), 2),
        ("abcd", coming("abcd", None), {}, 4),
        ("abcd", {}, coming("abcd", "crowd"), 4),
    ],
    ids=["one token", "one has brought something", "some come yet", "unknown tokens", "all have brought something"],
)
def test_workers_of_one_token_that_have_brought_nothing_hold_half_of_the_places(
    there: str, idle: dict[str, str | None], expected: dict[str, str | None], taken: int
) -> None:
    run = Wanting(id=OLD, since=1.0, wants=RunWants(workers=4), there=there, coming=expected, idle=idle)
    assert run.taken("vic") == taken


def test_of_the_workers_that_have_come_few_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.runs.matching._MOST_CAME", 1)
    matchmaker = Matchmaker()
    for name in ("a", "b"):
        matchmaker.sent(name, OLD, 0.0, name)
    matchmaker.came(["a", "b"], OLD)
    matchmaker.came(["a", "b"], NEW)
    assert matchmaker.tokens_of(["a", "b"], OLD) == {"a": None, "b": "b"}


def test_a_token_whose_workers_do_not_come_holds_no_places_for_a_while() -> None:
    matchmaker = Matchmaker()
    for second in range(0, 200, 5):  # to ask again, and by other names, helps nobody
        matchmaker.sent(f"crowd-{second % 20}", (OLD, NEW)[second % 2], float(second), "crowd")
        matchmaker.sent("vic", OLD, float(second), "vic")
        matchmaker.came(["vic"], OLD)
        held = matchmaker.coming(float(second))
        assert (second <= THERE_S) == any("crowd" in names.values() for names in held.values())
    matchmaker.sent("vic-2", OLD, 200.0, "vic")
    assert matchmaker.coming(200.0) == {OLD: {"vic-2": "vic"}}
    matchmaker.sent("crowd-1", OLD, 1_000.0, "crowd")
    assert matchmaker.coming(1_000.0) == {OLD: {"crowd-1": "crowd"}}
