"""A node's choice among the networks of its tier."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from end_node.settings import EndSettings
from models import choosing
from models.choosing import with_choice
from models.importing.run import Wish, import_network
from models.manifest import Manifest, load_manifest, save_manifest
from tests.model_sets import COLOURS, colour_network, colour_set
from tierkit.inference.served import Loaded
from tierkit.types import Tier

MB = 10**6


class Machine:
    """Free memory and speeds, and the networks that were measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes: int | None = 1000 * MB
        self.ms: dict[str, float] = {}
        self.measured: list[str] = []
        monkeypatch.setattr("tierkit.memory.free_bytes", lambda: self.free_bytes)
        monkeypatch.setattr(choosing, "measure_ms", self.measure)
        self.restart()

    def restart(self) -> None:
        choosing._free_at_start.cache_clear()
        choosing._log_once.cache_clear()
        choosing._measured.clear()
        self.measured.clear()

    def measure(self, entry: Any, folder: Path, **_: Any) -> float:
        self.measured.append(entry.name)
        return self.ms.get(entry.name, 1.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set with two networks for the end tier; the second one has more parameters."""
    folder = tmp_path_factory.mktemp("several")
    models = colour_set(folder / "set", {"end": colour_network(folder / "a.onnx")})
    wide = Wish(
        file=colour_network(folder / "b.onnx", size=64, factor=5.0),
        models=models,
        tier=Tier.END,
        labels=models.parent / "set.txt",
        name="large",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.importing.run.least_ms_per_image", lambda *_: 1.0)
        import_network(wide)
    manifest = load_manifest(models)
    grown = (
        entry.model_copy(update={"parameters": 10**6}) if entry.name == "large" else entry for entry in manifest.models
    )
    save_manifest(manifest.model_copy(update={"models": tuple(grown)}), models)
    assert len(COLOURS) == manifest.models[0].classes
    return models


async def chosen(models: Path, **settings: Any) -> str:
    manifest = load_manifest(models)
    return (await with_choice(EndSettings(models=models, **settings), Tier.END, manifest)).default_for(Tier.END).name


async def test_the_largest_network_that_is_quick_enough_is_served(
    models: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "models.choosing")
    assert await chosen(models) == "large"
    assert machine.measured == ["large"]
    (record,) = caplog.records
    assert (record.network, "of-end: the chosen one is better" in record.why) == ("large", True)  # type: ignore[attr-defined]
    machine.restart()
    machine.ms["large"] = 101
    assert await chosen(models) == "of-end"
    assert machine.measured == ["large"]
    # Later calls of the same process agree, whatever is free by then.
    machine.free_bytes, machine.ms["large"] = 0, 1
    assert await chosen(models) == "of-end"
    assert machine.measured == ["large"]


async def test_a_network_that_does_not_fit_is_neither_served_nor_measured(models: Path, machine: Machine) -> None:
    entries = {entry.name: entry for entry in load_manifest(models).models}
    large, small = (entries[name].costs for name in ("large", "of-end"))
    assert large is not None
    assert small is not None
    machine.free_bytes = 30 * MB + 4 * small.peak_bytes
    assert large.peak_bytes > small.peak_bytes
    assert await chosen(models) == "of-end"
    assert machine.measured == []


async def test_the_least_is_served_with_a_warning_if_none_suits(
    models: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.free_bytes = 1
    assert await chosen(models) == "of-end"
    assert "no network of the tier suits this machine" in caplog.text
    assert "needs 3" in caplog.text


async def test_without_a_choice_nothing_is_measured(models: Path, machine: Machine) -> None:
    bundled = load_manifest()
    assert await with_choice(EndSettings(), Tier.END, bundled) is bundled
    # --model overrides it.
    manifest = load_manifest(models)
    assert await with_choice(EndSettings(models=models, model=("large",)), Tier.END, manifest) is manifest
    # So does the network whose thresholds were tuned.
    tuned = manifest.model_copy(update={"tuned": ("large",)})
    assert (await with_choice(EndSettings(models=models), Tier.END, tuned)).default_for("end").name == "large"
    # A tier without networks is for those to report who load them.
    assert await with_choice(EndSettings(models=models), Tier.CLOUD, manifest) is manifest
    assert machine.measured == []


async def test_a_node_that_serves_meanwhile_chooses_in_the_background(
    models: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later release may bring the choice."""
    manifest, threads = load_manifest(models), []

    async def noted(work: Any) -> Any:
        threads.append(work)
        return work()

    monkeypatch.setattr(choosing, "in_background", noted)
    machine.ms["large"] = 101
    after = await with_choice(EndSettings(models=models), Tier.END, manifest, Loaded(serving=True))
    assert after.default_for(Tier.END).name == "of-end"
    assert len(threads) == len(machine.measured) == 1


def test_thresholds_bind_the_choice_until_their_network_is_replaced(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path / "set")
    shutil.copy(models.parent / "set.txt", tmp_path / "labels.txt")
    manifest = load_manifest(models)
    assert "tuned" not in manifest.content()
    save_manifest(manifest.model_copy(update={"tuned": ("of-end", "large")}), tmp_path / "set")

    def imported(name: str, tier: Tier) -> tuple[str, ...]:
        file = colour_network(tmp_path / f"{name}.onnx", factor=3.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("models.importing.run.least_ms_per_image", lambda *_: 1.0)
            wish = Wish(file=file, models=tmp_path / "set", tier=tier, labels=tmp_path / "labels.txt", name=name)
            import_network(wish)
        return load_manifest(tmp_path / "set").tuned

    assert imported("another", Tier.END) == ("of-end", "large")
    assert [entry.name for entry in load_manifest(tmp_path / "set").candidates("end")] == ["of-end", "large"]
    assert imported("large", Tier.END) == ()


async def test_a_choice_changes_the_order_only(models: Path, machine: Machine) -> None:
    manifest = load_manifest(models)
    after: Manifest = await with_choice(EndSettings(models=models), Tier.END, manifest)
    assert {entry.name for entry in after.models} == {entry.name for entry in manifest.models}
    assert after.hierarchy == manifest.hierarchy
