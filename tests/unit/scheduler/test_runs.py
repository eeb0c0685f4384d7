"""Training runs: their states, their curves, what is kept of them, on a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from scheduler.core.curve import MOST_POINTS, Point, extended
from scheduler.runs import service
from scheduler.runs.matching import THERE_S
from scheduler.runs.service import EVERYTHING, RunEvents, Runs, Sight
from scheduler.runs.state import SILENT_S, point_of, state_after, state_now
from scheduler.runs.workers import may_work, wishes_of, with_wishes
from scheduler.store.commit import GroupCommit
from scheduler.store.database import open_database
from scheduler.store.lease import Lease
from scheduler.store.reading import Reader
from scheduler.store.runs import RunStore
from tests.training_runs import report, start, worker
from tierkit.errors import Conflict, LimitReached, NotFound, Overloaded, Standby, Unavailable
from tierkit.testing import FakeClock, wait_for
from tierkit.types import RunState
from tierkit.wire.runs import RunMatch, RunReport, RunStart, WorkerOffer

RUNNING, INTERRUPTED, STOPPING = RunState.RUNNING, RunState.INTERRUPTED, RunState.STOPPING
STOPPED, FINISHED, FAILED = RunState.STOPPED, RunState.FINISHED, RunState.FAILED
LATE = SILENT_S + 0.1


@pytest.mark.parametrize(
    ("kept", "silent_s", "expected"),
    [
        (RUNNING, 0.0, RUNNING),
        (RUNNING, SILENT_S, RUNNING),
        (RUNNING, LATE, INTERRUPTED),
        (STOPPING, SILENT_S, STOPPING),
        (STOPPING, LATE, STOPPED),
        *((final, silent, final) for final in (STOPPED, FINISHED, FAILED) for silent in (0.0, LATE)),
    ],
)
def test_the_state_of_a_run(kept: RunState, silent_s: float, expected: RunState) -> None:
    assert state_now(kept, silent_s) is expected


@pytest.mark.parametrize(
    ("now", "said", "complete", "expected"),
    [
        (RUNNING, "running", False, RUNNING),
        (INTERRUPTED, "running", False, RUNNING),
        (STOPPING, "running", False, STOPPING),
        (RUNNING, "finished", False, FINISHED),
        (INTERRUPTED, "finished", True, FINISHED),
        (STOPPING, "finished", False, STOPPED),
        (STOPPING, "finished", True, FINISHED),
        (RUNNING, "failed", False, FAILED),
        (STOPPING, "failed", False, FAILED),
        *((final, said, True, final) for final in (STOPPED, FINISHED, FAILED) for said in ("running", "failed")),
    ],
)
def test_what_a_report_makes_of_a_run(
    now: RunState, said: Literal["running", "finished", "failed"], complete: bool, expected: RunState
) -> None:
    assert state_after(now, said, complete=complete) is expected


def test_a_curve_stays_short_and_keeps_its_ends_and_what_was_measured_seldom() -> None:
    curve: tuple[Point, ...] = ()
    for second in range(20_000):
        accuracy = second / 20_000 if second % 1000 == 0 else None
        curve = extended(curve, Point(float(second), 10 * second, 1.0, accuracy))
        assert len(curve) <= MOST_POINTS
    assert (curve[0].at, curve[-1].at) == (0.0, 19_999.0)
    assert len(curve) > MOST_POINTS // 4
    assert all(one.at < other.at for one, other in pairwise(curve))
    assert max(other.at - one.at for one, other in pairwise(curve)) <= 2 * 128.0  # spans of 20,000 s / 250 and less
    assert [point.accuracy for point in curve if point.accuracy is not None] == [k / 20 for k in range(20)]


def test_a_clock_that_stands_still_or_goes_back_makes_no_endless_curve() -> None:
    curve: tuple[Point, ...] = ()
    for second in (*[5.0] * 2000, *[1.0] * 2000):
        curve = extended(curve, Point(second, 1, 1.0, None))
        assert len(curve) <= MOST_POINTS


def test_a_point_counts_what_all_workers_did_and_weighs_their_staleness() -> None:
    two = [worker("a", updates=30, staleness=1.0), worker("b", updates=10, staleness=3.0)]
    point = point_of(RunReport.model_validate(report(done=40, workers=two)), 5.0)
    assert point == Point(5.0, 40, 2.25, None, updates=40, bytes_moved=24_000_000, staleness=1.5)
    assert point_of(RunReport.model_validate(report(workers=[])), 5.0).updates is None
    assert point_of(RunReport.model_validate(report(workers=[worker("a", updates=0)])), 5.0).staleness == 0


def test_a_short_curve_is_kept_as_it_is() -> None:
    points = [Point(float(k), k, 1.0 / (k + 1), None) for k in range(MOST_POINTS)]
    curve: tuple[Point, ...] = ()
    for point in points:
        curve = extended(curve, point)
    assert list(curve) == points


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "A" * 32}, "pattern"),
        ({"id": "1" * 31}, "pattern"),
        ({"url": "ftp://host"}, "http://"),
        ({"url": "https://me:secret@host"}, "no user name"),
        ({"steps": 0}, "greater"),
        ({"network": ""}, "at least 1"),
        ({"config": {"x": "y" * 70_000}}, "at most 65536 bytes"),
        ({"config": {"x": float("nan")}}, "NaN"),
        ({"config": {"x": 2**60}}, "2\\^53"),
        ({"config": {"\ud800": 1}}, "half characters"),
        ({"config": {"x": ["\udfff"]}}, "half characters"),
        ({"weights": 1}, "not permitted"),
        ({"more_urls": ["http://a"] * 8}, "at most 7"),
        ({"wants": {"workers": -1}}, "greater"),
        ({"wants": {"min_gflops": float("nan")}}, "finite"),
    ],
)
def test_wrong_beginnings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunStart.model_validate(start(**changes))


def test_nesting_is_bounded() -> None:
    deep: dict[str, Any] = {"x": [1, None, True, "z", 0.5]}
    for _ in range(30):
        deep = {"x": deep}
    RunStart.model_validate(start(config=deep))
    for _ in range(5):
        deep = {"x": deep}
    with pytest.raises(ValidationError, match="levels deep"):
        RunStart.model_validate(start(config=deep))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "stopped"},
        {"done": -1},
        {"done": 2**60},
        {"loss": float("inf")},
        {"accuracy": 1.1},
        {"workers": [worker("a"), worker("a")]},
        {"workers": [worker(f"w{k}") for k in range(1001)]},
        {"workers": [worker("a", staleness=-1)]},
        {"workers": [worker("a", speed=1)]},
        {"workers": [worker("a", score=1.1)]},
        {"workers": [worker("a", standing="king")]},
        {"workers": [worker("a", copies={"holds": "0" * 101, "has": 1, "wants": 1, "serves": True})]},
        {"workers": [worker("a", copies={"holds": "0", "has": 1, "wants": 1, "serves": True, "share": 1.1})]},
        {"result": {"x": float("inf")}},
        {"error": "x" * 2001},
        {"incarnation": "short"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_wrong_reports(changes: dict[str, Any]) -> None:
    RunReport.model_validate(report())
    with pytest.raises(ValidationError):
        RunReport.model_validate(report(**changes))


class Kept:
    """Runs on a database, and the clock of both times."""

    def __init__(self, store: RunStore, lease: Lease) -> None:
        self.clock = FakeClock()
        self.store = store
        self.lease = lease
        self.runs = self.again()

    def again(self) -> Runs:
        """A scheduler that takes over."""
        self.runs = Runs(self.store, secret=bytes(32), clock=self.clock, wall=self.clock, elapsed=self.clock)
        return self.runs

    async def begin(self, owner: str | None = None, **changes: Any) -> str:
        run, _ = await self.runs.begin(RunStart.model_validate(start(**changes)), owner)
        return run.id

    async def report(self, run_id: str, owner: str | None = None, **changes: Any) -> bool:
        return (await self.runs.report(run_id, RunReport.model_validate(report(**changes)), owner)).stop

    async def match(self, name: str, caller: str = "", **offer: Any) -> RunMatch:
        return await self.runs.match(WorkerOffer(name=name, **offer), caller, EVERYTHING)

    async def state(self, run_id: str) -> RunState:
        return (await self.runs.view(run_id)).state


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Kept]:
    engine = await open_database(url)
    lease = Lease(engine, url="http://a", lease_s=60.0, alone=True)
    await lease.acquire()
    commit = GroupCommit(engine, lease, next_seq=1)
    writer = asyncio.create_task(commit.run())
    try:
        yield Kept(RunStore(Reader(engine), commit), lease)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        await engine.dispose()


@pytest.fixture
async def kept(database_url: str) -> AsyncIterator[Kept]:
    async with opened(database_url) as found:
        yield found


async def test_a_run_comes_back_from_the_database_as_it_was(kept: Kept) -> None:
    run = await kept.begin("alice", network="net\0\u20ac", config={"text": "\0\u2028\u20ac"})
    await kept.report(run, loss=0.5, accuracy=0.25, workers=[worker("a"), worker("b\0")])
    before = await kept.runs.view(run)
    await kept.runs.save()
    await kept.again().recover()
    after = await kept.runs.view(run)
    assert after.network == "net\ufffd\u20ac"
    assert after.model_copy(update={"network": before.network}) == before
    assert (after.worker_count, after.loss, len(after.curve)) == (2, 0.5, 1)


async def test_workers_that_were_told_to_go_are_shown_and_not_counted(kept: Kept) -> None:
    run = await kept.begin("alice")
    gone = [worker(name, standing=standing) for name, standing in (("c", "quarantined"), ("d", "dropped"))]
    await kept.report(run, workers=[worker("a"), worker("b", standing="paused"), *gone])
    view = await kept.runs.view(run)
    assert (view.worker_count, len(view.workers)) == (2, 4)


async def test_what_has_not_been_measured_keeps_its_latest_value(kept: Kept) -> None:
    run = await kept.begin()
    await kept.report(run, loss=0.5, accuracy=0.25)
    await kept.report(run, loss=None, accuracy=None)
    view = await kept.runs.view(run)
    assert (view.loss, view.accuracy, len(view.curve)) == (0.5, 0.25, 1)


@pytest.mark.parametrize(
    ("standing", "wish", "left"),
    [
        ("active", "pause", "pause"),
        ("paused", "pause", None),
        ("paused", "resume", "resume"),
        ("active", "resume", None),
        ("quarantined", "trust", "trust"),
        ("trusted", "trust", None),
        ("dropped", "drop", None),
        ("active", None, None),
    ],
)
def test_a_wish_lasts_until_it_is_so(standing: Any, wish: Any, left: Any) -> None:
    workers = [worker("a", standing=standing), worker("b")]
    found = with_wishes(workers, {} if wish is None else {"a": wish, "gone": "drop"})
    assert [each["wish"] for each in found] == [left, None]
    assert with_wishes(found, {}) == found
    assert wishes_of(found) == ({} if left is None else {"a": left})
    assert may_work(workers[0]) == (standing in ("active", "trusted"))
    assert with_wishes([{"name": "old"}], {"old": "pause"}) == [{"name": "old", "wish": "pause"}]


async def test_what_operators_want_with_a_worker_is_durable_and_told_until_it_is_so(kept: Kept) -> None:
    run = await kept.begin()
    await kept.report(run, workers=[worker("a"), worker("b")])
    seen = await kept.runs.order(run, "a", "pause", EVERYTHING)
    assert [each.wish for each in seen.workers] == ["pause", None]
    await kept.again().recover()

    async def told(**changes: Any) -> dict[str, str]:
        said = RunReport.model_validate(report(workers=[worker("a", **changes), worker("b")]))
        return dict((await kept.runs.report(run, said, None)).workers)

    assert await told() == {"a": "pause"}
    assert await told() == {"a": "pause"}
    assert await told(standing="paused") == {}
    assert (await kept.runs.view(run)).workers[0].standing == "paused"
    await kept.runs.order(run, "a", "trust", EVERYTHING)
    await kept.runs.order(run, "a", "drop", EVERYTHING)
    assert await told(standing="paused") == {"a": "drop"}
    # One that is gone takes its wish along.
    await kept.report(run, workers=[])
    assert await told() == {}
    with pytest.raises(NotFound):
        await kept.runs.order(run, "nobody", "drop", EVERYTHING)
    await kept.report(run, state="finished", workers=[worker("a")])
    with pytest.raises(Conflict):
        await kept.runs.order(run, "a", "drop", EVERYTHING)


async def test_ends_and_wishes_to_stop_are_durable_when_they_are_answered(kept: Kept) -> None:
    done, stopping = await kept.begin(), await kept.begin()
    await kept.report(done, state="finished", done=1000, result={"accuracy": 0.97})
    await kept.runs.stop(stopping, EVERYTHING)
    await kept.again().recover()
    assert (await kept.runs.view(done)).result == {"accuracy": 0.97}
    assert [await kept.state(run) for run in (done, stopping)] == [FINISHED, STOPPING]
    assert await kept.report(stopping) is True


async def test_silence_interrupts_and_a_report_goes_on(kept: Kept) -> None:
    run = await kept.begin()
    kept.clock.advance(LATE)
    assert await kept.state(run) is INTERRUPTED
    with pytest.raises(Unavailable) as caught:
        await kept.match("w", run=run)
    assert caught.value.retry_after_s > 0
    assert await kept.report(run) is False
    assert await kept.state(run) is RUNNING
    assert (await kept.match("w", run=run)).urls == ("https://10.0.0.5:8090",)


async def test_workers_fill_the_oldest_run_then_the_next_and_hosts_hear_who_comes(kept: Kept) -> None:
    old = await kept.begin(wants={"workers": 2}, more_urls=["https://192.0.2.7:8090"])
    kept.clock.advance(1.0)
    new = await kept.begin(wants={"workers": 1})
    await kept.report(old, workers=[worker("there")])
    found = [await kept.match(name) for name in ("a", "b", "a")]
    assert [match.run for match in found] == [old, new, old]
    assert found[0].urls == ("https://10.0.0.5:8090", "https://192.0.2.7:8090")
    assert found[0].config == {"epochs": 3}
    with pytest.raises(Unavailable):
        await kept.match("c")
    said = RunReport.model_validate(report(workers=[worker("there"), worker("c")]))
    assert (await kept.runs.report(old, said, None)).coming == ("a",)
    # A worker that is not heard any more, and one that never came, leave their places.
    kept.clock.advance(THERE_S + 1)
    await kept.report(old, workers=[worker("there", idle_s=THERE_S + 1), worker("c")])
    assert (await kept.match("d")).run == old
    await kept.again().recover()
    assert (await kept.match("e", run=old)).urls[1:] == ("https://192.0.2.7:8090",)


async def test_a_flood_of_one_caller_leaves_the_others_alone(kept: Kept) -> None:
    run = await kept.begin()

    async def flood() -> None:
        for number in range(1_000):
            await kept.match(f"w{number}", caller="mallory")

    with pytest.raises(LimitReached):
        await flood()
    assert (await kept.match("pi", caller="ann")).run == run


async def test_followers_are_told_of_silence(kept: Kept) -> None:
    run, stopping = await kept.begin(), await kept.begin()
    await kept.runs.stop(stopping, EVERYTHING)
    watching = asyncio.create_task(kept.runs.watch())
    events, others = [await kept.runs.events(each, EVERYTHING) for each in (run, stopping)]

    async def state(stream: RunEvents) -> str:
        event = await anext(stream)
        assert event is not None, "nothing came, but for the comment that keeps the connection open"
        return event[1].state

    async def stored() -> bool:
        found = await kept.store.get(stopping)
        return found is not None and found[0].state is STOPPED

    try:
        assert (await state(events), await state(others)) == (RUNNING, STOPPING)
        kept.clock.advance(LATE)
        assert (await state(events), await state(others)) == (INTERRUPTED, STOPPED)
        await wait_for(stored, what="the end in the database")
    finally:
        watching.cancel()
        await asyncio.gather(watching, events.aclose(), others.aclose(), return_exceptions=True)


async def test_a_scheduler_that_takes_over_gives_hosts_time_to_report(kept: Kept) -> None:
    run, stopping = await kept.begin(), await kept.begin()
    await kept.runs.stop(stopping, EVERYTHING)
    kept.clock.advance(60.0)  # without a scheduler
    await kept.again().recover()
    assert [await kept.state(each) for each in (run, stopping)] == [RUNNING, STOPPING]
    kept.clock.advance(LATE)
    assert [await kept.state(each) for each in (run, stopping)] == [INTERRUPTED, STOPPED]


async def test_to_stop_a_run_whose_host_is_gone_ends_it_and_a_late_result_is_kept(kept: Kept) -> None:
    run = await kept.begin()
    kept.clock.advance(LATE)
    assert (await kept.runs.stop(run, EVERYTHING)).state is STOPPED
    with pytest.raises(Conflict, match="stopped already"):
        await kept.runs.stop(run, EVERYTHING)
    assert await kept.report(run, done=500) is True
    assert (await kept.runs.view(run)).done == 0
    assert await kept.report(run, state="finished", done=500, result={"accuracy": 0.5}) is True
    view = await kept.runs.view(run)
    assert (view.state, view.done, view.result) == (STOPPED, 500, {"accuracy": 0.5})


@pytest.mark.parametrize("said", ["finished", "failed"])
async def test_what_has_ended_does_not_change(kept: Kept, said: str) -> None:
    run = await kept.begin()
    await kept.report(run, state=said, done=1000, error="the disk is full" if said == "failed" else None)
    before = await kept.runs.view(run)
    assert before.reason == ("the disk is full" if said == "failed" else "")
    for state in ("running", "finished", "failed"):
        assert await kept.report(run, state=state, done=1, loss=9.0) is True
    assert await kept.runs.view(run) == before
    with pytest.raises(Conflict):
        await kept.begin(id=run)


async def test_a_host_that_comes_back_takes_over(kept: Kept) -> None:
    run = await kept.begin("alice")
    await kept.report(run, "alice", done=70)
    again = RunStart.model_validate(start(id=run, incarnation="2" * 16, url="http://10.0.0.6:1"))
    with pytest.raises(Conflict, match="another run's"):
        await kept.runs.begin(again, "bob")
    view, is_new = await kept.runs.begin(again, "alice")
    assert (is_new, view.done, view.url) == (False, 70, "http://10.0.0.6:1")
    with pytest.raises(Conflict, match="another host"):
        await kept.report(run, "alice")
    assert await kept.report(run, "alice", incarnation="2" * 16) is False
    with pytest.raises(NotFound):
        await kept.report(run, "bob", incarnation="2" * 16)


async def test_there_is_room_for_as_many_runs_as_report(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_UNDER_WAY", 2)
    first, second = await kept.begin(), await kept.begin()
    with pytest.raises(Overloaded):
        await kept.begin()
    await kept.begin(id=first)
    kept.clock.advance(LATE)
    await kept.report(second)
    third = await kept.begin()
    assert [await kept.state(run) for run in (first, second, third)] == [INTERRUPTED, RUNNING, RUNNING]
    with pytest.raises(Overloaded):
        await kept.report(first)
    await kept.report(third, state="finished", done=1000)
    assert await kept.report(first) is False
    assert await kept.state(first) is RUNNING


async def test_runs_of_one_owner_leave_places_for_others(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_UNDER_WAY", 8)
    mine = [await kept.begin("alice") for _ in range(4)]
    with pytest.raises(LimitReached):
        await kept.begin("alice")
    others = [await kept.begin(owner) for owner in ("bob", "bob", "carol", "dave")]
    with pytest.raises(Overloaded):
        await kept.begin("erin")
    kept.clock.advance(LATE)
    for run, owner in ((mine[0], "alice"), *zip(others, ("bob", "bob", "carol", "dave"), strict=True)):
        assert await kept.report(run, owner) is False
    # Three of alice's are interrupted: they make room for everybody, hers first.
    assert await kept.report(await kept.begin("erin"), "erin") is False
    assert await kept.report(await kept.begin("alice"), "alice") is False
    with pytest.raises(LimitReached):
        await kept.begin("alice")


async def test_pages_are_newest_first_and_each_run_comes_once(kept: Kept) -> None:
    made = []
    for number in range(7):
        made.append(await kept.begin(("alice", "bob")[number % 2]))
        kept.clock.advance(0.0 if number in (2, 3) else 0.1)  # some at the very same time

    async def pages(sight: Sight) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            page = await kept.runs.page(limit=2, cursor=cursor, sight=sight)
            found += [run.id for run in page.runs]
            if (cursor := page.next_cursor) is None:
                return found

    whole = await pages(EVERYTHING)
    assert sorted(whole) == sorted(made)
    assert (whole[:2], whole[-2:]) == ([made[6], made[5]], [made[1], made[0]])
    assert sorted(await pages(Sight(owner="bob"))) == sorted(made[1::2])
    await kept.report(made[6], "alice", state="failed")
    assert made[6] not in await pages(Sight(unended=True))
    with pytest.raises(NotFound):
        await kept.runs.view(made[6], Sight(unended=True))


async def test_runs_are_forgotten_when_they_ended_or_were_heard_long_ago(kept: Kept) -> None:
    ended, silent, alive = await kept.begin(), await kept.begin(), await kept.begin()
    await kept.report(ended, state="finished", done=1000)
    kept.clock.advance(100.0)
    await kept.report(alive)
    await kept.runs.save()
    await kept.runs.purge(kept.clock() - 200.0)
    assert len((await kept.runs.page(limit=9, cursor=None, sight=EVERYTHING)).runs) == 3
    await kept.runs.purge(kept.clock() - 50.0)
    assert [run.id for run in (await kept.runs.page(limit=9, cursor=None, sight=EVERYTHING)).runs] == [alive]
    for run in (ended, silent):
        with pytest.raises(NotFound):
            await kept.runs.view(run)


async def test_a_scheduler_that_leads_no_longer_changes_nothing(database_url: str) -> None:
    async with opened(database_url) as kept:
        run = await kept.begin()
        async with opened(database_url) as other:
            for write in (
                kept.begin(),
                kept.report(run, state="finished", done=1000),
                kept.runs.stop(run, EVERYTHING),
                kept.begin(id=run),
            ):
                with pytest.raises(Standby):
                    await write
            await other.runs.recover()
            assert (await other.state(run), await kept.state(run)) == (RUNNING, RUNNING)
            assert len((await other.runs.page(limit=9, cursor=None, sight=EVERYTHING)).runs) == 1
