"""A tiny data set with two levels of labels, for the tests of training."""

import numpy as np

from models.data import ImageSet
from models.hierarchy import Hierarchy

__all__ = ["SHAPES", "shape_images"]

SHAPES = Hierarchy.parse(
    {
        "name": "shapes",
        "fine": ["circle", "ellipse", "square"],
        "superclasses": {"round": ["circle", "ellipse"], "angular": ["square"]},
    },
    source="test",
)


def shape_images(side: int) -> ImageSet:
    """36 images, whose colour tells the class."""
    fine = np.arange(36) % 3
    images = np.random.default_rng(0).integers(0, 60, (36, side, side, 3), dtype=np.uint8)
    images[np.arange(36), :, :, fine] += 150
    return ImageSet(
        images=images,
        fine=fine,
        coarse=SHAPES.coarse_labels(fine),
        names=tuple(map(str, range(36))),
        hierarchy_name="shapes",
    )
