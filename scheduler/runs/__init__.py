"""Training runs: which there are, how far their hosts say they are, and where workers find those hosts."""
