"""Networks, label hierarchy, manifest of shipped weights, ONNX Runtime sessions, data readers."""

import os

# From 1.29 on, ONNX Runtime reports its use to its maker and keeps an identifier in the home folder. It looks at this
# once, when it is loaded.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
