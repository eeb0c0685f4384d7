"""Fleets from counts and from fleet files: what is started where, and what is refused."""

from pathlib import Path

import pytest

from end_node.settings import EndSettings
from tierkit.errors import SetupError
from tierkit.fleet import ServicePlan, local_plan, read_fleet_file
from tierkit.fleet.tables import TABLES as fleet_tables
from tierkit.types import Tier

FLEET = """
scheduler = "http://10.0.0.5:8070/"

[host.hub]
address = "10.0.0.5"
scheduler = { port = 8070, trusted = ["end", "edge"] }
edge = { provider = "cuda", port = 8071 }

[host.pi]
address = "10.0.0.7"
end = [{ count = 2, threads = 1 }, { node_id = "door" }]

[host.rack]
cloud = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return path


def test_a_service_is_the_command_that_a_person_would_type() -> None:
    plan = ServicePlan(name="end-1", kind="end", settings={"node_id": "end-1", "max_batch_size": "8"})
    assert plan.arguments() == ["end", "--node-id", "end-1", "--max-batch-size", "8"]


def test_counts_become_a_scheduler_and_numbered_nodes() -> None:
    plan = local_plan({Tier.CLOUD: 1, Tier.END: 2}, scheduler={"trusted": ["end", "cloud"], "n_map": None, "port": 0})
    assert [(service.kind, service.name) for service in plan.services] == [
        ("scheduler", "scheduler"),
        ("end", "end-1"),
        ("end", "end-2"),
        ("cloud", "cloud-1"),
    ]
    assert plan.scheduler is not None
    assert plan.scheduler.settings == {"trusted": "end,cloud", "port": "0"}
    assert plan.scheduler_url is None


def test_a_host_starts_its_own_part(file: Path) -> None:
    hub = read_fleet_file(file, "hub")
    assert hub.scheduler_url == "http://10.0.0.5:8070"
    assert [(one.kind, one.name, dict(one.settings)) for one in hub.services] == [
        ("scheduler", "scheduler", {"host": "10.0.0.5", "port": "8070", "trusted": "end,edge"}),
        ("edge", "hub-edge-1", {"host": "10.0.0.5", "port": "8071", "provider": "cuda"}),
    ]


def test_groups_of_nodes_with_settings_of_their_own(file: Path) -> None:
    pi = read_fleet_file(file, "pi")
    assert pi.scheduler is None
    assert [(one.name, one.settings.get("threads")) for one in pi.services] == [
        ("pi-end-1", "1"),
        ("pi-end-2", "1"),
        ("door", None),
    ]


TABLES = """
[host.cam]
[[host.cam.end]]
threads = 1
learn = { size = "500MB", audit_share = 0.05 }
uplink = { escalate = "all" }
[[host.cam.end.source]]
name = 'a "door" \\ \u00fc'
rate = 2
learn = true
[[host.cam.end.source]]
name = "gate"
tags = ["a", "b"]
"""


def test_tables_of_a_node_become_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('scheduler = "http://127.0.0.1:1"\n' + TABLES)
    (node,) = read_fleet_file(path).nodes
    assert node.arguments() == ["end", "--host", "127.0.0.1", "--threads", "1"]
    assert node.tables == {
        "learn": {"size": "500MB", "audit_share": 0.05},
        "uplink": {"escalate": "all"},
        "source": [
            {"name": 'a "door" \\ \u00fc', "rate": 2, "learn": True},
            {"name": "gate", "tags": ["a", "b"]},
        ],
    }
    assert {kind: set(names) for kind, names in fleet_tables.items()} == {"end": set(EndSettings.tables)}


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("end = { lern = { size = '1GB' } }", "lern"),
        ("edge = { learn = { size = '1GB' } }", "learn"),
        ("end = { config = 'end.toml', learn = { size = '1GB' } }", "config"),
        ("scheduler = { learn = { size = '1GB' } }", "learn"),
    ],
)
def test_tables_that_a_service_does_not_have_are_refused(tmp_path: Path, group: str, said: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'scheduler = "http://127.0.0.1:1"\n[host.cam]\n{group}\n')
    with pytest.raises(SetupError, match=said):
        read_fleet_file(path)


def test_nodes_listen_on_loopback_unless_told_otherwise(file: Path) -> None:
    assert read_fleet_file(file, "rack").nodes[0].settings == {"host": "127.0.0.1"}


def test_a_machine_states_once_what_protects_its_services(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        'scheduler = "https://10.0.0.5:1"\n[host.hub]\naddress = "10.0.0.5"\ntokens = "t.toml"\n'
        'token_file = "hub.token"\ntls_cert = "c.pem"\ntls_key = "k.pem"\ntls_ca = "a.pem"\ninsecure = true\n'
        'scheduler = { port = 1, insecure = false }\nedge = { tls_ca = "b.pem" }\nend = 1\n'
    )
    scheduler, end, edge = read_fleet_file(path).services
    shared = {"host": "10.0.0.5", "tls_cert": "c.pem", "tls_key": "k.pem", "tls_ca": "a.pem"}
    assert scheduler.settings == {**shared, "tokens": "t.toml", "port": "1", "insecure": "False"}
    assert end.settings == {**shared, "token_file": "hub.token", "insecure": "True"}
    assert edge.settings == {**end.settings, "tls_ca": "b.pem"}
    assert "--insecure" not in scheduler.arguments()
    text = path.read_text()
    path.write_text(text.replace("https:", "http:"))
    with pytest.raises(SetupError, match=r"has a tls_cert, so nodes must look for it at https://, and not at http://"):
        read_fleet_file(path)
    path.write_text(text.replace("port = 1", "port = 2"))
    with pytest.raises(SetupError, match=r"listens on port 2, and nodes look for it at https://10.0.0.5:1"):
        read_fleet_file(path)
    assert "--insecure" in end.arguments()


def test_a_machine_names_the_site_of_its_nodes_and_a_group_may_name_another(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        'scheduler = "http://127.0.0.1:1"\n[host.hub]\nsite = "office"\n'
        'scheduler = { share = ["cloud", "shop-7=none"] }\nend = 2\nedge = [{ site = "shop-7" }, {}]\n'
    )
    scheduler, *nodes = read_fleet_file(path).services
    assert scheduler.settings["share"] == "cloud,shop-7=none"
    assert "site" not in scheduler.settings
    assert [node.settings["site"] for node in nodes] == ["office", "office", "shop-7", "office"]
    path.write_text(path.read_text().replace('site = "office"\n', ""))
    assert [node.settings.get("site") for node in read_fleet_file(path).nodes] == [None, None, "shop-7", None]


def test_the_only_host_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('scheduler = "http://a:1"\n[host.only]\nend = 1\n')
    assert [one.name for one in read_fleet_file(path).nodes] == ["only-end-1"]


def test_defaults_do_not_overrule(file: Path) -> None:
    plan = read_fleet_file(file, "hub").with_defaults({"port": 0, "log_format": "json"})
    assert [(one.settings["port"], one.settings["log_format"]) for one in plan.services] == [
        ("8070", "json"),
        ("8071", "json"),
    ]


GOOD = 'scheduler = "http://a:1"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheduler =", "not valid TOML"),
        ("[host.a]\nend = 1", r"scheduler is missing \(address at which nodes register"),
        ('scheduler = "a:1"\n[host.a]\nend = 1', "scheduler is 'a:1': must start with http"),
        (GOOD, r"host is missing \(tables \[host.NAME\]"),
        (GOOD + "host = 1", "host is 1: input should be a table"),
        (GOOD + "[host.a]", "starts nothing"),
        (GOOD + "[host.a]\nend = 0", "starts nothing"),
        (GOOD + "[host.a]\nedges = 1", r"host.a.edges is unknown; did you mean edge?"),
        (GOOD + "ports = 1\n[host.a]\nend = 1", "ports is unknown; known are scheduler, host"),
        (GOOD + "[host.a]\nend = 'two'", "host.a.end.0.count is 'two'"),
        (GOOD + "[host.a]\nend = -1", "host.a.end.0.count is -1"),
        (GOOD + "[host.a]\nend = { count = true }", "host.a.end.0.count is True"),
        (GOOD + "[host.a]\nscheduler = 8070", "host.a.scheduler is 8070: input should be a table"),
        (GOOD + "[host.a]\nend = { count = 2, node_id = 'x' }", "several nodes are called x"),
        (GOOD + "[host.a]\nsite = 'Shop 7'\nend = 1", "host.a.site is 'Shop 7': must be 1 to 63 lower-case letters"),
        (GOOD + "[host.a]\nend = { site = 7 }", "host.a.end.0.site is 7: input should be a valid string"),
        (GOOD + "[host.'Big Box']\nend = 1", "must be 1 to 63 lower-case letters"),
        (GOOD + "[host.a]\nend = 1\n[host.b]\nend = 1", r"name this one: --host a\|b"),
        ('scheduler = "http://a:1/foo"\n[host.a]\nend = 1', "scheduler is 'http://a:1/foo': must be without a path"),
        (
            'scheduler = "http://a:99999"\n[host.a]\nend = 1',
            "scheduler is 'http://a:99999': must name a host, and a port",
        ),
        ('scheduler = ["http://a:1", "b"]\n[host.a]\nend = 1', "scheduler: must start with http"),
        ("scheduler = []\n[host.a]\nend = 1", "scheduler: must name a URL"),
        (GOOD + "[host.a]\nend = 100000", "host.a.end.0.count is 100000: input should be less than or equal to 100"),
        (GOOD + "[host.a]\nedge = [{ count = 60 }, { count = 60 }]", "120 edge nodes; one machine may run 100"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    with pytest.raises(SetupError, match=message):
        read_fleet_file(path)


SCHEDULERS = [
    # URL, [host.hub], what is wrong
    ("http://10.0.0.5:8070", 'address = "10.0.0.5"\nscheduler = { port = 8070 }', None),
    ("http://10.0.0.5:8070", 'address = "0.0.0.0"\nscheduler = {}', None),
    ("http://10.0.0.5:8070", 'scheduler = { host = "::" }', None),
    ("http://hub.lan:8070", 'address = "10.0.0.5"\nscheduler = {}', None),
    ("http://hub.lan:8070", 'address = "hub.lan"\nscheduler = {}', None),
    ("http://localhost:8070", "scheduler = {}", None),
    ("https://hub.lan", "scheduler = { port = 8070 }", None),
    (
        "http://10.0.0.5:8070",
        'address = "10.0.0.5"\nscheduler = { port = 8071 }',
        "listens on port 8071, and nodes look",
    ),
    ("http://10.0.0.5", 'address = "10.0.0.5"\nscheduler = { port = 8070 }', "listens on port 8070, and nodes look"),
    ("http://10.0.0.5:8070", 'address = "10.0.0.6"\nscheduler = {}', "listens on 10.0.0.6, and nodes look for it at"),
    ("http://10.0.0.5:8070", "scheduler = {}", "listens on 127.0.0.1, .*set the address of this machine accordingly"),
    ("http://hub.lan:8070", "scheduler = {}", "listens on 127.0.0.1"),
    ("http://localhost:8070", 'address = "10.0.0.5"\nscheduler = {}', "listens on 10.0.0.5"),
    (
        "http://10.0.0.5:8070",
        'address = "10.0.0.5"\nscheduler = {}\n[host.rack]\nscheduler = {}',
        "has a scheduler on hub",
    ),
]


@pytest.mark.parametrize(("url", "hub", "wrong"), SCHEDULERS)
def test_the_scheduler_is_where_nodes_look_for_it(tmp_path: Path, url: str, hub: str, wrong: str | None) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'scheduler = "{url}"\n[host.pi]\nend = 1\n[host.hub]\n{hub}\n')
    if wrong is None:
        scheduler = read_fleet_file(path, "hub").scheduler
        assert scheduler is not None
        assert scheduler.settings["port"] == "8070"
        return
    for host in ("hub", "pi"):  # on whichever machine it is noticed first
        with pytest.raises(SetupError, match=wrong):
            read_fleet_file(path, host)


def test_the_port_of_the_scheduler_need_not_be_said_twice(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('scheduler = "http://127.0.0.1:9000"\n[host.hub]\nscheduler = {}\n')
    scheduler = read_fleet_file(path).scheduler
    assert scheduler is not None
    assert scheduler.settings["port"] == "9000"


BOTH = 'scheduler = ["http://10.0.0.5:8070", "http://10.0.0.6:8075/"]\n[host.pi]\nend = 1\n'
HUB, RACK = (f'[host.{name}]\naddress = "{address}"\n' for name, address in (("hub", "10.0.0.5"), ("rack", "10.0.0.6")))


@pytest.mark.parametrize("listed", [BOTH, BOTH.replace('", "', ", ").replace("[", "", 1).replace("]", "", 1)])
def test_several_schedulers_each_at_an_address_of_its_own(tmp_path: Path, listed: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'{listed}{HUB}scheduler = {{ database = "x" }}\n{RACK}scheduler = {{}}\n')
    for host, port in (("hub", "8070"), ("rack", "8075")):
        plan = read_fleet_file(path, host)
        assert plan.scheduler is not None
        assert plan.scheduler.settings["port"] == port
    assert read_fleet_file(path, "pi").scheduler_url == "http://10.0.0.5:8070,http://10.0.0.6:8075"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (f"{RACK}scheduler = {{ port = 8070 }}", "listens on port 8070, and nodes look for it at http://10.0.0.6:8075"),
        ('[host.rack]\naddress = "10.0.0.7"\nscheduler = {}', "listens on 10.0.0.7"),
        (
            f'{HUB}scheduler = {{}}\n{RACK}scheduler = {{}}\n[host.c]\naddress = "10.0.0.5"\nscheduler = {{}}',
            "a scheduler on hub and on rack and on c: and 2 URLs",
        ),
    ],
)
def test_each_of_several_schedulers_is_where_nodes_look_for_it(tmp_path: Path, rest: str, message: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(BOTH + rest)
    with pytest.raises(SetupError, match=message):
        read_fleet_file(path, "pi")


def test_an_unknown_host_and_a_missing_file(file: Path) -> None:
    with pytest.raises(SetupError, match="no machine 'attic'; it has hub, pi, rack"):
        read_fleet_file(file, "attic")
    with pytest.raises(SetupError, match="cannot read the fleet file"):
        read_fleet_file(file.with_name("absent.toml"))
