"""The tree along which files spread: tables, whole spreads in steps, and random orders of events."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkit.copies.tree import HOST, Came, Event, Failed, Got, Left, Passed, Start, Stop, Tree

NONE: frozenset[int] = frozenset()
ALL = frozenset({0})


def came(
    tree: Tree, *names: str, serves: bool = True, wanted: frozenset[int] = ALL, now: float = 0.0
) -> list[Start | Stop]:
    return [
        effect for name in names for effect in tree.on(Came(worker=name, serves=serves, wanted=wanted, holds=NONE), now)
    ]


def got(tree: Tree, name: str, file: int = 0, now: float = 0.0, bytes_per_s: float = 1.0) -> list[Start | Stop]:
    return tree.on(Got(worker=name, file=file, bytes_per_s=bytes_per_s), now)


def failed(tree: Tree, name: str, reason: Literal["wrong", "lacks", "gone"], now: float = 0.0) -> list[Start | Stop]:
    return tree.on(Failed(worker=name, reason=reason), now)


def source(tree: Tree, name: str) -> str | None:
    copy = tree.copy_of(name)
    return None if copy is None else copy.source


def spread_steps(receivers: int, *, deepest: int, serves: int | None = None) -> int:
    """Steps in which all receivers get a file, when each copy that is under way ends with the step."""
    tree = Tree(deepest=deepest)
    for number in range(receivers):
        came(tree, f"w{number}", serves=serves is None or number < serves)
    steps = 0
    while receiving := [name for name in tree if tree.copy_of(name) is not None]:
        for name in receiving:
            got(tree, name)
        steps += 1
    assert all(tree.holds(name) == ALL for name in tree)
    return steps


@pytest.mark.parametrize(
    ("receivers", "deepest", "steps"), [(1, 1, 1), (3, 1, 2), (7, 1, 3), (8, 1, 4), (63, 1, 6), (8, 8, 1), (80, 8, 2)]
)
def test_each_step_makes_d_plus_one_holders_of_one(receivers: int, deepest: int, steps: int) -> None:
    assert steps == math.ceil(math.log(receivers + 1, deepest + 1) - 1e-9)
    assert spread_steps(receivers, deepest=deepest) == steps


def test_without_chains_each_holder_sends_to_one_of_the_next_machines_and_a_step_doubles_the_holders() -> None:
    tree, names = Tree(deepest=1), [f"w{number}" for number in range(1, 8)]
    came(tree, *names)
    holders = [HOST]
    while len(holders) < 8:
        receiving = {source(tree, name): name for name in names if source(tree, name) is not None}
        # Holder i sends to i + 2^(k - 1) in step k, or to another machine of the same step.
        assert set(receiving) == set(holders)
        assert set(receiving.values()) == set(names[len(holders) - 1 : 2 * len(holders) - 1])
        for name in receiving.values():
            got(tree, name)
        holders += receiving.values()


def test_machines_that_nobody_reaches_are_leaves_and_come_last() -> None:
    tree = Tree(deepest=1)
    came(tree, "leaf", serves=False)
    came(tree, "inner")
    assert (source(tree, "leaf"), source(tree, "inner")) == (HOST, None)
    came(tree, "leaf-2", serves=False)
    got(tree, "leaf")
    assert (source(tree, "inner"), source(tree, "leaf-2")) == (HOST, None)
    got(tree, "inner")
    assert source(tree, "leaf-2") == HOST
    assert spread_steps(10, deepest=8, serves=0) == 10


def test_fast_machines_are_served_first() -> None:
    tree = Tree()
    for name, speed in (("slow", 1.0), ("fast", 100.0)):
        came(tree, name)
        got(tree, name, bytes_per_s=speed)
    came(tree, "busy", serves=False, wanted=frozenset({5}))
    for name in ("slow", "fast"):
        tree.on(Came(worker=name, serves=True, wanted=frozenset({0, 1}), holds=ALL), 0)
    assert (source(tree, "slow"), source(tree, "fast")) == (None, None)
    got(tree, "busy", 5)
    assert (source(tree, "slow"), source(tree, "fast")) == ("fast", HOST)


def test_a_worker_gets_what_it_is_to_have_and_nothing_else() -> None:
    tree = Tree()
    tree.on(Came(worker="a", serves=True, wanted=frozenset({1, 2}), holds=frozenset({1})), 0)
    assert got(tree, "a", 2) == []
    tree.on(Came(worker="b", serves=True, wanted=frozenset({2, 3}), holds=NONE), 0)
    files = set()
    while (copy := tree.copy_of("b")) is not None:
        files.add(copy.file)
        got(tree, "b", copy.file)
    assert files == {2, 3}


def test_the_rarest_segment_comes_first() -> None:
    tree = Tree()
    tree.on(Came(worker="a", serves=False, wanted=NONE, holds=frozenset({0})), 0)
    came(tree, "b", serves=False, wanted=frozenset({0, 1}))
    copy = tree.copy_of("b")
    assert copy is not None
    assert copy.file == 1


@pytest.mark.parametrize("reason", ["wrong", "lacks"])
def test_who_sends_wrong_bytes_or_lacks_what_it_claims_is_a_source_no_more(reason: Literal["wrong", "lacks"]) -> None:
    tree = Tree()
    tree.on(Came(worker="liar", serves=True, wanted=ALL, holds=ALL), 0)
    came(tree, "a")  # from the host
    came(tree, "b", "c")
    assert {source(tree, "b"), source(tree, "c")} == {"liar", "a"}
    victim = "b" if source(tree, "b") == "liar" else "c"
    failed(tree, victim, reason)
    assert not tree.trusts("liar")
    assert source(tree, victim) != "liar"
    # Nor if it comes again.
    tree.on(Left(worker="liar"), 1)
    tree.on(Came(worker="liar", serves=True, wanted=ALL, holds=ALL), 2)
    came(tree, "d", "e", "f", now=3)
    assert "liar" not in {source(tree, name) for name in "abcdef"}


def test_a_source_that_is_gone_is_avoided_by_who_says_so_and_trusted_by_others() -> None:
    tree = Tree(deepest=1)
    came(tree, "a")
    got(tree, "a")
    came(tree, "b", "c")
    assert (source(tree, "b"), source(tree, "c")) == (HOST, "a")
    failed(tree, "c", "gone")
    assert source(tree, "c") is None
    assert tree.trusts("a")
    came(tree, "d")
    assert source(tree, "d") == "a"
    got(tree, "b")
    assert source(tree, "c") in (HOST, "b")


def test_who_accuses_one_after_the_other_is_believed_twice_and_then_served_by_the_host() -> None:
    tree = Tree(deepest=1)
    for number in range(4):
        tree.on(Came(worker=f"s{number}", serves=True, wanted=ALL, holds=ALL), 0)
    came(tree, "busy")
    came(tree, "accuser")
    for _ in range(3):
        failed(tree, "accuser", "wrong")
    assert sum(not tree.trusts(f"s{number}") for number in range(4)) == 2
    assert source(tree, "accuser") is None
    got(tree, "busy")
    assert source(tree, "accuser") == HOST


def test_whose_source_is_lost_comes_first_in_the_line_and_is_told() -> None:
    tree = Tree(deepest=2)
    came(tree, "a", "b", "c", "d")
    assert [source(tree, name) for name in "abcd"] == [HOST, "a", None, None]
    assert Stop(worker="b") in tree.on(Left(worker="a"), 1)
    assert source(tree, "b") == HOST
    got(tree, "b", now=1)
    assert {source(tree, "c"), source(tree, "d")} == {HOST, "b"}


def test_a_silent_worker_is_lost_and_one_that_is_heard_is_not() -> None:
    tree = Tree(silent_s=10, busy_s=3)
    came(tree, "a", "b", now=0)
    came(tree, "b", now=3)
    assert tree.on(Passed(), 3) == []
    effects = tree.on(Passed(), 4)  # who copies has something to say more often
    assert "a" not in tree
    assert Stop(worker="b") in effects
    assert source(tree, "b") == HOST
    got(tree, "b", now=4)
    tree.on(Passed(), 14)
    assert "b" in tree
    tree.on(Passed(), 15)
    assert "b" not in tree


def test_a_copy_that_takes_long_does_not_hold_up_the_others() -> None:
    tree = Tree(turn_s=lambda file: 5, deepest=1)
    came(tree, "slow", serves=False)
    came(tree, "b")
    assert source(tree, "b") is None
    tree.on(Passed(), 4)
    assert source(tree, "b") is None
    assert tree.on(Passed(), 5) == [Start(worker="b", file=0, source=HOST)]


@pytest.mark.parametrize("slow", [4, 5, 8])
def test_receivers_that_never_end_take_turns_with_those_who_wait(slow: int) -> None:
    tree, stuck, served_at, now = Tree(), [f"s{number}" for number in range(slow)], {}, 0.0
    while now < 1_200:
        for name in (*stuck, *(("honest",) if now >= 300 else ())):
            came(tree, name, serves=False, now=now)
        tree.on(Passed(), now)
        for name in tree:
            if tree.copy_of(name) is not None:
                served_at[name] = now
        if "honest" in served_at:
            break
        now += 1.0
    assert 300 <= served_at["honest"] <= 330
    # Whoever was set back keeps its place in the run, and gets other turns.
    got(tree, "honest", now=now)
    for second in range(1, 31 * slow):
        for name in stuck:
            came(tree, name, serves=False, now=now + second)
        tree.on(Passed(), now + second)
        for name in stuck:
            if tree.copy_of(name) is not None:
                served_at[name] = now + second
    assert all(served_at[name] > now for name in stuck)


def test_who_waits_for_itself_would_wait_for_ever() -> None:
    tree = Tree(deepest=3, turn_s=lambda file: 5)
    came(tree, "a", "b", "c")
    came(tree, "d", serves=False)
    assert [source(tree, name) for name in "abcd"] == [HOST, "a", "b", None]
    tree.on(Passed(), 5)
    assert source(tree, "d") == HOST
    failed(tree, "a", "gone", now=6)  # what b has comes from a, and the host has just begun to send to d
    assert source(tree, "a") is None
    tree.on(Passed(), 10)
    assert source(tree, "a") == HOST


def test_a_source_that_was_gone_and_comes_again_gets_another_chance() -> None:
    tree = Tree(deepest=1)
    came(tree, "a")
    got(tree, "a")
    came(tree, "b", "c")
    failed(tree, "c", "gone")
    assert source(tree, "c") is None
    tree.on(Left(worker="a"), 1)
    tree.on(Came(worker="a", serves=True, wanted=ALL, holds=ALL), 2)
    assert source(tree, "c") == "a"


def test_a_worker_that_needs_the_segment_no_longer_ends_its_copy() -> None:
    tree = Tree()
    came(tree, "a", wanted=frozenset({1}))
    effects = came(tree, "a", wanted=frozenset({2}))
    assert effects == [Stop(worker="a"), Start(worker="a", file=2, source=HOST)]


NAMES = st.sampled_from([f"w{number}" for number in range(6)])
FILES = st.frozensets(st.integers(0, 3))


class Spread(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.now = Tree(silent_s=30, turn_s=lambda file: 5, deepest=3), 0.0
        self.liars: set[str] = set()

    def on(self, event: Event) -> None:
        for effect in self.tree.on(event, self.now):
            copy = self.tree.copy_of(effect.worker)
            if isinstance(effect, Start) and copy is not None and copy.file == effect.file:
                assert effect.worker != effect.source

    @rule(name=NAMES, serves=st.booleans(), wanted=FILES, holds=FILES)
    def come(self, name: str, serves: bool, wanted: frozenset[int], holds: frozenset[int]) -> None:
        self.on(Came(worker=name, serves=serves, wanted=wanted, holds=holds, group=self.group_of(name)))

    def group_of(self, name: str) -> str:
        return ""

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        copy = self.tree.copy_of(name)
        self.on(Got(worker=name, file=0 if copy is None else copy.file, bytes_per_s=1.0))

    @rule(name=NAMES, reason=st.sampled_from(["wrong", "lacks", "gone"]))
    def fail(self, name: str, reason: Literal["wrong", "lacks", "gone"]) -> None:
        self.on(Failed(worker=name, reason=reason))

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.on(Left(worker=name))

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.on(Passed())

    @invariant()
    def every_copy_has_a_source_that_can_send_it(self) -> None:
        for name in self.tree:
            copy = self.tree.copy_of(name)
            if copy is None or copy.source == HOST:
                continue
            assert copy.source in self.tree
            assert self.tree.trusts(copy.source)
            assert copy.file not in self.tree.holds(name)
            # A source has the file, is receiving it, or waits for another source with some of its chunks.
            theirs = self.tree.copy_of(copy.source)
            assert copy.file in self.tree.holds(copy.source) or theirs is None or theirs.file == copy.file

    @invariant()
    def nobody_waits_for_itself(self) -> None:
        for name in self.tree:
            copy, seen = self.tree.copy_of(name), {name}
            while copy is not None and copy.source != HOST and copy.file not in self.tree.holds(copy.source):
                assert copy.source not in seen
                seen.add(copy.source)
                copy = self.tree.copy_of(copy.source)

    def teardown(self) -> None:
        """From whatever state: if nothing fails any more, all get what they lack."""
        for _ in range(200):
            self.now += 1
            for name in list(self.tree):
                copy = self.tree.copy_of(name)
                if copy is not None:
                    self.on(Got(worker=name, file=copy.file, bytes_per_s=1.0))
        assert all(self.tree.copy_of(name) is None for name in self.tree)


class SpreadInGroups(Spread):
    """The same for the tree of a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(turn_s=lambda file: 5 + file, hurries_s=5, deepest=3)
        self.tree.spares_host = True

    def group_of(self, name: str) -> str:
        return "x" if name in ("w0", "w1", "w2") or self.now > 30 else name

    @invariant()
    def groups_stay_apart(self) -> None:
        for name in self.tree:
            copy = self.tree.copy_of(name)
            if copy is not None and copy.source != HOST:
                assert self.tree._workers[name].group == self.tree._workers[copy.source].group


TestSpread = Spread.TestCase
TestSpread.settings = settings(max_examples=60, stateful_step_count=40)
TestSpreadInGroups = SpreadInGroups.TestCase
TestSpreadInGroups.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=40)
def test_any_number_of_machines_takes_as_many_steps_as_the_formula_says(receivers: int, deepest: int) -> None:
    holders, steps = 1, 0
    while holders < receivers + 1:
        holders, steps = holders * (deepest + 1), steps + 1
    assert spread_steps(receivers, deepest=deepest) == steps


# --- what a scheduler asks of it ---


def test_workers_copy_from_those_of_their_group_and_the_host_sends_to_each_group_by_itself() -> None:
    tree = Tree()
    for number in range(3):
        for group in "xyz":
            tree.on(Came(worker=f"{group}{number}", serves=True, wanted=ALL, holds=NONE, group=group), 0)
    for group in "xyz":
        assert [source(tree, f"{group}{number}") for number in range(3)] == [HOST, f"{group}0", f"{group}1"]


def test_a_worker_that_changes_its_group_begins_again() -> None:
    tree = Tree()
    for name in "ab":
        tree.on(Came(worker=name, serves=True, wanted=ALL, holds=NONE, group="x"), 0)
    assert source(tree, "b") == "a"
    effects = tree.on(Came(worker="a", serves=True, wanted=ALL, holds=NONE, group="y"), 1)
    assert Stop(worker="b") in effects
    tree.on(Passed(), 1)
    assert (source(tree, "a"), source(tree, "b")) == (HOST, HOST)


def test_a_host_that_is_spared_sends_only_where_no_worker_is_free_that_has_the_file() -> None:
    tree = Tree(deepest=1)
    tree.spares_host = True
    for name in "abc":
        tree.on(Came(worker=name, serves=name != "b", wanted=ALL, holds=ALL if name == "a" else NONE), 0)
    assert (source(tree, "b"), source(tree, "c")) == ("a", HOST)


def test_who_is_behind_a_slow_machine_moves_to_one_that_has_the_whole_file() -> None:
    tree = Tree(hurries_s=5, busy_s=99, turn_s=lambda file: 7, deepest=3)
    came(tree, "slow", "b", "c")
    came(tree, "d", now=6)
    assert [source(tree, name) for name in ("slow", "b", "c", "d")] == [HOST, "slow", "b", None]
    tree.on(Passed(), 7)  # nothing new is passed on by those that receive for long
    assert source(tree, "d") == HOST
    effects = got(tree, "d", now=8)
    assert Start(worker="b", file=0, source="d") in effects
    assert [source(tree, name) for name in ("slow", "b", "c")] == [HOST, "d", "b"]
    got(tree, "b", now=9)
    assert source(tree, "c") == "b"
    assert tree.on(Passed(), 20) == []  # its source has the whole file now
