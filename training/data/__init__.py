"""Training images that spread by themselves: segments, the tree that they spread along, and the copying."""
