"""Export of a trained checkpoint to shipped weights: ONNX, INT8, manifest entry. Needs the extra `train`."""

__all__ = ["FP32_NAME"]

FP32_NAME = "fp32.onnx"
"""File of a run folder: the network as it was trained."""
