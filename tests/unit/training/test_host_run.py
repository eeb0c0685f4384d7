"""What a host keeps: a run, and a journal from which it goes on to the bit, wherever it was killed."""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from tests.schedules import constant
from tierkit.errors import Conflict, Forbidden, NotFound, Overloaded, SetupError
from training.host.journal import Journal
from training.host.run import TrainingRun
from training.messages import UpdateHead
from training.strategies.build import build_strategy
from training.strategies.config import BatchConfig, HostedConfig, OuterConfig, ServerConfig, TournamentConfig
from training.strategies.finding import HOSTED
from training.strategies.tournament import Tournament
from training.trust.config import TrustConfig
from training.units import Computed, Flat, UnitLease, Update

VALUES, BUFFERS = 3, 2
LEASE_S = 10.0
A, B = "a" * 16, "b" * 16


KINDS: dict[str, HostedConfig] = {
    **HOSTED,
    "tournament": TournamentConfig(period=2),
    "lbfgs": BatchConfig(period=2, history=2),
    "sgd, judged": ServerConfig(rule="sgd", trust=TrustConfig(updates=3)),
    "average, judged": ServerConfig(rule="average", period=2, trust=TrustConfig(updates=3, quarantine=0.45)),
    "fedavg, judged": OuterConfig(period=2, workers=3, trust=TrustConfig(centre="trimmed-mean")),
}


def new_run(strategy: str = "sgd", *, steps: int = 40) -> TrainingRun:
    return TrainingRun(
        build_strategy(
            KINDS[strategy],
            (np.zeros(VALUES, np.float32), np.ones(BUFFERS, np.float32)),
            constant(0.1, steps=steps, epochs=10 if strategy == "lbfgs" else 1),
            workers=2,
            lease_s=LEASE_S,
        )
    )


def brought(lease: UnitLease, part: range, values: Flat) -> Update:
    computed = Computed(values=values, buffers=np.full(BUFFERS, part.start, np.float32), loss=float(values[0]))
    return Update(lease=lease.number, worker=lease.worker, steps=part, computed=computed)


def same_state(one: TrainingRun, other: TrainingRun) -> bool:
    (vectors, figures), (vectors_again, figures_again) = one.state(), other.state()
    return figures == figures_again and {name: each.tobytes() for name, each in vectors.items()} == {
        name: each.tobytes() for name, each in vectors_again.items()
    }


def test_a_worker_joins_works_shows_itself_and_leaves() -> None:
    run = new_run("downpour")
    run.join("w", A, 0.0)
    lease = run.grant("w", A, 100, 1.0)
    assert lease is not None
    assert run.renew("w", A, lease.number, lease.unit.first + 1, 10.0)
    update = brought(lease, lease.unit.span, np.ones(VALUES, np.float32))
    assert run.take(A, update, 50, {"forward": 2.0}, 15.0) == "taken"
    assert run.take(A, update, 50, {"forward": 2.0}, 15.0) == "duplicate"
    (worker,) = run.workers(16.0)
    assert (worker.updates, worker.bytes_sent, worker.bytes_received, worker.idle_s) == (1, 50, 100, 1.0)
    assert (run.totals.updates, run.totals.times, run.seconds, run.loss) == (1, {"forward": 2.0}, 14.0, 1.0)
    assert not worker.left
    run.join("idle", A, 16.5)
    run.leave("idle", A, 17.0)
    run.leave("w", A, 17.0)
    run.join("v", B, 18.0)
    again = new_run("downpour")
    again.restore(*run.state())
    for each in (run, again):
        there, gone = each.workers(19.0)
        assert (there.name, there.left, gone.name, gone.left) == ("v", False, "w", True)
        assert (gone.updates, gone.bytes_sent, gone.idle_s) == (1, 50, 4.0)
        with pytest.raises(NotFound):
            each.grant("w", A, 0, 19.0)
        each.join("w", B, 20.0)
        assert [(found.name, found.left, found.updates) for found in each.workers(20.0)] == [
            ("w", False, 1),
            ("v", False, 0),
        ]


def test_those_who_have_left_make_room_for_others() -> None:
    run = TrainingRun(new_run("downpour").strategy, most_workers=3)
    for number in range(6):
        run.join(f"w{number}", A, float(number))
        lease = run.grant(f"w{number}", A, 100, float(number))
        assert lease is not None
        run.take(A, brought(lease, lease.unit.span, np.ones(VALUES, np.float32)), 50, {}, float(number))
        if number:
            run.leave(f"w{number}", A, float(number))
    assert [(each.name, each.left) for each in run.workers(6.0)] == [("w0", False), ("w4", True), ("w5", True)]


def test_who_was_told_to_go_is_shown_with_what_it_has_done_until_an_operator_has_mercy() -> None:
    run = new_run("downpour")
    run.join("w", A, 0.0)
    lease = run.grant("w", A, 100, 1.0)
    assert lease is not None
    run.take(A, brought(lease, lease.unit.span, np.ones(VALUES, np.float32)), 50, {}, 2.0)
    run.order("w", "drop", 3.0)
    run.leave("w", A, 4.0)
    again = new_run("downpour")
    again.restore(*run.state())
    for each in (run, again):
        (shown,) = each.workers(12.0)
        assert (shown.standing, shown.updates, shown.bytes_sent, shown.idle_s) == ("dropped", 1, 50, 10.0)
        assert each.deserted(12.0, 5.0)
        with pytest.raises(Forbidden):
            each.grant("w", A, 0, 12.0)
        each.order("w", "resume", 13.0)
        assert each.worker("w", 13.0).standing == "active"
        assert [(found.left, found.updates) for found in each.workers(13.0)] == [(True, 1)]
        with pytest.raises(NotFound):
            each.grant("w", A, 0, 13.0)
        each.join("w", B, 14.0)
        assert [(shown.name, shown.updates) for shown in each.workers(14.0)] == [("w", 1)]
        assert each.grant("w", B, 0, 15.0) is not None


def test_a_group_starts_together_and_who_leaves_or_falls_silent_before_does_not_count() -> None:
    run = new_run("sgd")
    run.gather(2, 20.0, 0.0)
    assert run.missing(0.0) == 2
    run.join("a", A, 0.0)
    run.join("fetches", A, 0.0, fetches=True)  # it has no images yet
    run.join("paused", A, 0.0)
    run.order("paused", "pause", 0.0)
    assert (run.missing(1.0), run.grant("a", A, 9, 1.0)) == (1, None)
    run.hold("fetches", A, [0], 2.0)
    assert run.missing(2.0) == 0
    run.leave("fetches", A, 3.0)
    assert (run.missing(3.0), run.grant("a", A, 9, 3.0)) == (1, None)
    run.join("late", A, 20.0)
    assert run.missing(23.1) == 1  # "a" was last heard at 3
    again = new_run("sgd")
    again.restore(*run.state())
    for each in (run, again):
        assert each.grant("a", A, 9, 24.0) is not None  # it is there after all
        assert each.missing(24.0) is None
        each.leave("late", A, 25.0)
        each.renew("a", A, 1, 1, 26.0)
        assert each.missing(100.0) is None  # it has begun
    assert same_state(run, again)


def test_a_run_without_a_group_waits_for_nobody() -> None:
    run = new_run("sgd")
    run.gather(2, 20.0, 0.0)
    run.gather(0, 20.0, 0.0)
    run.join("a", A, 0.0)
    assert (run.missing(0.0), run.grant("a", A, 9, 0.0) is None) == (None, False)


def test_progress_renews_a_lease_and_a_claim_without_progress_does_not() -> None:
    run = new_run("downpour")
    run.join("w", A, 0.0)
    lease = run.grant("w", A, 0, 0.0)
    assert lease is not None
    assert run.renew("w", A, lease.number, lease.unit.first + 1, 9.0)
    assert run.renew("w", A, lease.number, lease.unit.first + 1, 18.0)
    assert not run.renew("w", A, lease.number, lease.unit.first + 2, 19.5)
    assert not run.renew("w", A, lease.number + 1, lease.unit.first + 2, 19.5)
    update = brought(lease, lease.unit.span, np.ones(VALUES, np.float32))
    assert run.take(A, update, 0, {}, 19.5) == "late"
    assert run.totals.faults == 1


def test_who_takes_a_name_takes_its_place() -> None:
    run = new_run()
    run.join("w", A, 0.0)
    former = run.grant("w", A, 0, 0.0)
    run.join("w", B, 1.0)
    with pytest.raises(Conflict):
        run.grant("w", A, 0, 2.0)
    with pytest.raises(Conflict):
        run.leave("w", A, 2.0)
    lease = run.grant("w", B, 0, 2.0)
    assert former is not None
    assert lease is not None
    assert lease.unit.first == former.unit.first
    with pytest.raises(NotFound):
        run.grant("x", A, 0, 2.0)


def test_a_worker_that_asks_again_holds_one_lease() -> None:
    run = new_run()
    run.join("w", A, 0.0)
    firsts = [lease.unit.first for _ in range(5) if (lease := run.grant("w", A, 0, 0.0)) is not None]
    assert firsts == [0, 0, 0, 0, 0]
    assert len(run.strategy.leases) == 1


def test_workers_are_bounded_and_the_silent_make_room() -> None:
    run = new_run()
    for number in range(1_000):
        run.join(f"w{number}", A, float(number == 7))
    with pytest.raises(Overloaded):
        run.join("late", A, 2.0)
    run.join("late", A, 700.0)
    assert len(run.workers(700.0)) == 1_000
    run.check("w7", A)
    run.check("late", A)


def test_a_caller_with_many_workers_makes_room_for_others_and_not_for_itself() -> None:
    run = new_run()
    run.join("honest", A, 0.0, caller="alice")
    for number in range(999):
        run.join(f"w{number}", A, 1.0, caller="mallory")
    with pytest.raises(Overloaded):
        run.join("more", A, 2.0, caller="mallory")
    for number in range(400):
        run.join(f"bob-{number}", A, 2.0, caller="bob")
    names = {each.name for each in run.workers(2.0)}
    assert len(names) == 1_000
    assert {"honest", *(f"bob-{number}" for number in range(400))} < names
    for number in range(400, 499):
        run.join(f"bob-{number}", A, 2.0, caller="bob")
    with pytest.raises(Overloaded):
        run.join("bob-500", A, 2.0, caller="bob")


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            # Mostly work.
            [
                "join",
                "grant",
                "take",
                "grant",
                "take",
                "nan",
                "foreign",
                "leave",
                "renew",
                "wait",
                "crash",
                "pause",
                "trust",
                "resume",
                "right",
                "wrong",
                "meet",
            ]
        ),
        st.integers(0, 2),
    ),
    max_size=120,
)


@pytest.mark.parametrize("strategy", KINDS)
@settings(max_examples=25)
@given(calls=CALLS)
@example(calls=[("join", 0), ("grant", 0), ("foreign", 0), ("take", 0)])  # a late update after a refused one
@example(
    calls=[
        *[(kind, which) for kind in ("join", "grant") for which in (0, 1)],
        *[("crash", 0), ("take", 0), ("take", 1), ("crash", 0), ("meet", 1), ("crash", 1), ("meet", 0)],
        *[(kind, which) for kind in ("grant", "crash", "take") for which in (0, 1)],
    ]
)  # lineages that meet
def test_a_run_from_its_journal_is_the_run_to_the_bit(
    strategy: str, calls: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    run, journal, now = new_run(strategy), Journal(folder), 0.0
    journal.begin(run.state())
    leases: dict[str, tuple[UnitLease, list[range]]] = {}

    def repeated(call: dict[str, Any], body: bytes, again: TrainingRun) -> None:
        if call["do"] == "take":
            lease = UnitLease(number=call["lease"], worker=call["worker"], unit=None)  # type: ignore[arg-type]
            part = range(*call["part"])
            again.take(A, brought(lease, part, np.frombuffer(body, np.float32)), 7, {}, call["now"])
        else:
            again.repeat(call, body, None)  # type: ignore[arg-type]  # which only updates need

    def reopened() -> None:
        nonlocal run, journal
        journal.close()
        journal, again = Journal(folder), new_run(strategy)
        state = journal.load()
        assert state is not None
        again.restore(*state)
        for call, body in journal.calls():
            repeated(call, body, again)
        assert same_state(run, again)
        run = again

    for number, (kind, which) in enumerate(calls):
        name = f"w{which}"
        try:
            if kind == "join":
                run.join(name, A, now)
                journal.add({"do": "join", "name": name, "incarnation": A, "now": now})
            elif kind == "leave":
                run.leave(name, A, now)
                journal.add({"do": "leave", "name": name, "incarnation": A, "now": now})
            elif kind == "grant":
                lease = run.grant(name, A, 5, now)
                journal.add({"do": "grant", "name": name, "incarnation": A, "size": 5, "now": now})
                if lease is not None:
                    leases[name] = lease, [lease.unit.span]
            elif kind == "renew" and name in leases:
                given = {"lease": leases[name][0].number, "shown": leases[name][0].unit.first + 1}
                run.renew(name, A, now=now, **given)
                journal.add({"do": "renew", "name": name, "incarnation": A, "now": now, **given})
            elif kind in ("pause", "trust", "resume"):
                run.order(name, kind, now)  # type: ignore[arg-type]
                journal.add({"do": "order", "name": name, "order": kind, "now": now})
            elif kind in ("right", "wrong"):
                run.rechecked(name, kind == "right", now)
                journal.add({"do": "rechecked", "name": name, "right": kind == "right", "now": now})
            elif kind in ("take", "nan", "foreign") and leases.get(name, (None, []))[1]:
                lease, parts = leases[name]
                part = range(99, 100) if kind == "foreign" else parts.pop(0)
                values = np.full(VALUES, np.nan if kind == "nan" else number, np.float32)
                verdict = run.take(A, brought(lease, part, values), 7, {}, now)
                if verdict == "taken":
                    call = {"do": "take", "lease": lease.number, "worker": name, "part": [part.start, part.stop]}
                    journal.add({**call, "now": now}, values.tobytes())
                elif verdict in ("stale", "refused"):
                    journal.add({"do": "drop", "name": name, "now": now, "refused": verdict == "refused"})
                elif verdict == "late":
                    run.totals.faults -= 1  # which is counted, but changes nothing
            elif kind == "meet" and isinstance(run.strategy, Tournament) and (due := run.strategy.to_measure()):
                scores = [(which / 2, float(lineage)) for lineage in due]
                run.met(due, scores, now)
                journal.add({"do": "met", "lineages": due, "scores": scores, "now": now})
        except (NotFound, Conflict, Forbidden):
            pass
        if kind == "wait":
            now += 4.0
        if kind == "crash":
            if which == 0:
                journal.begin(run.state())
            reopened()
    reopened()
    journal.close()


def kept(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.begin(new_run().state())
    for number in range(3):
        journal.add({"do": "x", "number": number}, bytes(number))
    journal.close()
    return journal


def numbers(folder: Path, *, accept_loss: bool = False) -> list[int]:
    journal = Journal(folder)
    try:
        assert journal.load() is not None
        calls = journal.calls(accept_loss=accept_loss)
        return [call["number"] for call, body in calls if len(body) == call["number"]]
    finally:
        journal.close()


@pytest.mark.parametrize("damage", ["cut", "garbage", "long"])
def test_what_a_crash_left_unfinished_is_cut_off_and_the_journal_goes_on(tmp_path: Path, damage: str) -> None:
    kept(tmp_path)
    path = tmp_path / "journal-0"
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "garbage": whole + b"\xff" * 40,
        "long": whole + struct.pack("<IQI", 10, 2**60, 0),
    }
    path.write_bytes(damaged[damage])
    expected = [0, 1] if damage == "cut" else [0, 1, 2]
    assert numbers(tmp_path) == expected
    (copy,) = tmp_path.glob("*.cut")
    assert path.read_bytes() + copy.read_bytes() == damaged[damage]
    journal = Journal(tmp_path)
    journal.load()
    list(journal.calls())
    journal.add({"do": "x", "number": 9}, bytes(9))
    journal.flush()
    journal.sync()
    journal.close()
    assert numbers(tmp_path) == [*expected, 9]


@pytest.mark.parametrize("place", [*range(0, 76, 3), -1, -20])
def test_damage_to_whole_calls_is_refused_and_its_bytes_are_kept(tmp_path: Path, place: int) -> None:
    kept(tmp_path)
    path = tmp_path / "journal-0"
    content = bytearray(path.read_bytes())
    # In the head of the file; in the key, the number, the lengths, the checksum, or the call of the first record; or in
    # the last one.
    content[place] ^= 16
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(SetupError, match="accept-loss"):
            numbers(tmp_path)
        assert path.read_bytes() == content
    left = [0, 1] if place < 0 else []
    assert numbers(tmp_path, accept_loss=True) == left
    (copy,) = tmp_path.glob("*.cut")
    assert (b"" if 0 <= place < 16 else path.read_bytes()) + copy.read_bytes() == content
    assert copy.stat().st_mode & 0o077 == 0
    assert numbers(tmp_path) == left


@pytest.mark.parametrize("damage", ["missing", "empty", "dropped", "doubled", "swapped"])
def test_a_journal_that_lacks_calls_is_refused(tmp_path: Path, damage: str) -> None:
    kept(tmp_path)
    path = tmp_path / "journal-0"
    content = path.read_bytes()
    starts = [place for place in range(16, len(content)) if content.startswith(content[:16], place)]
    head, first, second, third = (content[slice(*each)] for each in pairwise([0, *starts, len(content)]))
    if damage == "missing":
        path.unlink()
    else:
        changed = {
            "empty": b"",
            "dropped": head + first + third,
            "doubled": head + first + first + second + third,
            "swapped": head + second + first + third,
        }
        path.write_bytes(changed[damage])
    with pytest.raises(SetupError, match="accept-loss"):
        numbers(tmp_path)
    left = [0] if damage in ("dropped", "doubled") else []
    assert numbers(tmp_path, accept_loss=True) == left
    assert numbers(tmp_path) == left


def test_a_journal_without_its_state_is_refused_and_kept(tmp_path: Path) -> None:
    kept(tmp_path)
    (tmp_path / "state-0.safetensors").unlink()
    content = (tmp_path / "journal-0").read_bytes()
    journal = Journal(tmp_path)
    with pytest.raises(SetupError, match="state-0"):
        journal.load()
    journal.close()
    assert (tmp_path / "journal-0").read_bytes() == content


def test_an_update_that_looks_like_calls_does_not_make_a_torn_end_into_damage(tmp_path: Path) -> None:
    kept(tmp_path / "other")
    kept(tmp_path / "own")
    journal = Journal(tmp_path / "own")
    journal.load()
    list(journal.calls())
    journal.add({"do": "x", "number": 3}, (tmp_path / "other" / "journal-0").read_bytes())
    journal.close()
    path = tmp_path / "own" / "journal-0"
    path.write_bytes(path.read_bytes()[:-1])
    assert numbers(tmp_path / "own") == [0, 1, 2]


def test_what_was_left_by_a_kill_between_two_journals_is_removed(tmp_path: Path) -> None:
    kept(tmp_path)
    old = {name: (tmp_path / name).read_bytes() for name in ("journal-0", "state-0.safetensors")}
    journal = Journal(tmp_path)
    journal.load()
    list(journal.calls())
    journal.begin(new_run().state())
    journal.close()
    for name, content in {**old, ".state-2.safetensors.tmp": b"half", "journal-2": bytes(16)}.items():
        (tmp_path / name).write_bytes(content)
    assert numbers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-1", "lock", "state-1.safetensors"]


def test_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    kept(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "run").iterdir() if path.stat().st_mode & 0o077] == []


def test_a_new_state_begins_a_new_journal_and_nothing_old_is_left(tmp_path: Path) -> None:
    kept(tmp_path)
    journal = Journal(tmp_path)
    journal.load()
    list(journal.calls())
    journal.begin(new_run().state())
    journal.close()
    assert numbers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal-1", "lock", "state-1.safetensors"]


def test_a_crash_between_the_first_journal_and_its_state_begins_the_run(tmp_path: Path) -> None:
    (tmp_path / "journal-0").write_bytes(bytes(16))
    journal = Journal(tmp_path)
    assert journal.load() is None
    journal.begin(new_run().state())
    journal.close()
    assert numbers(tmp_path) == []


def test_a_folder_has_one_host(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(SetupError, match="another host"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


@pytest.mark.parametrize("place", range(0, 700, 23))
def test_a_damaged_state_is_told(tmp_path: Path, place: int) -> None:
    kept(tmp_path)
    path = tmp_path / "state-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1 - place % len(content)] ^= 1
    path.write_bytes(content)
    with pytest.raises(SetupError, match="damaged"):
        numbers(tmp_path)


def test_times_are_counted_by_known_words_alone() -> None:
    run = new_run()
    run.join("w", A, 0.0)
    for number in range(40):
        lease = run.grant("w", A, 0, 0.0)
        assert lease is not None
        told = {"step": 1.0, **{f"word{chr(97 + number // 26)}{chr(97 + number % 26)}": 1.0}}
        head = {"worker": "w", "incarnation": A, "lease": lease.number, "first": 0, "stop": 1, "loss": 1.0}
        known = UpdateHead.model_validate({**head, "times": told}).times
        update = brought(lease, lease.unit.span, np.ones(VALUES, np.float32))
        assert run.take(A, update, 0, known, 0.0) == "taken"
    assert run.totals.times == {"step": 40.0}
    # A state that was written before has words of all kinds.
    vectors, figures = run.state()
    figures["totals"]["times"] |= {f"x{number}": 1.0 for number in range(9_000)}
    again = new_run()
    again.restore(vectors, figures)
    assert again.totals.times == {"step": 40.0}


def test_a_host_that_ends_waits_for_who_lives() -> None:
    run = new_run()
    for name in ("lives", "silent", "fetches"):
        run.join(name, A, 0.0, fetches=name == "fetches")
    run.grant("lives", A, 0, 40.0)
    assert not run.deserted(40.0, 30.0)
    run.leave("fetches", A, 40.0)
    assert not run.deserted(40.0, 30.0)
    run.leave("lives", A, 40.0)
    assert run.deserted(40.0, 30.0)
    assert not run.deserted(40.0, 50.0)


def test_names_that_have_never_worked_make_room_soon_and_others_late() -> None:
    run = new_run()
    run.join("works", A, 0.0)
    lease = run.grant("works", A, 10, 0.0)
    assert lease is not None
    run.take(A, brought(lease, lease.unit.span, np.ones(VALUES, np.float32)), 10, {}, 0.0)
    for number in range(999):
        run.join(f"idle-{number}", A, 1.0)
    with pytest.raises(Overloaded):
        run.join("new", A, 30.9)
    run.join("new", A, 31.1)  # in the place of one that has done nothing
    assert {each.name for each in run.workers(31.1)} >= {"works", "new"}
    for number in range(998):
        run.join(f"new-{number}", A, 60.0)
    with pytest.raises(Overloaded):
        run.join("late", A, 60.0)
    assert "works" in {each.name for each in run.workers(60.0)}
