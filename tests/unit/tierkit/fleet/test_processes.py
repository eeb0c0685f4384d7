"""Which process is which service."""

import pytest

from tierkit.errors import Conflict, NotFound
from tierkit.fleet.launcher import TERRACE
from tierkit.fleet.plan import ServicePlan
from tierkit.fleet.processes import Process, chosen, service_of


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        ("end", {"node_id": "end-1", "port": "0"}, "end-1"),
        ("cloud", {"port": "0", "node_id": "cloud-9"}, "cloud-9"),
        ("scheduler", {"port": "0"}, "scheduler"),
    ],
)
def test_the_command_lines_of_the_launcher(kind: str, settings: dict[str, str], name: str) -> None:
    assert service_of([*TERRACE, *ServicePlan(name=name, kind=kind, settings=settings).arguments(), ""]) == name


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["python", "-m", "http.server"],
        ["terrace"],
        ["terrace", "up", "--port", "0"],
        ["terrace", "end", "--node-id"],
        ["bash", "-c", "pkill -9 -f 'node-id end-1'"],
    ],
)
def test_other_commands_are_no_services(words: list[str]) -> None:
    assert service_of(words) is None


def test_a_service_is_chosen_by_its_name_or_its_number() -> None:
    first, second, other = (
        Process(name=name, pid=pid, launcher=launcher)
        for name, pid, launcher in (("end-1", 11, 1), ("end-1", 21, 2), ("edge-1", 12, 1))
    )
    services = [first, second, other]
    assert chosen(services, "edge-1") == other
    assert (chosen(services, "11"), chosen(services, "21")) == (first, second)
    with pytest.raises(Conflict, match="11, 21"):
        chosen(services, "end-1")
    for unknown in ("end-2", "99", ""):
        with pytest.raises(NotFound, match="edge-1, end-1"):
            chosen(services, unknown)
