"""The files in deploy/ say what the services understand, by the tools that will read them."""

import re
import shlex
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cloud_node.settings import CloudSettings
from edge_node.settings import EdgeSettings
from end_node.settings import EndSettings
from scheduler.settings import SchedulerSettings
from tierkit.flags import command
from tierkit.fleet import read_fleet_file
from tierkit.settings import ServiceSettings, load_settings

yaml: Any = pytest.importorskip("yaml")  # comes with uvicorn

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "scheduler": SchedulerSettings,
    "end": EndSettings,
    "edge": EdgeSettings,
    "cloud": CloudSettings,
}
UNITS = {kind: f"terrace-{kind}.service" if kind == "scheduler" else f"terrace-{kind}@.service" for kind in SETTINGS}
COMMON = DEPLOY / "systemd" / "terrace-.service.d" / "common.conf"
MAY_BE_UNKNOWN = ("RestartSteps", "RestartMaxDelaySec")
"""Before systemd 254, which says so and goes on."""


def section(unit: Path, name: str = "Service") -> dict[str, str]:
    parser = ConfigParser(interpolation=None, strict=False)  # a list is a key that is repeated
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    parser.read(unit)
    return dict(parser[name])


def settings_of(kind: str, arguments: list[str]) -> ServiceSettings:
    """What the command `terrace KIND` starts its service with."""
    started: list[ServiceSettings] = []

    def start(settings: ServiceSettings) -> int:
        started.append(settings)
        return 0

    app = typer.Typer()
    app.command()(command(SETTINGS[kind], start))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return started[0]


def test_there_is_a_unit_per_service() -> None:
    assert {unit.name for unit in (DEPLOY / "systemd").glob("*.service")} == set(UNITS.values())


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_unit_starts_its_service_with_flags_and_settings_that_exist(kind: str, tmp_path: Path) -> None:
    unit = section(DEPLOY / "systemd" / UNITS[kind])
    program, name, *flags = shlex.split(unit["ExecStart"])
    assert (program, name) == ("/opt/terrace/bin/terrace", kind)
    assert unit["DynamicUser"] == "yes", "not as root, even where the drop-in is forgotten"
    meant = {"%i": "8099", "%p": f"terrace-{kind}", "%S": str(tmp_path), "%C": str(tmp_path)}
    line = " ".join(flags).replace("/etc/terrace/terrace.toml", str(DEPLOY / "terrace.toml"))
    settings = settings_of(kind, re.sub(r"%\w", lambda found: meant[found[0]], line).split())
    assert settings.host.startswith("10.0.0.")
    assert settings.port == (8070 if kind == "scheduler" else 8099)
    assert float(section(COMMON)["TimeoutStopSec"]) > settings.drain_s


def test_units_stop_for_a_wrong_setting_alone() -> None:
    common = section(COMMON)
    assert common["Restart"] == "on-failure"
    assert common["RestartPreventExitStatus"].split() == ["2"]
    assert section(COMMON, "Unit")["StartLimitIntervalSec"] == "0"


def test_the_documentation_that_units_name_is_installed_by_the_commands() -> None:
    named = section(COMMON, "Unit")["Documentation"].removeprefix("file://")
    assert "\n# cp -r docs /opt/terrace/" in (DEPLOY.parent / "docs" / "how-to" / "systemd.md").read_text()
    assert (ROOT / Path(named).relative_to("/opt/terrace")).is_file()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with the units in it, and systemd's own that they name."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    root = tmp_path_factory.mktemp("machine")
    shutil.copytree(DEPLOY / "systemd", root / "etc/systemd/system")
    shutil.copytree("/usr/lib/systemd/system", root / "usr/lib/systemd/system", symlinks=True)
    program = root / "opt/terrace/bin/terrace"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    return root


def systemd_analyze(verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", verb, "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("unit", UNITS.values())
def test_systemd_finds_no_fault_with_a_unit(machine: Path, unit: str) -> None:
    done = systemd_analyze("verify", f"--root={machine}", "--man=no", str(machine / "etc/systemd/system" / unit))
    told = [line for line in done.stderr.splitlines() if "terrace" in line]
    assert [line for line in told if not any(f"'{key}'" in line for key in MAY_BE_UNKNOWN)] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("unit", UNITS.values())
def test_systemd_rates_the_restrictions_of_a_unit(machine: Path, unit: str) -> None:
    name = unit.replace("@.", "@8099.")
    done = systemd_analyze("security", f"--root={machine}", "--offline=true", "--threshold=20", name)
    assert done.returncode == 0, done.stdout + done.stderr  # 2.0 at most


@pytest.mark.parametrize(
    "file", [DEPLOY / "fleet.toml", ROOT / "docs" / "how-to" / "machines.md"], ids=lambda path: path.name
)
def test_the_example_fleets_have_settings_that_exist(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    if file.suffix == ".md":
        blocks = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        (text,) = (block for block in blocks if "[host." in block)
        file = tmp_path / "fleet.toml"
        file.write_text(text)
    hosts = re.findall(r"^\[host\.(\w+)\]$", text, re.MULTILINE)
    assert len(hosts) >= 2
    for host in hosts:
        plan = read_fleet_file(file, host)
        for service in plan.services:
            assert set(service.settings) <= set(SETTINGS[service.kind].model_fields), service
            load_settings(SETTINGS[service.kind], flags=service.settings)


def test_the_image_runs_without_root() -> None:
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    (user,) = (line for line in lines if line.startswith("USER "))
    assert user == "USER 10001:10001"  # a number, as Kubernetes asks for where it must not be root
    assert lines.index(user) < next(index for index, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
    assert lines.count("FROM ${BASE}") + lines.count("FROM ${BASE} AS build") == 2


def test_the_image_is_built_from_the_packages_alone(tmp_path: Path) -> None:
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah: apt-get install buildah")
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY . /src\n")
    store = ["--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]
    built = ["--file", str(tmp_path / "Containerfile"), "--output", f"type=local,dest={tmp_path / 'out'}", str(ROOT)]
    command_line = ["buildah", *store, "build", "--isolation", "chroot", "--quiet", *built]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    taken = {path.name for path in (tmp_path / "out" / "src").iterdir()}
    assert taken == {"LICENSE", "README.md", "pyproject.toml", *wheel["packages"]}
    assert list((tmp_path / "out").rglob("__pycache__")) == []


@pytest.fixture(scope="module")
def containers() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml."""
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]  # type: ignore[no-any-return]


def test_compose_understands_the_file() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker-compose: apt-get install docker-compose")
    command_line = ["docker-compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_containers_have_no_more_rights_than_they_need(containers: dict[str, dict[str, Any]]) -> None:
    for name, container in containers.items():
        assert container["read_only"], name
        assert container["cap_drop"] == ["ALL"], name
        assert container["security_opt"] == ["no-new-privileges:true"], name
        assert container["healthcheck"]["test"][0] == "CMD", name
        assert all(port.startswith("127.0.0.1:") for port in container.get("ports", ())), name
        assert container["image"] == "terrace" or container["user"].partition(":")[0].isdigit(), name


def test_what_containers_mount_is_there_or_made_by_the_documented_commands(
    containers: dict[str, dict[str, Any]],
) -> None:
    page = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    assert "install -d -m 700 -o 10001 -g 10001 secrets tokens" in page
    for container in containers.values():
        for volume in container["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or source == "./tokens" or (DEPLOY / source).is_dir(), source
    for secret in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["secrets"].values():
        assert secret["file"].removeprefix("./") in page


def test_prometheus_asks_each_service_where_it_listens(containers: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    listening = {}
    for name, container in containers.items():
        if container["image"] == "terrace":
            kind, *arguments = shlex.split(container["command"])
            settings = settings_of(kind, arguments)
            listening[name] = settings.port
            assert settings.host == "0.0.0.0"
            assert f"http://127.0.0.1:{settings.port}/readyz" in container["healthcheck"]["test"][-1]
    assert sorted(listening) == ["cloud", "edge", "end-1", "end-2", "scheduler"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert set(job["static_configs"][0]["targets"]) == {f"{name}:{port}" for name, port in listening.items()}


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    token = tmp_path / "token"
    token.touch()
    file = folder / "prometheus.yml"
    file.write_text(file.read_text().replace("/run/secrets/prometheus_token", str(token)))
    done = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
