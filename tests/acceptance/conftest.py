"""A fleet that the acceptance tests share, all in one worker (`tests/conftest.py`), and a folder with pictures."""

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.data import read_sample
from models.hierarchy import bundled_hierarchy
from tests.acceptance.fleets import running

PICTURES = ("apple", "ray", "bicycle")


@pytest.fixture(scope="package")
def fleet_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the scheduler of a running `terrace up`. It ends with the tests of this folder, for six processes are a
    burden to those that come after, even while they rest."""
    folder = tmp_path_factory.mktemp("fleet")
    arguments = ("--port", "0", "--n-map", "1", "--state", str(folder / "state"))
    with running(*arguments, log=folder / "log") as up:
        found = re.search(r"scheduler  (http://\S+)", up.output)
        assert found is not None
        yield found[1]
        up.process.terminate()
        up.process.wait(timeout=30)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, entered, with `photos/`, `by-class/`, `photos.zip` and `photos.npz` of the bundled sample."""
    monkeypatch.chdir(tmp_path)
    sample = read_sample()
    names = bundled_hierarchy(sample.hierarchy_name).fine
    assert sample.fine is not None
    indices = [int(np.flatnonzero(sample.fine == names.index(name))[0]) for name in PICTURES]
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for name, index in zip(PICTURES, indices, strict=True):
            held = io.BytesIO()
            Image.fromarray(sample.images[index]).save(held, "PNG")
            for path in (Path("photos", f"{name}.png"), Path("by-class", name, "1.png")):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(held.getvalue())
            archive.writestr(f"{name}.png", held.getvalue())
    np.savez("photos.npz", images=sample.images[indices], labels=sample.fine[indices])
    return tmp_path
