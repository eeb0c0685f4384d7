"""The files in deploy/ say what the services understand."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from cloud_node.settings import CloudSettings
from edge_node.settings import EdgeSettings
from end_node.settings import EndSettings
from scheduler.settings import SchedulerSettings
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


def service_section(unit: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    parser.read(unit)
    return dict(parser["Service"])


def test_there_is_a_unit_per_service() -> None:
    assert {unit.stem for unit in (DEPLOY / "systemd").iterdir()} == {f"terrace-{kind}" for kind in SETTINGS}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_unit_starts_its_service_with_flags_that_exist(kind: str) -> None:
    section = service_section(DEPLOY / "systemd" / f"terrace-{kind}.service")
    program, command, *flags = shlex.split(section["ExecStart"])
    assert (program, command) == ("/opt/terrace/bin/terrace", kind)
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags if flag.startswith("--")]
    assert set(names) <= {"config", *SETTINGS[kind].model_fields}
    assert section["DynamicUser"] == "yes"
    assert float(section["TimeoutStopSec"]) > SETTINGS[kind]().drain_s


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_example_settings_are_read_by_their_service(kind: str) -> None:
    settings = load_settings(SETTINGS[kind], flags={}, config=DEPLOY / "terrace.toml")
    assert settings.host.startswith("10.0.0.")


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
