"""From a trained checkpoint to shipped weights: ONNX, INT8, manifest entry. Needs the extra `train`."""
