"""Terrace: cloud-edge-end hierarchical image classification."""
