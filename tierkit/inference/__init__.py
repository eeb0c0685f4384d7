"""Serving a model: the queue and its thread, the routes, the node and its place in the device list."""
