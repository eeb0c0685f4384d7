"""Networks of other people: an ONNX file becomes one of a model set."""
