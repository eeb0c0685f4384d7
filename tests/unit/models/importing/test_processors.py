"""The pixels that a network gets, compared with what the processors of transformers and timm make of the same picture.

`processors.json` holds what transformers 5.24 and timm 1.0.31 gave for each configuration: 27 of the values.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.importing.neighbours import CONFIG, pixels_by_config, pixels_by_processor
from models.importing.preprocess import assumed, joined
from models.pictures import resized

CASES = json.loads((Path(__file__).parent / "processors.json").read_text())


def picture(width: int, height: int) -> np.ndarray[Any, Any]:
    """UINT8 `[height, width, 3]`: smooth, and different in each colour and place."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [
        128 + 100 * np.sin(x / 9 + y / 23),
        40 + 1.9 * x * 90 / width * 0.9,
        200 - 1.5 * y * 60 / height + 20 * np.sin(x / 7),
    ]
    return np.asarray(np.clip(np.stack(planes, -1), 0, 255), np.uint8)


def name_of(case: dict[str, Any]) -> str:
    config = case["config"]
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "timm")


@pytest.mark.parametrize("case", CASES, ids=[f"{name_of(case)}-{number}" for number, case in enumerate(CASES)])
def test_a_network_gets_the_pixels_of_the_processor(tmp_path: Path, case: dict[str, Any]) -> None:
    path = tmp_path / case["file"]
    path.write_text(json.dumps(case["config"]))
    facts = pixels_by_config(path, None) if path.name == CONFIG else pixels_by_processor(path)
    preprocess = joined({path.name: facts})
    assert assumed({path.name: facts}, preprocess) in ((), ('resample = "bicubic"',))

    pixels = resized(Image.fromarray(picture(*case["picture"])), preprocess.fit).astype(np.float32)
    factor, offset = (np.array(each, np.float32) for each in preprocess.steps)
    given = ((pixels[..., ::-1] if preprocess.colour == "bgr" else pixels) * factor + offset).transpose(2, 0, 1)
    channels, height, width = case["shape"]
    assert given.shape == (channels, height, width)
    rows, columns = (0, height // 3, height - 1), (0, width // 2, width - 1)
    values = given[:, rows][:, :, columns].reshape(channels, -1)
    expected = np.array(case["values"]).reshape(channels, -1)
    # In steps of a pixel's 255. Perceiver crops before it resizes, which moves the picture by half a pixel: by 4.
    assert (np.abs(values - expected) / factor[:, None]).max() < (4.5 if "Perceiver" in name_of(case) else 1.5)
