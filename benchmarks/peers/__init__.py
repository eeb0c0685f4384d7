"""Terrace's node beside other servers: the same network, the same requests, one core for each side.

Each server runs in its own environment on one core, the load generator on another. Every figure stands beside that of
a bare ONNX Runtime loop on the server's core, measured just before and after it. `docs/benchmarking.md` says what is
compared and what is not.
"""
