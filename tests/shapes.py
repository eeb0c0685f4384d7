"""A tiny data set with two levels of labels, for the tests of training."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from models.data import ImageSet
from models.hierarchy import Hierarchy

__all__ = ["SHAPES", "shape_images", "write_shapes"]

SHAPES = Hierarchy.parse(
    {
        "name": "shapes",
        "fine": ["circle", "ellipse", "square"],
        "superclasses": {"round": ["circle", "ellipse"], "angular": ["square"]},
    },
    source="test",
)


def shape_images(side: int, seed: int = 0) -> ImageSet:
    """36 images, whose colour tells the class."""
    fine = np.arange(36) % 3
    images = np.random.default_rng(seed).integers(0, 60, (36, side, side, 3), dtype=np.uint8)
    images[np.arange(36), :, :, fine] += 150
    return ImageSet(
        images=images,
        fine=fine,
        coarse=SHAPES.coarse_labels(fine),
        names=tuple(map(str, range(36))),
        hierarchy_name="shapes",
    )


def write_shapes(root: Path, seed: int = 0) -> Path:
    """The images as a data set in a folder, training and test images alike."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "hierarchy.json").write_text(json.dumps(SHAPES.content()))
    images = shape_images(32, seed)
    assert images.fine is not None
    for split in ("train", "test"):
        for number, (pixels, label) in enumerate(zip(images.images, images.fine, strict=True)):
            folder = root / split / SHAPES.fine[int(label)]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(pixels)).save(folder / f"{number}.png")
    return root
