"""What operators do to nodes: written before it counts, and read again by the next scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from sqlalchemy import update

from scheduler.core import events
from scheduler.core.device import Intent, KnownNode
from scheduler.core.fleet import Ledger
from scheduler.devices.operators import Operators
from scheduler.store.nodes import NodeStore
from scheduler.store.tables import nodes as nodes_table
from tests.unit.scheduler.test_devices import TIMES, Machine, beat, listed, registration
from tests.unit.scheduler.test_store import opened
from tierkit.errors import Conflict, Forbidden, NotFound, SetupError, Unavailable
from tierkit.testing import FakeClock
from tierkit.types import Health


class Rows:
    """A table in memory, which may refuse."""

    def __init__(self) -> None:
        self.rows: dict[str, KnownNode] = {}
        self.refuses = False
        self.meanwhile: Callable[[], object] = lambda: None

    async def save_sites(self, changed: Mapping[str, Intent | None]) -> None:
        if self.refuses:
            raise Unavailable("locked")

    async def save(self, changed: Mapping[str, KnownNode | None]) -> None:
        if self.refuses:
            raise Unavailable("locked")
        self.meanwhile()
        for node_id, known in changed.items():
            self.rows.pop(node_id, None)
            if known is not None:
                self.rows[node_id] = known


class Desk:
    def __init__(self) -> None:
        self.clock, self.store = FakeClock(), Rows()
        self.devices = Ledger(TIMES)
        machine = Machine(self.devices, self.clock)
        self.handle = machine.handle
        self.operators = Operators(self.devices, self.store, machine.handle)
        machine.followers.append(self.operators.node_changed)
        self.handle(events.Registered(registration("end-0")))

    def health(self) -> Health | None:
        return listed(self.devices, self.clock()).get("end-0")


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_each_word_of_an_operator_is_a_row(desk: Desk):
    said = []
    for act in (desk.operators.drain, desk.operators.remove, desk.operators.resume):
        await act("end-0", "alice")
        intent = desk.store.rows["end-0"].intent
        said.append((intent.drained, intent.removed, intent.by, desk.health()))
    assert said == [
        (True, False, "alice", Health.DRAINING),
        (True, True, "alice", Health.REMOVED),
        (False, False, "", Health.DEAD),
    ]
    await desk.operators.trust("end-0", "root", True)
    assert desk.store.rows["end-0"].intent.trusted is True
    await desk.operators.trust("end-0", "root", None)
    assert desk.devices.get("end-0").intent.by == ""


async def test_what_is_not_written_does_not_count(desk: Desk):
    desk.store.refuses = True
    for act in (desk.operators.drain, desk.operators.remove):
        with pytest.raises(Unavailable):
            await act("end-0", "alice")
        assert desk.health() is Health.ALIVE
    await desk.operators.flush()
    desk.store.refuses = False
    await desk.operators.flush()
    assert set(desk.store.rows) == {"end-0"}, "nodes that came meanwhile are written later"


async def test_only_what_is_gone_can_be_forgotten(desk: Desk):
    with pytest.raises(Conflict, match="would come back"):
        await desk.operators.forget("end-0", trust=True)
    await desk.operators.remove("end-0", "alice")
    await desk.operators.forget("end-0", trust=True)
    assert (desk.health(), desk.store.rows) == (None, {})
    for act in (desk.operators.drain, desk.operators.remove, desk.operators.resume):
        with pytest.raises(NotFound):
            await act("end-0", "alice")
    with pytest.raises(NotFound):
        await desk.operators.forget("end-0", trust=True)


async def test_what_an_admin_said_of_trust_is_an_admins_to_forget(desk: Desk):
    await desk.operators.trust("end-0", "root", False)
    await desk.operators.remove("end-0", "olga")
    with pytest.raises(Forbidden, match="an admin forgets it"):
        await desk.operators.forget("end-0", trust=False)
    await desk.operators.forget("end-0", trust=True)


async def test_a_node_that_comes_back_while_it_is_forgotten_keeps_its_row(desk: Desk):
    await desk.operators.drain("end-0", "olga")
    desk.handle(events.Swept())
    desk.clock.advance(100)
    for _ in range(2):  # after the first, the scheduler itself had stood still
        desk.handle(events.Swept())
        desk.clock.advance(10)
    assert desk.health() is Health.DEAD
    desk.store.meanwhile = lambda: desk.handle(events.Registered(registration("end-0")))
    with pytest.raises(Conflict):
        await desk.operators.forget("end-0", trust=True)
    await desk.operators.flush()
    assert desk.store.rows["end-0"].intent.drained
    assert desk.health() is Health.DRAINING


async def test_a_drain_can_be_taken_back_though_the_node_takes_no_tasks_by_itself(desk: Desk):
    await desk.operators.drain("end-0", "olga")
    desk.handle(events.Beat("end-0", beat(draining=True)))
    await desk.operators.resume("end-0", "olga")
    assert not desk.devices.get("end-0").intent.drained


async def test_a_node_that_shuts_down_cannot_be_resumed(desk: Desk):
    desk.handle(events.Beat("end-0", beat(draining=True)))
    with pytest.raises(Conflict, match="by its own word"):
        await desk.operators.resume("end-0", "alice")


async def test_the_table_of_nodes_keeps_what_is_known_but_no_key(tmp_path: Path):
    async with opened(tmp_path / "x.db") as store:
        nodes, devices = NodeStore(store.engine, store.commit), Ledger(TIMES)
        machine = Machine(devices, FakeClock())
        operators = Operators(devices, nodes, machine.handle)
        machine.followers.append(operators.node_changed)
        for number in range(1200):
            machine.handle(events.Registered(registration(f"end-{number}", key="a-secret-key")))
        for most in (1000, 1000):
            await operators.flush(most)
        await operators.drain("end-3", "alice")
        await operators.trust("end-3", "root", False)
        machine.handle(events.TookLeave("end-7", "first-one"))
        await operators.flush()
    async with opened(tmp_path / "x.db") as store:
        found = {known.registration.node_id: known for known in await NodeStore(store.engine, store.commit).load()}
        assert set(found) == {f"end-{number}" for number in range(1200)} - {"end-7"}
        assert (found["end-3"].intent.drained, found["end-3"].intent.trusted, found["end-3"].intent.by) == (
            True,
            False,
            "root",
        )
        assert found["end-3"].registration == registration("end-3")
    assert b"a-secret-key" not in (tmp_path / "x.db").read_bytes()


async def test_a_row_that_cannot_be_read_is_left_out(tmp_path: Path):
    async with opened(tmp_path / "x.db") as store:
        nodes = NodeStore(store.engine, store.commit)
        await nodes.save({name: KnownNode(registration=registration(name)) for name in ("end-0", "end-1")})

        async def write(statement: str) -> None:
            async with store.engine.begin() as connection:
                await connection.exec_driver_sql(f"UPDATE terrace_nodes SET {statement}")

        await write("registration = '{}' WHERE id = 'end-0'")
        assert [known.registration.node_id for known in await nodes.load()] == ["end-1"]
        await write("removed = 1 WHERE id = 'end-0'")
        with pytest.raises(SetupError, match="'end-0' in the table terrace_nodes is damaged"):
            await nodes.load()


async def test_what_another_version_has_added_to_a_row_is_passed_over(tmp_path: Path):
    async with opened(tmp_path / "x.db") as store:
        nodes, known = NodeStore(store.engine, store.commit), registration("end-0")
        await nodes.save({"end-0": KnownNode(registration=known, intent=Intent(removed=True, by="olga"))})
        content = json.loads(known.model_dump_json(exclude={"key"}))
        content["more"] = content["models"][0]["more"] = 1
        async with store.engine.begin() as connection:
            await connection.execute(update(nodes_table).values(registration=json.dumps(content)))
        assert await nodes.load() == [KnownNode(registration=known, intent=Intent(removed=True, by="olga"))]
