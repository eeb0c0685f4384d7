"""Terrace's node compared with other servers: the same network, the same requests, one core for each side.

Each server runs in its own environment on one core, the load generator on another. Every figure is compared with a bare
ONNX Runtime loop on the server's core, measured just before and after it. `docs/how-to/benchmarking.md` describes the
comparison.
"""
