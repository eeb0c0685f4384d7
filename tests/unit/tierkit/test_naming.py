"""The names of nodes that nobody has named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from end_node.settings import EndSettings
from tierkit.access import TokenEntry
from tierkit.settings import lasting_name
from tierkit.wire.messages import checked_node_id


def test_a_node_without_a_name_has_the_same_one_after_a_restart() -> None:
    name = EndSettings(port=8071).node_id
    assert name == EndSettings(port=8071).node_id
    assert re.fullmatch("(.+-)?end-8071-[0-9a-f]{4}", name)
    assert EndSettings(port=8075).node_id != name
    assert EndSettings().node_id == name


def test_with_any_free_port_the_name_is_a_fresh_one() -> None:
    names = {EndSettings(port=0).node_id for _ in range(20)}
    assert len(names) > 1
    assert all(re.fullmatch("end-[0-9a-f]{4}", name) for name in names)


def test_machines_of_the_same_name_have_different_nodes(tmp_path: Path) -> None:
    names = set()
    for number in range(2):
        identity = tmp_path / str(number)
        identity.write_text(f"{number:032x}\n")
        names.add(lasting_name("end", 8071, host="raspberrypi", machine_id=identity))
        assert lasting_name("end", 8071, host="raspberrypi", machine_id=identity) in names
    assert len(names) == 2
    assert all(re.fullmatch("raspberrypi-end-8071-[0-9a-f]{4}", name) for name in names)


def test_a_machine_without_an_identity_has_a_name_that_lasts(tmp_path: Path) -> None:
    first, second = (lasting_name("edge", 8072, host="hub", machine_id=tmp_path / "none") for _ in range(2))
    assert first == second


def test_a_token_that_is_named_like_the_machine_is_for_its_nodes() -> None:
    name = lasting_name("edge", 8072, host="hub.example")
    assert TokenEntry(name="hub", role="node", sha256="0" * 64).may_take(name)
    assert not TokenEntry(name="pi", role="node", sha256="0" * 64).may_take(name)


@given(host=st.text(max_size=80), port=st.integers(1, 65535))
def test_whatever_a_machine_is_called_its_nodes_have_valid_names(host: str, port: int) -> None:
    checked_node_id(lasting_name("cloud", port, host=host))


@pytest.mark.parametrize(
    ("host", "start"), [("", "end-8071-"), ("Alices MacBook.local", "alices-macbook-end-"), ("-é-", "end-8071-")]
)
def test_what_an_id_must_not_have_is_left_out(host: str, start: str) -> None:
    assert lasting_name("end", 8071, host=host).startswith(start)
