"""Training images that spread between workers: segments, the workers that hold each, and the tree along which they
spread.
"""
