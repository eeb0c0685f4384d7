"""A better network from a release's network and the pictures that devices have kept."""
