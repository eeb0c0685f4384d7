"""The files in deploy/ say what the services understand, by the tools that will read them."""

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

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


def test_there_is_a_unit_per_service() -> None:
    assert {unit.name for unit in (DEPLOY / "systemd").glob("*.service")} == set(UNITS.values())


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_unit_starts_its_service_with_flags_and_settings_that_exist(kind: str, tmp_path: Path) -> None:
    unit = section(DEPLOY / "systemd" / UNITS[kind])
    program, name, *flags = shlex.split(unit["ExecStart"])
    assert (program, name) == ("/opt/terrace/bin/terrace", kind)
    assert unit["DynamicUser"] == "yes", "not as root, even where the drop-in is forgotten"
    started: list[ServiceSettings] = []

    def start(settings: ServiceSettings) -> int:
        started.append(settings)
        return 0

    app = typer.Typer()
    app.command()(command(SETTINGS[kind], start))
    meant = {"%i": "8099", "%p": f"terrace-{kind}", "%S": str(tmp_path), "%C": str(tmp_path)}
    line = " ".join(flags).replace("/etc/terrace/terrace.toml", str(DEPLOY / "terrace.toml"))
    arguments = re.sub(r"%\w", lambda found: meant[found[0]], line).split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (settings,) = started
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
    assert "\n# cp -r docs /opt/terrace/" in (DEPLOY.parent / "docs" / "deploy.md").read_text()
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


@pytest.mark.parametrize("file", [DEPLOY / "fleet.toml", ROOT / "docs" / "deploy.md"], ids=lambda path: path.name)
def test_the_example_fleets_have_settings_that_exist(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    if file.suffix == ".md":
        (text,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
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
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001"
    assert lines.index("USER 10001") < next(index for index, line in enumerate(lines) if line.startswith("ENTRYPOINT"))
