"""A hierarchy's name is that of a folder, and makes no difference between releases."""

from pathlib import Path

from models.manifest import load_manifest
from scheduler.core.release import Release, named_like
from tests.model_sets import colour_network, colour_set


def test_the_same_classes_in_another_folder_have_the_present_name(tmp_path: Path) -> None:
    network = colour_network(tmp_path / "net.onnx")
    first, second = (load_manifest(colour_set(tmp_path / name, {"end": network})) for name in ("flowers", "flowers-2"))
    assert first.hierarchy != second.hierarchy
    renamed = named_like(second, first)
    assert (renamed.hierarchy, renamed.digest) == (first.hierarchy, first.digest)
    one, two = (
        Release(number=number, name="flowers", manifest=each, created_at=0.0)
        for number, each in enumerate((first, renamed), 1)
    )
    assert one.fits_beside(two)
    assert named_like(first, first) is first


def test_other_classes_stay_others(tmp_path: Path) -> None:
    present = load_manifest(colour_set(tmp_path / "flowers", {"end": colour_network(tmp_path / "net.onnx")}))
    bundled = load_manifest()
    assert named_like(bundled, present) is bundled
