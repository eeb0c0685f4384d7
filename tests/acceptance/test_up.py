"""`terrace up` as a user runs it: one process to start, one Ctrl-C to stop, and no orphans ever."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from terrace.cli import run
from tests.acceptance.fleets import Up, children_of, running
from tierkit.client import Client
from tierkit.http.address import free_port


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    counts = ("--end", "1", "--edge", "1", "--cloud", "0")
    with running("--port", "0", *counts, "--state", str(tmp_path / "state"), log=tmp_path / "log") as fleet:
        yield fleet


def test_ctrl_c_stops_all_in_good_order(up: Up) -> None:
    assert len(up.children) == 3
    joining = re.search(r"the scheduler is at http://\S+; nodes are joining", up.output)
    assert joining is not None
    assert joining.start() < up.output.index("mobilenet-v1-0.5") < up.output.index("registered with the scheduler")
    assert up.output.index("registered with the scheduler") < up.output.index("Terrace is up: ")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=20) == 0
    assert up.running(within_s=0) == 0
    assert re.findall(r"(\S+) +stopped", up.output) == ["end-1", "edge-1", "scheduler"]


def test_a_node_is_killed_by_its_name_and_nothing_else_and_a_killed_launcher_leaves_no_orphans(
    up: Up, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (processes,) = re.findall(r"^processes +(.*)$", up.output, re.MULTILINE)
    pids = dict(pair.split() for pair in processes.split(", "))
    assert sorted(pids) == ["edge-1", "end-1", "scheduler"]
    assert {int(pid) for pid in pids.values()} == set(children_of(up.process.pid))
    # What looks like the node, and is none.
    double = [sys.executable, "-c", "import sys; sys.stdin.read()", "terrace", "end", "--node-id", "end-1"]
    with subprocess.Popen(double, stdin=subprocess.PIPE) as other:
        # By its number: other fleets on this machine may have an end-1 as well.
        assert run(["up", "kill", pids["end-1"]]) == 0
        up.wait_for("end-1 was killed by SIGKILL; the other services go on")
        assert other.poll() is None
        assert run(["up", "kill", pids["end-1"]]) == 2
        assert "edge-1" in capsys.readouterr().err
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.close()
    assert up.running(within_s=0) == 2
    up.process.kill()
    up.process.wait()
    assert up.running(within_s=10) == 0


def test_a_fleet_whose_nodes_are_refused_is_not_up(tmp_path: Path) -> None:
    make = ["token", "create", "--name", "another", "--role", "node", "--out", str(tmp_path / "node.token")]
    assert run([*make, "--tokens", str(tmp_path / "tokens.toml")]) == 0
    port = free_port()
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'scheduler = "http://127.0.0.1:{port}"\n[host.hub]\ntokens = "{tmp_path / "tokens.toml"}"\n'
        f'token_file = "{tmp_path / "node.token"}"\nend = 1\n'
        f'scheduler = {{ port = {port}, state = "{tmp_path / "state"}" }}\n'
    )
    with running("--fleet", str(file), "--host", "hub", log=tmp_path / "log") as up:
        up.wait_for("refuses this node")
        assert "Terrace is up" not in up.output
        assert "Terrace has been started: scheduler, hub-end-1" in up.output
        assert re.search(r"^try +terrace classify .* --token-file FILE$", up.output, re.MULTILINE)
        assert "the token of a user" in up.output


def test_it_stops_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    counts = ("--end", "1", "--edge", "0", "--cloud", "0")
    command = [sys.executable, "-m", "terrace", "up", "--port", "0", *counts, "--state", str(tmp_path / "state")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as fleet:
        assert fleet.stdout is not None
        assert fleet.stderr is not None
        assert "scheduler" in fleet.stdout.readline()
        (child,) = (os.pidfd_open(pid) for pid in children_of(fleet.pid)[:1])
        fleet.stdout.close()
        assert fleet.wait(timeout=30) == 0
        assert select.select([child], [], [], 0)[0] == [child]
        assert "Traceback" not in fleet.stderr.read()
    os.close(child)


def test_a_fleet_file_starts_the_part_of_a_machine(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'scheduler = "http://127.0.0.1:{port}"\n'
        f'[host.hub]\nscheduler = {{ port = {port}, state = "{tmp_path / "state"}" }}\nedge = 1\n'
        "[host.pi]\nend = { count = 2, max_batch_size = 8 }\n"
    )
    with (
        running("--fleet", str(file), "--host", "pi", log=tmp_path / "pi.log", until="pi-end-2 +no model set") as pi,
        running("--fleet", str(file), "--host", "hub", log=tmp_path / "hub.log") as hub,
    ):
        assert "Terrace is up: scheduler, hub-edge-1" in hub.output
        for node in ("pi-end-1", "pi-end-2"):
            pi.wait_for(f"{node} +registered with the scheduler")
        pi.wait_for("Terrace is up: pi-end-1, pi-end-2")
        assert pi.output.index("registered with the scheduler") < pi.output.index("Terrace is up")
        with Client(f"http://127.0.0.1:{port}") as client:
            assert {device.node_id for device in client.devices()} == {"hub-edge-1", "pi-end-1", "pi-end-2"}
        for fleet in (hub, pi):
            fleet.process.send_signal(signal.SIGTERM)
            assert fleet.process.wait(timeout=20) == 0
            assert fleet.running(within_s=0) == 0


def test_the_command_of_the_greeting_works_as_typed_where_tokens_and_tls_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "of alice"
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    cert = folder / "hub.pem"
    cert.touch(0o600)
    cert.write_bytes(authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())
    for name, role in (("alice", "user"), ("hub", "node")):
        make = ["token", "create", "--name", name, "--role", role, "--out", str(folder / f"{name}.token")]
        assert run([*make, "--tokens", str(folder / "tokens.toml")]) == 0
    port = free_port()
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'scheduler = "https://127.0.0.1:{port}"\n[host.hub]\ntokens = "{folder / "tokens.toml"}"\n'
        f'tls_cert = "{cert}"\ntls_ca = "{folder / "ca.pem"}"\n'
        f'token_file = "{folder / "hub.token"}"\nend = 1\n'
        f'scheduler = {{ port = {port}, state = "{tmp_path / "state"}" }}\n'
    )
    alice = ("--token-file", str(folder / "alice.token"))
    with running("--fleet", str(file), "--host", "hub", *alice, log=tmp_path / "log") as up:
        assert "not waited for the nodes" not in up.output
        (typed,) = re.findall(r"^try +(.*)$", up.output, re.MULTILINE)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(typed, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_wrong_setting_in_a_fleet_file_is_told_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('scheduler = "http://127.0.0.1:9"\n[host.pi]\nend = { threds = 2 }\n')
    assert run(["up", "--fleet", str(file)]) == 2
    said = capsys.readouterr().err
    assert str(file) in said
    assert "--threds" in said


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "terrace", "up", "--port", str(port)]
        again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 75
    (sentence,) = again.stderr.splitlines()
    assert f"port {port} on 127.0.0.1 is in use" in sentence
    assert again.stdout == ""
