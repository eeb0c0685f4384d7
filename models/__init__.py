"""Networks, label hierarchy, manifest of shipped weights, ONNX Runtime sessions, data readers."""
