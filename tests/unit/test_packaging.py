"""The packages of the wheel, the import layers and the folders say the same."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
CHECKED = [*PACKAGES, "benchmarks"]
"""Packages that lint, types and contracts cover: those of the wheel, and one that is not installed."""


def test_import_layers_cover_every_package() -> None:
    linter = PYPROJECT["tool"]["importlinter"]
    assert sorted(linter["root_packages"]) == sorted(CHECKED)
    layers = next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    assert sorted(name.strip() for layer in layers for name in layer.split("|")) == sorted(CHECKED)


def test_every_top_level_package_is_in_the_wheel() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"tests", "benchmarks"} == set(PACKAGES)


def test_type_checker_reads_every_package() -> None:
    assert sorted(PYPROJECT["tool"]["mypy"]["files"]) == sorted([*CHECKED, "tests"])
