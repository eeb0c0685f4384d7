"""Training images that spread between workers: segments, who holds which, and the tree along which they spread."""
