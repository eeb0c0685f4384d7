"""Static INT8 quantisation of an imported network, calibrated on pictures."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from models.importing.graph import IMAGES
from models.importing.reading import first_line
from tierkit.errors import DataError
from tierkit.tensors import Array

__all__ = ["quantised"]

_BATCH = 10


class _Pictures(CalibrationDataReader):  # type: ignore[misc]  # the runtime has no types
    def __init__(self, pictures: Array, batch: int) -> None:
        self._batches = iter(np.array_split(pictures, max(1, len(pictures) // batch)))

    def get_next(self) -> dict[str, Array] | None:
        part = next(self._batches, None)
        return None if part is None else {IMAGES: part}


def quantised(model: onnx.ModelProto, pictures: Array, batch: int | None = None) -> onnx.ModelProto:
    """INT8 weights by output channel and UINT8 activations by tensor; the first and the last steps, which turn pixels
    into the network's input and its output into logits, stay in FP32.

    Args:
        model: with its preprocessing inside.
        pictures: UINT8 `[n, height, width, 3]`.
        batch: Pictures that it takes at once; None for any number.

    Raises:
        DataError: the network has an operator that cannot be quantised.
    """
    ours = [node.name for node in model.graph.node if node.name.startswith(("pixels/", "logits/"))]
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the quantiser recommends what has been done
    try:
        with tempfile.TemporaryDirectory() as folder:
            source, ready, target = (Path(folder) / f"{name}.onnx" for name in ("fp32", "ready", "int8"))
            onnx.save(model, source)
            quant_pre_process(source, ready, skip_symbolic_shape=True)
            quantize_static(
                ready,
                target,
                _Pictures(pictures, batch or _BATCH),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
                nodes_to_exclude=ours,
            )
            return onnx.load(target)
    except Exception as exc:  # the quantiser's own classes
        raise DataError(
            f"the network cannot be quantised to INT8 ({first_line(exc)}): import it without --int8"
        ) from exc
    finally:
        logging.disable(previous)
